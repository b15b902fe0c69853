"""Object stores: how they are reached, with which credentials, and their errors in plain words.

Credentials come from where the store's own tools look: the environment, the machine's role, and
for S3 the files in ~/.aws. None is ever written or logged.
"""

import configparser
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

from obstore.exceptions import PermissionDeniedError, UnauthenticatedError
from obstore.store import from_url

# A request that meets a busy or absent server is sent again after 0.1, 0.2, 0.4 ... s, each with
# jitter, until two minutes have passed.
RETRY: Any = {
    "max_retries": 10,
    "retry_timeout": timedelta(minutes=2),
    "backoff": {
        "init_backoff": timedelta(seconds=0.1),
        "max_backoff": timedelta(seconds=15),
        "base": 2,
    },
}
CLIENT: Any = {"connect_timeout": timedelta(seconds=10), "timeout": timedelta(minutes=5)}

# Settings of an S3 client: the name in the files, the names in the environment.
_S3_KEYS = {
    "aws_access_key_id": ("AWS_ACCESS_KEY_ID",),
    "aws_secret_access_key": ("AWS_SECRET_ACCESS_KEY",),
    "aws_session_token": ("AWS_SESSION_TOKEN", "AWS_TOKEN"),
}
_S3_PLACES = {
    "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    "endpoint_url": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
}


def is_remote(url: str) -> bool:
    """Whether the address is an object store's, not a disk's."""
    return "://" in url and not url.startswith("file://")


@lru_cache(maxsize=32)
def connect(url: str) -> Any:
    """The store at the url, kept: its connections are worth more than the object."""
    config: Any = s3_settings(os.environ) if url.startswith("s3://") else {}
    endpoint = config.get("endpoint_url", "")
    client = CLIENT | {"allow_http": True} if endpoint.startswith("http://") else CLIENT
    return from_url(url, config=config or None, client_options=client, retry_config=RETRY)


def s3_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Keys, region and endpoint: the environment's, else those of the profile in ~/.aws.

    Keys are taken from one of the two, never mixed.
    """
    filed = _read_profile(environment)
    keys = _given(environment, _S3_KEYS) or _pick(filed, _S3_KEYS)
    return keys | _pick(filed, _S3_PLACES) | _given(environment, _S3_PLACES)


def _given(environment: Mapping[str, str], wanted: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The settings that the environment has under one of their names."""
    found = {
        setting: next((environment[name] for name in names if environment.get(name)), None)
        for setting, names in wanted.items()
    }
    return {setting: value for setting, value in found.items() if value}


def _pick(filed: Mapping[str, str], wanted: Iterable[str]) -> dict[str, str]:
    return {setting: filed[setting] for setting in wanted if setting in filed}


def _read_profile(environment: Mapping[str, str]) -> dict[str, str]:
    """The profile's settings in ~/.aws/config and ~/.aws/credentials, as far as there are any."""
    profile = environment.get("AWS_PROFILE", "default")
    home = Path(environment.get("HOME", "~")).expanduser() / ".aws"
    places = (
        (environment.get("AWS_CONFIG_FILE", home / "config"), f"profile {profile}"),
        (environment.get("AWS_CONFIG_FILE", home / "config"), profile),  # where it is `default`
        (environment.get("AWS_SHARED_CREDENTIALS_FILE", home / "credentials"), profile),
    )
    found: dict[str, str] = {}
    for path, section in places:
        parser = configparser.ConfigParser(interpolation=None)
        parser.read(path)
        if parser.has_section(section):
            found |= dict(parser[section])
    return found


def explain(error: BaseException) -> str:
    """The error in a few words: what is wrong, without the server's XML and debug output."""
    text = str(error)
    if "NoSuchBucket" in text:
        return "no such bucket"
    if isinstance(error, UnauthenticatedError) or "InvalidAccessKeyId" in text:
        return "the store does not know these credentials"
    if isinstance(error, PermissionDeniedError):
        return "permission denied with these credentials"
    line = (text.splitlines() or [type(error).__name__])[0]
    return line.partition("<?xml")[0].rstrip(": ")
