"""Share of copies of real photographs that `features` finds, and its time compared with the forward pass of its model.

    python -m benchmarks.features copies [--photographs 19] [--model FOLDER]
    python -m benchmarks.features rate [--images 96] [--repeat 3]

copies: photographs of scikit-image, each with changed copies, in one dataset: share of copies in the group of their
photograph, and number of pairs in a group that belong to one photograph. By default without a model, because a model
with random weights would add random candidates. Also the confirmation alone, for each copy with its photograph, and for
all pairs of photographs.

rate: whole processes in turns, on one thread: the stage, and a bare program that opens a picture, resizes it and calls
the model. The model is a DINOv2 of small size with random weights in float32, at 224 pixels.
"""

import argparse
import importlib.util
import io
import shutil
import tempfile
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.caption import run_process
from benchmarks.common import (
    make_parser,
    measure_by_turns,
    medians,
    print_header,
    print_row,
    run_silently,
    write_config,
)
from benchmarks.discover import make_jpeg, unique_jpeg, write_item
from cache.sets.item_rows import read_item_table
from cache.store.store import Store
from schemas.config.loading import load_config
from stages import discover, features
from stages.discovery.media_table import read_configured_media
from stages.encoding.features.confirmation import LocalFeatures, are_copies, find_local_features
from stages.encoding.features.settings import EDGE
from stages.encoding.item_plans import find_item_table

SIZES = ((1152, 896), (896, 1152), (1024, 1024))
#: Photographs and scans of scikit-image, without drawings.
PHOTOGRAPHS = (
    *("astronaut.png", "chelsea.png", "coffee.png", "camera.png", "rocket.jpg", "motorcycle_left.png", "coins.png"),
    *("hubble_deep_field.jpg", "ihc.png", "page.png", "text.png", "brick.png", "grass.png", "gravel.png", "moon.png"),
    *("retina.jpg", "cell.png", "microaneurysms.png", "motorcycle_right.png"),
)
Change = Callable[[Image.Image], Image.Image]


def crop(share: float, across: float = 0.3, down: float = 0.6) -> Change:
    def cropped(image: Image.Image) -> Image.Image:
        x, y = round(across * (1 - share) * image.width), round(down * (1 - share) * image.height)
        return image.crop((x, y, x + round(share * image.width), y + round(share * image.height)))

    return cropped


def scale(share: float) -> Change:
    return lambda image: image.resize((round(share * image.width), round(share * image.height)))


def compress(image: Image.Image) -> Image.Image:
    with io.BytesIO() as file:
        image.save(file, "JPEG", quality=30)
        return Image.open(file).convert("RGB")


