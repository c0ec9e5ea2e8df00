"""Whether the demo's samples give back their media: of each caption the sample is compared with all originals, and of
an edit with the source images too, which an edit that changed nothing would be nearest to.

    python -m examples.demo_check demo/t2i/output/demo

`decode` has put the original and the reconstruction of each caption's training sample beside the run's samples.
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
    """Of a caption. psnr: of its sample and its original, in dB; nearest: the original that its sample is nearest to,
    "source of NAME" where it is a source image.
    motion: of a clip, the correlation of what changes since the first frame with what changes in the original; 0 for a
    clip that stands still or moves otherwise."""

    name: str
    psnr: float
    nearest: str
    motion: float | None


def read_frames(path: Path) -> np.ndarray:
    """(T, H, W, 3) in 0..1."""
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
    """What the run's prompts start from, cut to the size as the samples are; none for clips, which begin with it."""
    from PIL import Image, ImageOps

    sources = {}
    for prompt in YAML(typ="safe").load(run / "config.yaml")["validation"]["prompts"]:
        if prompt.get("image"):
            with Image.open(prompt["image"]) as image:
                fitted = ImageOps.fit(image.convert("RGB"), size, Image.Resampling.BICUBIC)
            sources[f"source of {prompt['name']}"] = np.asarray(fitted, np.float64)[None] / 255
    return sources


def measure_likeness(run: Path, step: int | None = None) -> list[Likeness]:
    """Of each caption that is a prompt, at a validation; None: the last."""
    samples = max((run / "samples").glob("step-*")) if step is None else run / f"samples/step-{step:06d}"
    folders = sorted(path for path in (run / FOLDER).iterdir() if path.is_dir())
    originals = {folder.name: read_frames(next(folder.glob(f"{ORIGINAL}.*"))) for folder in folders}
    _, height, width, _ = next(iter(originals.values())).shape
    still = all(len(frames) == 1 for frames in originals.values())
    compared = originals | (read_sources(run, (width, height)) if still else {})
    found = []
    for folder in folders:
        sample, own = read_frames(next(samples.glob(f"{folder.name}.*"))), originals[folder.name]
        motion = correlate_changes(sample, own) if len(own) > 1 else None
        nearest = max(compared, key=lambda name: decibels(sample, compared[name]))
        found.append(Likeness(folder.name, decibels(sample, own), nearest, motion))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run")
    for one in measure_likeness(parser.parse_args().run):
        print(json.dumps(vars(one)))


if __name__ == "__main__":
    main()
