"""Job files written for people: `lakemap init` and the demo's."""

from importlib.resources import files
from pathlib import Path

from pipeline.config import TrainConfig
from pipeline.errors import ConfigError


def write_job_file(path: Path, lake: str, vector: str, output: str) -> None:
    """Write a commented job file; one that exists is not touched."""
    train = TrainConfig()
    text = files("jobs").joinpath("template.yaml").read_text()
    filled = text.format(
        name=path.stem,
        input=lake,
        vector=vector,
        output=output,
        kind=train.encoder.kind,
        hidden=train.encoder.hidden,
        layers=train.encoder.layers,
        steps=train.steps,
        batch=train.batch,
        learning_rate=train.learning_rate,
        exaggeration=train.exaggeration,
        exaggerated_share=train.exaggerated_share,
        noise=train.noise,
        clip_pairwise=train.clip_pairwise,
        clip_layer=train.clip_layer,
    )
    try:
        with path.open("x") as file:
            file.write(filled)
    except FileExistsError as error:
        raise ConfigError(f"{path}: exists already; name another file or remove it") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from error
