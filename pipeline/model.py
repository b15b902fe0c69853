"""The model of a published run: its encoder, and the reference that tells how new a row is."""

from functools import lru_cache

from encoders.artifact import HEADER_FILE, WEIGHTS_FILE, ArtifactError, Encoder
from encoders.reference import REFERENCE_FILE, Reference
from pipeline.errors import InputError
from pipeline.stage import StoreRef


@lru_cache(maxsize=2)
def load_model(ref: StoreRef) -> tuple[Encoder, Reference]:
    """The model of the run at the folder, loaded once per process; digest is its encoder's."""
    names = (WEIGHTS_FILE, HEADER_FILE, REFERENCE_FILE)
    found = {name: ref.folder.find(f"model/{name}") for name in names}
    files = {name: data for name, data in found.items() if data is not None}
    try:
        encoder = Encoder.from_files(files)
        if REFERENCE_FILE not in files:
            raise ArtifactError(
                f"encoder: {REFERENCE_FILE} is missing; an earlier version made this map, "
                "lakemap run makes one that can be refreshed"
            )
        reference = Reference.from_bytes(files[REFERENCE_FILE], encoder)
    except ArtifactError as error:
        raise InputError(f"{ref.folder.url}: {error}") from error
    return encoder, reference
