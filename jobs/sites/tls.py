"""Certificates with which driver, scheduler and workers know each other."""

import ssl
from pathlib import Path

from distributed import Security

from jobs.sites.site import first_line
from pipeline.cluster_config import TlsConfig
from pipeline.errors import ConfigError


def make_security(tls: TlsConfig) -> Security:
    """The certificates, after a look at whether they can be used."""
    for key, path in (("ca", tls.ca), ("cert", tls.cert), ("key", tls.key)):
        if not Path(path).is_file():
            raise ConfigError(f"cluster.tls.{key}: {path} is not there; give a PEM file")
    try:
        context = ssl.create_default_context(cafile=tls.ca)
        context.load_cert_chain(tls.cert, tls.key)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cluster.tls: {tls.ca}, {tls.cert} and {tls.key} cannot be used together "
            f"({first_line(error)}); give PEM files, and the key that belongs to the certificate"
        ) from error
    roles = ("client", "scheduler", "worker")
    files = {f"tls_{role}_cert": tls.cert for role in roles}
    files |= {f"tls_{role}_key": tls.key for role in roles}
    return Security(tls_ca_file=tls.ca, require_encryption=True, **files)