def mirror(image: Image.Image) -> Image.Image:
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def with_bars(image: Image.Image) -> Image.Image:
    wider = Image.new("RGB", (image.width, round(1.25 * image.height)))
    wider.paste(image, (0, image.height // 8))
    return wider


CHANGES: dict[str, Change] = {
    "half the size": scale(0.5),
    "a quarter of the size": scale(0.25),
    "JPEG of quality 30": compress,
    "mirrored": mirror,
    "brighter": lambda image: image.point(lambda value: min(255, round(1.3 * value + 10))),
    "black bars": with_bars,
    "0.9 of each side": crop(0.9),
    "0.7 of each side": crop(0.7),
    "0.5 of each side": crop(0.5),
    "0.85 of each side, mirrored, JPEG": lambda image: compress(mirror(crop(0.85, 1, 0.2)(image))),
}


def find_copies(options: argparse.Namespace) -> None:
    spec = importlib.util.find_spec("skimage")
    assert spec is not None and spec.origin is not None, "pip install scikit-image"
    folder = Path(spec.origin).parent / "data"
    pictures = {photo: Image.open(folder / photo).convert("RGB") for photo in PHOTOGRAPHS if (folder / photo).exists()}
    pictures = dict([*pictures.items()][: options.photographs])
    with tempfile.TemporaryDirectory() as temporary:
        groups = group_copies(Path(temporary), pictures, options)
    owners = {photo: photo.partition(" ")[0] for photo in groups}
    local_features = {photo: _local(image) for photo, image in pictures.items()}
    print(f"{len(pictures)} photographs, {len(CHANGES)} copies of each, model {options.model or 'null'}")
    print_header("copy", "copies", "in its group", "confirmed alone")
    together = confirmed = 0
    for name, change in CHANGES.items():
        grouped = sum(groups[f"{photo} {name}"] == groups[photo] is not None for photo in pictures)
        alone = sum(are_copies(local_features[photo], _local(change(image))) for photo, image in pictures.items())
        print_row(name, str(len(pictures)), f"{grouped / len(pictures):.2f}", f"{alone / len(pictures):.2f}")
        together, confirmed = together + grouped, confirmed + alone
    count = len(pictures) * len(CHANGES)
    print_row("all", str(count), f"{together / count:.3f}", f"{confirmed / count:.3f}")
    pairs = [pair for pair in combinations(groups, 2) if groups[pair[0]] == groups[pair[1]] is not None]
    wrong_pairs = [pair for pair in pairs if owners[pair[0]] != owners[pair[1]]]
    wrong_names = sorted({f"{owners[first]} and {owners[second]}" for first, second in wrong_pairs})
    print(f"pairs in a group: {len(pairs)}, of one photograph: {len(pairs) - len(wrong_pairs)}; of two: {wrong_names}")
    alike = [
        f"{first} and {second}"
        for first, second in combinations(local_features, 2)
        if are_copies(local_features[first], local_features[second])
    ]
    print(f"pairs of photographs: {len(local_features) * (len(local_features) - 1) // 2}, confirmed alone: {alike}")


def group_copies(folder: Path, pictures: dict[str, Image.Image], options: argparse.Namespace) -> dict[str, str | None]:
    """Run the whole program. Returns name of a photograph, or name and change of a copy -> its group."""
    (folder / "media").mkdir()
    for name, image in pictures.items():
        for change_name, change in {"": lambda image: image, **CHANGES}.items():
            file = folder / "media" / f"{name} {change_name}.png"
            change(image).save(file)
            file.with_suffix(".txt").write_text("a photograph")
    path = write_project(folder, {"model": options.model})
    run_silently(features.run, path)
    config = load_config(path)
    store, media = Store(config.root), {"media": read_configured_media(Store(config.root), config.datasets[0])}
    table = read_item_table(store, find_item_table(config, media))
    assert table is not None
    of = dict(zip(table["media_id"].to_pylist(), table["duplicate_group"].to_pylist(), strict=True))
    rows = zip(media["media"]["path"].to_pylist(), media["media"]["media_id"].to_pylist(), strict=True)
    return {path.removesuffix(".png").strip(): of[media_id] for path, media_id in rows}


def write_project(folder: Path, section: dict[str, object]) -> Path:
    """Make a project, and run discover. Returns the path of its configuration."""
    config = {
        "root": "work",
        "model": {"family": "kandinsky5-image", "path": str(folder), "precision": "float32"},  # not read
        "datasets": [{"id": "media", "instance_data_dir": "media"}],
        "features": section,
        "stages": {"features": {"threads": 1, "device": "cpu", "readers": 1}},
    }
    path = write_config(folder / "pipeline.json", config)
    run_silently(discover.run, path)
    return path


def _local(image: Image.Image) -> LocalFeatures:
    factor = EDGE / np.sqrt(image.width * image.height)
    size = max(1, round(image.width * factor)), max(1, round(image.height * factor))
    return find_local_features(np.asarray(image.resize(size, Image.Resampling.LANCZOS)))


def forward(path: Path) -> None:
    """Run the bare program on batches of pictures of one size."""
    import torch
    from transformers import Dinov2Model

    torch.set_num_threads(1)
    config = load_config(path)
    assert config.features is not None and config.features.source is not None
    model = Dinov2Model.from_pretrained(config.features.source).eval()
    files = sorted((path.parent / "media").glob("*.jpg"))
    by_size: dict[tuple[int, int], list[Path]] = {}
    for number, file in enumerate(files):
        by_size.setdefault(SIZES[number % len(SIZES)], []).append(file)
    for (width, height), names in by_size.items():
        sides = tuple(round(16 * ratio**0.5) * 14 for ratio in (width / height, height / width))
        for start in range(0, len(names), config.features.batch_size):
            opened = [Image.open(name).convert("RGB") for name in names[start : start + config.features.batch_size]]
            resized = np.stack([np.asarray(image.resize(sides, Image.Resampling.BICUBIC)) for image in opened])
            pixels = torch.from_numpy(resized).permute(0, 3, 1, 2).float() / 255
            with torch.no_grad():
                vectors = model((pixels - 0.45) / 0.225).last_hidden_state[:, 0]
            assert len(vectors) == len(opened)


def measure_rate(options: argparse.Namespace) -> None:
    from transformers import Dinov2Config, Dinov2Model

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        Dinov2Model(
            Dinov2Config(hidden_size=384, num_hidden_layers=12, num_attention_heads=6, patch_size=14, image_size=518)
        ).save_pretrained(folder / "model")
        pictures = [make_jpeg(*size, seed) for seed, size in enumerate(SIZES)]
        for number in range(options.images):
            write_item(folder / "media" / f"{number:05d}.jpg", unique_jpeg(pictures[number % len(SIZES)], number))
        path = write_project(folder, {"model": str(folder / "model"), "duplicates": False})

        def run_stage(*more: str) -> tuple[float, float]:
            for result_folder in ("features", "items"):
                shutil.rmtree(folder / "work" / result_folder, ignore_errors=True)
            return run_process(["-m", "stages.features", "--config", str(path), *more])

        ways = {
            "features": run_stage,
            "features without a model": lambda: run_stage("--set", "features.model=null"),
            "the model alone": lambda: run_process(["-m", "benchmarks.features", "rate", "--bare", str(path)]),
        }
        times = measure_by_turns(ways, options.repeat, uncounted=1)
    times_by_way = {name: medians(rows) for name, rows in times.items()}
    print(f"{options.images} JPEG files of 1 megapixel")
    print_header("whole program", "s", "processor s", "pictures/s", "ratio of features, s and processor s")
    for name, (seconds, processor) in times_by_way.items():
        ratio = times_by_way["features"][0] / seconds, times_by_way["features"][1] / processor
        print_row(
            name,
            f"{seconds:.1f}",
            f"{processor:.1f}",
            f"{options.images / seconds:.2f}",
            f"{ratio[0]:.2f}, {ratio[1]:.2f}",
        )


def main(argv: list[str] | None = None) -> None:
    parser = make_parser(__doc__, repeat=3)
    parser.add_argument("measurement", choices=("copies", "rate"))
    parser.add_argument("--photographs", type=int, default=len(PHOTOGRAPHS))
    parser.add_argument("--model", help="folder or repository of a DINOv2")
    parser.add_argument("--images", type=int, default=96)
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.bare:
        forward(options.bare)
    else:
        (find_copies if options.measurement == "copies" else measure_rate)(options)


if __name__ == "__main__":
    main()
