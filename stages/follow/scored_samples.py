"""The decoded validation samples of a run, by step, with what the trainer wrote about each. Imports no torch."""

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from cache.models.weights import hash_file
from cache.runs.training_run import read_description
from cache.runs.validation_files import find_picture, list_validations
from schemas.identity import hash_json
from stages.media.files import MediaError
from stages.media.preview_mark import is_preview


@dataclass(frozen=True)
class Sample:
    """A validation sample at a step. group: its prompt's name, and what varies but the seed. picture: its file."""

    name: str
    group: str
    seed: int
    prompt: str
    picture: Path

    def content(self) -> str:
        """Hash of what a score is of: the file and the prompt. "" where the file can't be read."""
        try:
            return hash_json([hash_file(self.picture, None), self.prompt])
        except OSError:
            return ""


@dataclass(frozen=True)
class StepSamples:
    """waiting: names of the samples that are not decoded yet."""

    step: int
    samples: tuple[Sample, ...]
    waiting: tuple[str, ...]


def find_samples(folder: Path) -> list[StepSamples]:
    """Find the samples of each step of the run in `folder`, by step. A preview is not scored."""
    steps = []
    validations = [file for file in list_validations(folder) if file.latent is not None]
    for step, files in groupby(validations, key=lambda file: file.step):
        samples, waiting = [], []
        for latent in [file.latent for file in files if file.latent is not None]:
            picture, about = find_picture(latent), read_description(latent)
            if picture is None or is_preview(picture):
                waiting.append(latent.stem)
            else:
                group, seed = about.get("group", latent.stem), about.get("seed", 0)
                samples.append(Sample(latent.stem, str(group), int(seed), str(about.get("prompt", "")), picture))
        steps.append(StepSamples(step, tuple(samples), tuple(waiting)))
    return steps


def frame_numbers(count: int, most: int) -> list[int]:
    """At most `most` of `count` frames: the middle ones of equal parts."""
    number = min(count, most)
    return [(2 * part + 1) * count // (2 * number) for part in range(number)]


def read_sample(path: Path, most: int) -> np.ndarray:
    """frames_FHWC uint8 of a picture, or at most `most` of a clip. Raises MediaError."""
    from stages.media.image import load_image
    from stages.media.video import probe_video, read_frames

    if path.suffix == ".png":
        return np.asarray(load_image(path))[None]
    about = probe_video(path)
    # In the middle of a frame's time; the clips that decode writes have a constant rate.
    times = [(number + 0.5) / about.rate for number in frame_numbers(about.frames, most)]
    if not times:
        raise MediaError("no-frames", path, "has no frames", "delete it, and run `latentpress decode`")
    return np.stack(list(read_frames(path, times)))
