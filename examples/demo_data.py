"""Preparation of data: `make demo FLAVOUR=data`.

The data are photographs without captions, some of them several times: smaller, mirrored, cropped. `latentpress caption`
describes them, `latentpress features` finds near-duplicates, and `latentpress masks` finds the subject of each
photograph, with tiny models that are trained on these photographs first. `bucket` reports the option that leaves out
the near-duplicates. Nothing is encoded or trained.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from examples.demo_media import package_folder, write_png
from stages.rehearsing.tiny_models import build

KIND = "kandinsky5-image-t2i"  # a kind whose text encoder is a Qwen2.5-VL
NAME = "data"
ROOT = Path(__file__).resolve().parent.parent
PROMPT, DESCRIBED_PIXELS = "plain", 112  # 16 tokens for each picture
SUBJECT = "subject"  # class that is masked
Box = tuple[float, float, float, float]
# file in skimage/data -> (caption, box of the subject as shares of width and height), which the models learn
PHOTOGRAPHS: dict[str, tuple[str, Box]] = {
    "astronaut.png": (
        "A smiling astronaut in an orange suit before a flag and a model of the shuttle.", (0.1, 0, 0.8, 1)
    ),
    "camera.png": (
        "A man in a dark coat looks through a camera on a tripod, black and white photograph.", (0.05, 0.08, 0.55, 0.98)
    ),
    "chelsea.png": ("A small cat with green eyes looks at the camera.", (0, 0, 0.9, 1)),
    "coffee.png": ("A cup of coffee on a saucer with a silver spoon on a wooden table.", (0.1, 0.05, 0.85, 0.97)),
    "coins.png": ("Rows of old coins on a dark background, black and white photograph.", (0.02, 0.02, 0.98, 0.98)),
    "hubble_deep_field.jpg": ("Small bright galaxies in the dark sky.", (0, 0, 1, 1)),
    "motorcycle_left.png": ("A red motorcycle stands in a garage before a wall.", (0.13, 0.2, 0.95, 0.93)),
    "rocket.jpg": ("A rocket on the launch pad at night in bright light.", (0.4, 0.2, 0.62, 0.98)),
}  # fmt: skip
CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "smaller": lambda photo: photo.resize((photo.width // 2, photo.height // 2), Image.Resampling.LANCZOS),
    "mirrored": ImageOps.mirror,
    "cropped": lambda photo: photo.crop((0, photo.height // 8, photo.width * 7 // 8, photo.height)),
}


def write_photographs(out: Path) -> dict[Path, tuple[str, Box]]:
    """Each photograph, and of every other one its changed copies. Can be repeated. file -> what is learned from it."""
    folder, learned = package_folder("skimage", "data"), {}
    for number, (file, label) in enumerate(PHOTOGRAPHS.items()):
        with Image.open(folder / file) as opened:
            photo = opened.convert("RGB")
        learned[(out / file).with_suffix(".png")] = label
        write_png((out / file).with_suffix(".png"), photo)
        for name, change in CHANGES.items() if number % 2 == 0 else ():
            write_png(out / f"{Path(file).stem}-{name}.png", change(photo))
    return learned


def run_stages(out: Path) -> None:
    """Run the stages on out/data/photographs, up to the page out/data/plan.html. Raises SystemExit if a stage fails."""
    folder = out / NAME
    learned = write_photographs(folder / "photographs")
    models, trained = folder / "models", folder / "models" / "trained"
    if not trained.exists():
        print(
            f"==> {NAME}: training a tiny Qwen2.5-VL and a tiny SegFormer on these photographs (only the first time)",
            flush=True,
        )
        from examples.demo_data_models import train_describer, train_segmenter

        shutil.rmtree(models, ignore_errors=True)
        build(KIND, models / KIND)
        train_describer({path: caption for path, (caption, _) in learned.items()}, models / KIND)
        train_segmenter({path: box for path, (_, box) in learned.items()}, models / "segformer")
        trained.touch()
    path = folder / "pipeline.yaml"
    path.write_text(json.dumps(pipeline_settings(folder), indent=2))
    for words in (
        "discover",
        "features",
        "caption",
        "masks",
        "bucket",
        f"preview --plan --samples 30 --out {folder}/plan.html",
    ):
        print(f"==> {NAME}: latentpress {words.partition(' --out')[0]}", flush=True)
        command = [sys.executable, "-P", "-m", "latentpress", *words.split(), "--config", str(path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
        assert process.stdout is not None
        for line in process.stdout:
            print(f"[{NAME}] {line}", end="", flush=True)
        if process.wait():
            sys.exit(f"{NAME}: latentpress {words} ended with {process.returncode}")


def pipeline_settings(folder: Path) -> dict[str, Any]:
    return {
        "root": "work",
        "output": "output",
        "model": {"family": "kandinsky5-image", "path": str(folder / "models" / KIND), "precision": "float32"},
        "datasets": [{"id": "photographs", "instance_data_dir": str(folder / "photographs"), "resolution": 96}],
        "caption": {"prompts": [PROMPT], "resolution": DESCRIBED_PIXELS, "max_tokens": 60},
        "features": {"model": None},
        "masks": {"model": str(folder / "models" / "segformer"), "classes": [SUBJECT], "resolution": 256},
        "train": {"methods": {"masked_loss": {}}},
        "stages": {"caption": {"threads": 1}, "masks": {"threads": 1}, "max_reject_fraction": 1.0},
    }
