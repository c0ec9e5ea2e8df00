"""Effect of training options on a tiny model: the plots and pictures of docs/training.md.

    OMP_NUM_THREADS=1 python -m benchmarks.knobs [--work FOLDER] [--out docs/images] [--tiny]

A tiny Sana learns four photographs of scikit-image by their captions, in full rank. Each run then trains a LoRA on
three of the photographs in blue, whose captions end with "blue print", by the stages and the trainer; the fourth
photograph is held out. --work keeps the results, and a second run makes only missing results. Takes five minutes on one
core. --tiny: two steps of all training, and the first value of each option. Requires the extras media, encode, train
and demo, and matplotlib (dev).
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from PIL import Image, ImageOps

from benchmarks.common import run_silently, write_config
from cache.order.schedule import BatchSchedule, Span
from examples.demo_media import EDITS, IMAGES, package_folder, write_caption, write_png
from examples.demo_models import RECIPES, build_checkpoint, train_autoencoder
from schemas.config.methods import Timesteps
from stages import bucket, decode, discover, encode_latents, encode_text, index
from trainer import __main__ as train
from trainer.flow import interpolate, sample_sigma

matplotlib.use("agg")
from matplotlib import pyplot as plt

SIZE, SMALL = 128, 96
PHOTOS = {
    **{name: IMAGES[name] for name in ("astronaut.png", "camera.png", "coffee.png")},
    "rocket.jpg": "A tall white rocket on its launch pad at night, lit by floodlights.",
}
HELD_OUT = "coffee"
STYLE = ", blue print"
#: Option -> values. The run with the first value is the same for all options.
KNOBS: dict[str, tuple[float, ...]] = {
    "train.adapter.rank": (8, 1, 64),
    "train.optimizer.lr": (1e-3, 1e-4, 1e-2),
    "train.shift": (3.0, 0.3, 30.0),
    "train.caption_dropout": (0.1, 0.0, 0.6),
}
#: (option, value) -> folder of the run.
Runs = Mapping[tuple[str, float], Path]
#: Colors that are readable on white and on black.
INK, COLORS = "#7b818c", ("#3b82f6", "#f59e0b", "#10b981", "#ef4444")
plt.rcParams.update(
    {
        "svg.fonttype": "none", "svg.hashsalt": "latentpress", "font.size": 10, "font.family": "sans-serif",
        "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
        "axes.prop_cycle": matplotlib.cycler(color=COLORS), "axes.spines.top": False, "axes.spines.right": False,
        "legend.frameon": False, "savefig.transparent": True, "figure.constrained_layout.use": True,
    }
)  # fmt: skip


@dataclass(frozen=True)
class Scale:
    """autoencoder, sharp, base, run: numbers of training steps of the two autoencoders, the base model and each run.
    every: steps between validations. values: number of values of each option."""

    autoencoder: int = 480
    sharp: int = 300
    base: int = 300
    run: int = 120
    every: int = 20
    values: int = 3


TINY = Scale(autoencoder=1, sharp=1, base=2, run=2, every=1, values=1)


# --- runs ---


def write_photos(media: Path) -> None:
    """Write plain/, blue/ and held-out/ with captions, and all pictures to images/ for the autoencoder."""
    source = package_folder("skimage", "data")
    for name, caption in PHOTOS.items():
        photo = ImageOps.fit(Image.open(source / name).convert("RGB"), (SIZE, SIZE), Image.Resampling.LANCZOS)
        blue, stem = EDITS["blue"](photo), Path(name).stem
        folder = media / ("held-out" if stem == HELD_OUT else "blue")
        for path, picture, words in (
            (media / "plain" / f"{stem}.png", photo, f"{caption}\n{caption}, photograph"),
            (folder / f"{stem}.png", blue, caption + STYLE),
        ):
            write_png(path, picture)
            write_caption(path, words)
            write_png(media / "images" / f"{stem}-{path.parent.name}.png", picture)


def settings(
    work: Path, scale: Scale, run: str, datasets: Sequence[Mapping[str, Any]], model: Path, **options: Any
) -> dict[str, Any]:
    """The settings of a run. options: further options, with __ for the dots of their names."""
    config: dict[str, Any] = {
        "root": str(work / "caches"),
        "output": str(work / "output"),
        "model": {"family": "sana", "flavour": "sana-1.6b-1024px", "path": str(model), "precision": "float32"},
        "datasets": [{"resolution": SIZE, "bucket_step": 1, **dataset} for dataset in datasets],
        "stages": {stage: {"threads": 1, "readers": 1} for stage in ("encode-text", "encode-latents")}
        | {"decode": {"threads": 1}, "max_reject_fraction": 1.0},
        "train": {
            "run": run,
            "steps": scale.run,
            "batch_size": 4,
            "gradient_checkpointing": False,
            "threads": 1,
            "trackers": [],
            "checkpoint_every": scale.run,
            "adapter": {},
            "optimizer": {"warmup": 10, "weight_decay": 0},
        },
        "validation": {"size": f"{SIZE}x{SIZE}", "every": scale.every, "steps": 12, "guidance": 1, "eval_samples": 4},
    }
    for name, value in options.items():
        *path, last = name.split("__")
        place = config
        for key in path:
            place = place.setdefault(key, {})
        place[last] = value
    return config


def do(work: Path, config: dict[str, Any], programs: Sequence[Any]) -> Path:
    """Run programs with a configuration, unless the run is finished. Returns the folder of the run."""
    run = config["train"]["run"]
    folder = work / "output" / run
    if not (folder / "done").exists():
        path = write_config(work / f"{run}.json", config)
        for program in programs:
            run_silently(program.run, path)
        (folder / "done").touch()
        print(f"{run} is trained", flush=True)
    return folder


def train_base(work: Path, media: Path, scale: Scale) -> Path:
    """Train the base checkpoint, whose transformer has learned the four photographs by their captions."""
    base = work / "base"
    if not (base / "done").exists():
        autoencoder = work / "autoencoder"
        if not (autoencoder / "config.json").exists():
            train_autoencoder("dc_ae", media, autoencoder, steps=scale.autoencoder)
        start = work / "start"
        build_checkpoint("sana", autoencoder, start)
        dataset = {"id": "plain", "instance_data_dir": str(media / "plain"), "repeats": 3}
        full = settings(
            work, scale, "base", [dataset], start,
            train__steps=scale.base, train__batch_size=8, train__adapter__type="full", train__optimizer__lr=3e-3,
            train__optimizer__schedule="linear", validation__every=scale.base,
        )  # fmt: skip
        folder = do(work, full, (discover, bucket, encode_text, encode_latents, index, train))
        shutil.copytree(start, base, dirs_exist_ok=True)
        shutil.copytree(folder / "model" / "transformer", base / "transformer", dirs_exist_ok=True)
        (base / "done").touch()
    return base


def train_runs(work: Path, media: Path, base: Path, scale: Scale) -> Runs:
    datasets = [
        {"id": "blue", "instance_data_dir": str(media / "blue"), "repeats": 3},
        {"id": "held-out", "instance_data_dir": str(media / "held-out"), "eval": True},
    ]
    captions = {Path(name).stem: caption for name, caption in PHOTOS.items()}
    prompts = [
        {"name": "trained", "prompt": captions["astronaut"] + STYLE},
        {"name": "unseen", "prompt": captions["coffee"] + STYLE},
        {"name": "plain", "prompt": captions["coffee"]},
    ]
    shared_options = {option.replace(".", "__"): values[0] for option, values in KNOBS.items()}
    folders = {}
    for option, values in KNOBS.items():
        for value in values[: scale.values]:
            options = shared_options | {option.replace(".", "__"): value, "validation__prompts": prompts}
            name = "shared" if value == values[0] else f"{option.rpartition('.')[2]}-{value}"
            config = settings(work, scale, name.replace("_", "-"), datasets, base, **options)
            prepare = () if folders else (discover, bucket, encode_text, encode_latents, index)
            folders[option, value] = do(work, config, (*prepare, train, decode))
    return folders


def read_metrics(run: Path, key: str) -> tuple[list[int], list[float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    pairs = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


# --- pictures ---


def save(figure: Any, path: Path) -> None:
    options = {"metadata": {"Date": None}} if path.suffix == ".svg" else {"dpi": 72, "pil_kwargs": {"optimize": True}}
    figure.savefig(path, **options)
    plt.close(figure)
    if path.suffix == ".png":  # 128 colors: a third of the bytes
        Image.open(path).quantize(128, method=Image.Quantize.FASTOCTREE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def show_pictures(path: Path, rows: Mapping[str, Sequence[Any]], titles: Sequence[str]) -> None:
    """Draw a grid of pictures, with a title for each column and a name for each row."""
    shape = len(rows), len(titles)
    figure, axes = plt.subplots(*shape, figsize=(1.5 * shape[1] + 0.4, 1.5 * shape[0] + 0.3), squeeze=False)
    for y, (name, pictures) in enumerate(rows.items()):
        for x, picture in enumerate(pictures):
            axes[y, x].imshow(picture)
            axes[y, x].set(xticks=[], yticks=[])
            axes[y, x].spines[:].set_visible(False)
            if y == 0:
                axes[y, x].set_title(titles[x], fontsize=12)
        axes[y, 0].set_ylabel(name, fontsize=12)
    save(figure, path)


def read_sample(run: Path, prompt: str, step: int) -> Image.Image:
    return Image.open(run / "samples" / f"step-{step:06d}" / f"{prompt}.png").convert("RGB")


def compare(runs: Runs, option: str, out: Path, name: str, scale: Scale) -> None:
    """Draw curves and samples for the values of an option, the lowest value first."""
    values = sorted(value for knob, value in runs if knob == option)
    figure, axes = plt.subplots(1, 2, figsize=(7.5, 2.6), sharex=True)
    for value in values:
        steps, losses = read_metrics(runs[option, value], "eval_loss")
        axes[1].plot(steps, losses, label=f"{value:g}")
        highest = 1.1 * losses[0]  # of the base model's loss; a run above it has failed
        steps, losses = read_metrics(runs[option, value], "loss")
        means = [np.mean(losses[end - scale.every : end]) for end in range(scale.every, len(losses) + 1)]
        axes[0].plot(steps[scale.every - 1 :], means, label=f"{value:g}")
    axes[0].set(xlabel="step", title=f"training loss, mean of {scale.every} steps")
    axes[1].set(xlabel="step", title="eval loss, held out")
    axes[1].legend(title=option)
    for axis in axes:
        axis.title.set_fontsize(10)
        axis.set_ylim(0, min(highest, axis.get_ylim()[1]))
    save(figure, out / f"knob-{name}.svg")
    prompts = {"trained": "trained\nin blue", "unseen": "unseen\nin blue", "plain": "no style\nword"}
    folders = [runs[option, value] for value in values]
    columns = [(folders[0], 0), *((folder, scale.run) for folder in folders)]
    rows = {label: [read_sample(folder, prompt, step) for folder, step in columns] for prompt, label in prompts.items()}
    show_pictures(out / f"knob-{name}.png", rows, ["before", *(f"{value:g}" for value in values)])


def plot_noise_levels(out: Path) -> None:
    figure, axis = plt.subplots(figsize=(5, 2.4))
    uniform = (torch.arange(400_000) + 0.5) / 400_000
    for shift in (0.3, 1.0, 3.0, 5.0):
        sigma = sample_sigma(uniform, Timesteps(), shift)
        counts, edges = np.histogram(sigma.numpy(), bins=80, range=(0, 1), density=True)
        axis.plot((edges[1:] + edges[:-1]) / 2, counts, label=f"shift {shift:g}")
    axis.set(xlabel="noise level sigma (0: data, 1: noise)", ylabel="how often", yticks=[], xlim=(0, 1), ylim=(0, None))
    axis.legend()
    save(figure, out / "knob-noise-levels.svg")


@torch.no_grad()
def show_noise(work: Path, out: Path, scale: Scale) -> None:
    """Draw a latent with increasing noise, and a photograph in several sizes, decoded by an autoencoder with more
    detail."""
    from diffusers import AutoencoderKL

    photos, folder = work / "sharp", work / "sharp-autoencoder"
    for name in ("chelsea.png", "coffee.png", "astronaut.png"):
        photo = Image.open(package_folder("skimage", "data") / name).convert("RGB")
        write_png(photos / "images" / name, ImageOps.fit(photo, (SMALL, SMALL), Image.Resampling.LANCZOS))
    if not (folder / "config.json").exists():
        RECIPES["flux_vae"] = replace(RECIPES["flux_vae"], media=("images",))
        with torch.enable_grad():
            train_autoencoder("flux_vae", photos, folder, steps=scale.sharp)
    vae = AutoencoderKL.from_pretrained(folder)
    factor = vae.config.scaling_factor

    def read(edge: int) -> torch.Tensor:
        photo = Image.open(photos / "images" / "chelsea.png").resize((edge, edge), Image.Resampling.LANCZOS)
        return torch.from_numpy(np.array(photo)).permute(2, 0, 1)[None] / 127.5 - 1  # HWC -> BCHW

    def picture(latent_BCHW: torch.Tensor) -> np.ndarray:
        pixels = vae.decode(latent_BCHW / factor).sample[0].permute(1, 2, 0)  # CHW -> HWC
        return ((pixels.clamp(-1, 1) + 1) * 127.5).byte().numpy()

    latent = vae.encode(read(SMALL)).latent_dist.mean * factor
    noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(0))
    levels = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    noised = [interpolate(latent, noise, torch.tensor([level])) for level in levels]
    show_pictures(out / "knob-noise.png", {"": [picture(x) for x in noised]}, [f"sigma {level:g}" for level in levels])
    edges = (32, 48, 64, 96)
    small = [picture(vae.encode(read(edge)).latent_dist.mean * factor) for edge in edges]
    titles = [f"{edge}x{edge}\n{(edge // 16) ** 2} tokens" for edge in edges]
    photo = np.asarray(Image.open(photos / "images" / "chelsea.png"))
    show_pictures(out / "knob-resolution.png", {"": [*small, photo]}, [*titles, "photograph\n"])


def plot_repeats(out: Path) -> None:
    """Plot the number of draws of each picture of two datasets in an epoch."""
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "defaults": ({}, {}),
        "first: repeats 3": ({"repeats": 3}, {}),
        "second: weight 0.5": ({}, {"weight": 0.5}),
    }
    figure, axes = plt.subplots(1, len(cases), figsize=(7.5, 2.2), sharey=True)
    for axis, (title, options) in zip(axes, cases.items(), strict=True):
        spans = [Span("64x64@1", 0, 4, **options[0]), Span("64x64@1", 4, 12, **options[1])]
        schedule = BatchSchedule(spans, 0, 1, 1)
        rows = [row for step in range(schedule.micro_batches_per_epoch) for row in step_rows(schedule, step)]
        counts = np.bincount(rows, minlength=16)
        axis.bar(range(16), counts, color=[COLORS[0]] * 4 + [COLORS[1]] * 12)
        axis.set(xticks=[], xlabel=f"{counts[:4].sum()} and {counts[4:].sum()} draws")
        axis.set_title(title, fontsize=10)
    axes[0].set_ylabel("draws in an epoch")
    save(figure, out / "knob-repeats.svg")


def step_rows(schedule: BatchSchedule, step: int) -> list[int]:
    return [int(row) for micro_batch in schedule.step(step) for row in micro_batch.rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="folder that keeps the results; default: a temporary folder")
    parser.add_argument("--tiny", action="store_true", help="two steps of all training")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "docs" / "images")
    options = parser.parse_args()
    scale = TINY if options.tiny else Scale()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        work = (options.work or Path(temporary)).resolve()
        media = work / "media"
        write_photos(media)
        plot_noise_levels(options.out)
        plot_repeats(options.out)
        show_noise(work, options.out, scale)
        base = train_base(work, media, scale)
        runs = train_runs(work, media, base, scale)
        names = {"rank": "train.adapter.rank", "rate": "train.optimizer.lr", "shift": "train.shift"}
        for name, option in (names | {"dropout": "train.caption_dropout"}).items():
            compare(runs, option, options.out, name, scale)


if __name__ == "__main__":
    main()
