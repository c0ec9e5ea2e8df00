"""Checks whether the demo's samples reproduce their media. The sample of each caption is compared with all originals,
and the sample of an edit also with the source images, because an edit without a change is nearest to its source.

    python -m examples.demo_check demo/t2i/output/demo

`decode` writes the original and the reconstruction of each caption's training sample next to the run's samples.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from ruamel.yaml import YAML

from stages.pages.training_samples import FOLDER, ORIGINAL


@dataclass(frozen=True)
class Likeness:
    """Similarity of a caption's sample to its original. psnr: PSNR in dB. nearest: name of the nearest original, or
    "source of NAME" for a source image. motion: for a clip, the correlation of the changes since the first frame with
    those in the original; 0 for a clip that does not move or moves differently."""

    name: str
    psnr: float
    nearest: str
    motion: float | None


def read_frames(path: Path) -> np.ndarray:
    """Read a picture or clip: (T, H, W, 3) in 0..1."""
    if path.suffix == ".png":
        from PIL import Image

        return np.asarray(Image.open(path).convert("RGB"), np.float64)[None] / 255
    import av

    with av.open(str(path), "r") as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(container.streams.video[0])]
    return np.stack(frames).astype(np.float64) / 255


def decibels(first: np.ndarray, second: np.ndarray) -> float:
    return float(-10 * np.log10(np.square(first - second).mean()))


def correlate_changes(first: np.ndarray, second: np.ndarray) -> float:
    changes = [(clip[1:] - clip[:1]).ravel() for clip in (first, second)]
    return float(np.corrcoef(*changes)[0, 1])


def read_sources(run: Path, size: tuple[int, int]) -> dict[str, np.ndarray]:
    """Read the source images of the run's prompts, cropped to the size of the samples: "source of NAME" -> (1, H, W,
    3)."""
    from PIL import Image, ImageOps

    sources = {}
    for prompt in YAML(typ="safe").load(run / "config.yaml")["validation"]["prompts"]:
        if prompt.get("image"):
            with Image.open(prompt["image"]) as image:
                fitted = ImageOps.fit(image.convert("RGB"), size, Image.Resampling.BICUBIC)
            sources[f"source of {prompt['name']}"] = np.asarray(fitted, np.float64)[None] / 255
    return sources


def measure_likeness(run: Path, step: int | None = None) -> list[Likeness]:
    """Measure the similarity for each caption that is a prompt. step: step of the validation, by default the last."""
    samples = max((run / "samples").glob("step-*")) if step is None else run / f"samples/step-{step:06d}"
    folders = sorted(path for path in (run / FOLDER).iterdir() if path.is_dir())
    originals = {folder.name: read_frames(next(folder.glob(f"{ORIGINAL}.*"))) for folder in folders}
    _, height, width, _ = next(iter(originals.values())).shape
    still = all(len(frames) == 1 for frames in originals.values())
    candidates = originals | (read_sources(run, (width, height)) if still else {})
    likenesses = []
    for folder in folders:
        sample, original = read_frames(next(samples.glob(f"{folder.name}.*"))), originals[folder.name]
        motion = correlate_changes(sample, original) if len(original) > 1 else None
        nearest = max(candidates, key=lambda name: decibels(sample, candidates[name]))
        likenesses.append(Likeness(folder.name, decibels(sample, original), nearest, motion))
    return likenesses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run")
    for one in measure_likeness(parser.parse_args().run):
        print(json.dumps(vars(one)))


if __name__ == "__main__":
    main()
