"""The files of a run's validations: the latents of the trainer, and the pictures and clips that were decoded of them.

<run>/validation/step-000500/<name>.safetensors
<run>/samples/step-000500/<name>.png|mp4
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache.runs.training_run import read_description, step_of
from schemas.config.pipeline import Config

SUFFIXES = (".png", ".mp4")


@dataclass(frozen=True)
class ValidationFile:
    """A validation sample at a step, of which at least one file is there. picture: a clip, too; it may be of an earlier
    run of the same name."""

    step: int
    name: str
    latent: Path | None
    picture: Path | None


def list_validations(folder: Path) -> list[ValidationFile]:
    """List the validations of the run in `folder`, by step and name."""
    latents = _list_files(folder / "validation", (".safetensors",))
    pictures = _list_files(folder / "samples", SUFFIXES)
    return [ValidationFile(*key, latents.get(key), pictures.get(key)) for key in sorted(latents | pictures)]


def _list_files(folder: Path, suffixes: tuple[str, ...]) -> dict[tuple[int, str], Path]:
    """(step, name) -> file"""
    return {
        (step, path.stem): path
        for path in folder.glob("step-*/*")
        if path.suffix in suffixes and not path.name.startswith(".") and (step := step_of(path.parent)) is not None
    }


def is_current(picture: Path, latent: Path) -> bool:
    """Tell whether the picture is there, and not of an earlier run of the same name: no older than its latent."""
    try:
        return picture.stat().st_mtime_ns >= latent.stat().st_mtime_ns
    except OSError:
        return False


def find_picture(latent: Path) -> Path | None:
    """The current picture or clip of a latent."""
    folder = latent.parents[2] / "samples" / latent.parent.name
    return next(
        (path for path in (folder / f"{latent.stem}{suffix}" for suffix in SUFFIXES) if is_current(path, latent)), None
    )


def describe_latents(config: Config, folder: Path, step: int) -> list[tuple[Path, dict[str, Any]]]:
    """The latents of a validation in the order of the prompts, and what the trainer wrote about each."""
    order = {prompt.prompt: number for number, prompt in enumerate(config.validation.prompts)}
    latents = [file.latent for file in list_validations(folder) if file.step == step and file.latent]
    described = [(latent, read_description(latent)) for latent in latents]
    return sorted(described, key=lambda latent: (order.get(str(latent[1].get("prompt")), len(order)), latent[0].stem))
