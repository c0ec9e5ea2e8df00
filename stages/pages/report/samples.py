"""The validation samples of a run as a grid: a row for each, a cell for each step, pictures and playing clips.

The trainer writes latents (validation/<step>/<name>.safetensors), decode makes files of them (samples/<step>/), and
of the training samples whose captions the prompts are. What is shown is small enough for one page; a cell without a
file says what is missing.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import copyfile
from typing import Any
from urllib.parse import quote

from cache.models.weights import hash_file
from cache.runs.training_run import spread
from cache.runs.validations import SUFFIXES, describe_sample, latent_path, list_validations, read_mark
from cache.store.files import make_folders, replacing
from cache.store.json_checks import ImagedPrompt
from schemas.config.pipeline import Config
from schemas.config.section import listed
from schemas.config.validation import ValidationSample
from schemas.errors import LatentpressError
from stages.discovery.sources.base import open_source
from stages.media.files import MediaError, MediaPath
from stages.pages import training_samples
from stages.pages.html import Figure, Gallery
from stages.pages.pictures import THUMBNAIL_BOX, Picture, shrink
from stages.planning.validation_prompts import describe_image

MAX_STEPS = 16  # columns
MAX_CELLS = 480  # of a page, with originals, reconstructions and source images
MIN_STEPS = 3  # the first, a middle one and the last, before prompts are left out
MIN_CELL_BYTES, MAX_CELL_BYTES = 3_000, 300_000
SOURCE_BOX, SOURCE_BYTES = (160, 160), 12_000
Step = int
Folders = tuple[Path, Path]


@dataclass(frozen=True)
class RunSamples:
    """A validation sample of a run. settings: seed, size, steps, guidance. problem: why its source image is not shown.
    gallery: the source image, the training sample whose caption the prompt is, as it was encoded and decoded again,
    where there are these, and the steps."""

    run: str
    name: str
    prompt: str
    negative_prompt: str
    settings: str
    problem: str
    gallery: Gallery


@dataclass
class SampleGrid:
    """rows: group of samples that differ by their seeds -> each of them, of each run. notes: what is not shown, and
    where it is."""

    rows: dict[str, list[RunSamples]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Files:
    """A run's files of validation. samples: those of the configuration, by name. files: (name, step) -> path of the
    picture or clip, None where not decoded."""

    run: str
    folder: Path
    config: Config
    samples: dict[str, ValidationSample]
    files: dict[tuple[str, Step], Path | None]

    @property
    def steps(self) -> list[Step]:
        return sorted({step for _, step in self.files})


def gather_samples(
    runs: Sequence[tuple[str, Path, Config]], max_bytes: int, beside: Folders | None = None
) -> SampleGrid:
    """The grid of runs (name, folder, configuration), of at most `max_bytes` of pictures and clips.

    beside: a folder for whole files, which cells link to, and the page's folder. It gets links or copies of the files.
    """
    listings = [_find_files(*run) for run in runs]
    grid = SampleGrid()
    for listing in listings:
        label = f"{listing.run}: " if len(runs) > 1 else ""
        count = len(listing.files)
        if not count:
            why = "no validation was made yet" if listing.config.validation.prompts else "validation.prompts has none"
            grid.missing.append(f"{label}no samples: {why}.")
        elif undecoded := sum(path is None for path in listing.files.values()):
            grid.missing.append(f"{label}{undecoded} of {count} samples are not decoded: latentpress decode.")
    names, columns, limit = _share(listings, max_bytes, grid)
    for name in names:
        for listing in listings:
            steps = [step for step in spread(listing.steps, columns) if (name, step) in listing.files]
            if steps:
                group, row = _read_row(listing, name, steps, limit, beside)
                grid.rows.setdefault(group, []).append(row)
    return grid


def _share(listings: Sequence[_Files], max_bytes: int, grid: SampleGrid) -> tuple[list[str], int, int]:
    """(names of the rows, columns, bytes of a cell) with which all cells have at most `max_bytes`. `grid` gets notes of
    what is left out."""
    runs: dict[
        str, list[tuple[int, int]]
    ] = {}  # name -> of each run that has it: its steps, the cells in front of them
    for listing in listings:
        condition = listing.config.model.condition
        extra = 2 if (listing.folder / training_samples.FOLDER).is_dir() else 0
        extra += 0 if condition is None else condition.most  # source images
        for name, steps in Counter(name for name, _ in listing.files).items():
            runs.setdefault(name, []).append((steps, extra))
    names, most = list(runs), max((len(listing.steps) for listing in listings), default=0)
    columns, cells = min(most, MAX_STEPS), min(MAX_CELLS, max_bytes // MIN_CELL_BYTES)

    def count() -> int:
        return sum(min(columns, steps) + extra for name in names for steps, extra in runs[name])

    while columns > MIN_STEPS and count() > cells:
        columns -= 1
    while count() > cells:
        names.pop()
    if len(names) < len(runs):
        grid.notes.append(f"{len(names)} of {len(runs)} rows are shown; the samples folder has all.")
    if most > columns:
        grid.notes.append(f"At most {columns} of {most} steps are shown, spread evenly; the samples folder has all.")
    limit = min(MAX_CELL_BYTES, max_bytes // max(1, count()))
    return names, columns, 1 << limit.bit_length() >> 1  # so that most pictures stay the same when a step is added


def _find_files(run: str, folder: Path, config: Config) -> _Files:
    samples = {sample.name: sample for sample in config.validation_samples()}
    order = {name: number for number, name in enumerate(samples)}
    files = {(file.name, file.step): file.picture for file in list_validations(folder)}
    ordered = sorted(files.items(), key=lambda entry: (order.get(entry[0][0], len(order)), entry[0]))
    return _Files(run, folder, config, samples, dict(ordered))


def _read_row(
    files: _Files, name: str, steps: Sequence[Step], limit: int, beside: Folders | None
) -> tuple[str, RunSamples]:
    """(its group, the row)"""
    sample = files.samples.get(name)
    prompt_name = name if sample is None else sample.prompt
    prompt = next((prompt for prompt in files.config.validation.prompts if prompt.name == prompt_name), None)
    known = describe_sample(files.config, latent_path(files.folder, steps[-1], name))
    values = {"seed": known.get("seed"), "size": known.get("bucket")}
    values |= {key: known.get(key) for key in ("steps", "guidance", "guidance_low")}
    sources, problem = list[Picture](), ""
    try:
        if prompt is not None and prompt.image:
            sources += [_shrink_source(Path(image), limit) for image in listed(prompt.image)]
        elif "image" in known:
            ImagedPrompt.model_validate(known)
            values["source from"] = describe_image(known["image"])
            images = known["image"] if isinstance(known["image"], list) else [known["image"]]
            sources += [_read_data_image(files.config, image, limit) for image in images]
    except (MediaError, LatentpressError, OSError, ValueError, KeyError) as error:
        problem = f"the source image can't be shown: {error}"
    except _TooLarge as error:
        problem = f"the source image is {error}"
    titles = [f"source {number}" if len(sources) > 1 else "source" for number in range(1, len(sources) + 1)]
    figures = [
        Figure((source,), (f"{title} of {name}",), title, apart=source is sources[-1])
        for source, title in zip(sources, titles, strict=True)
    ]
    training = list(_read_training(files, name, prompt_name, limit, beside))
    figures += [replace(figure, apart=figure is training[-1]) for figure in training]
    figures += [_read_step(files, name, step, limit, beside) for step in steps]
    row = RunSamples(
        run=files.run,
        name=name,
        prompt=str(known.get("prompt") or ""),
        negative_prompt=str(known.get("negative_prompt") or ""),
        settings=", ".join(f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
                           for key, value in values.items() if value is not None),
        problem=problem,
        gallery=Gallery(figures, "steps"),
    )  # fmt: skip
    group = known.get("group", name if sample is None else sample.group)
    return group if isinstance(group, str) else name, row


def _shrink_source(file: MediaPath, limit: int, at: float | None = None) -> Picture:
    return _require_small(shrink(file, SOURCE_BOX, min(SOURCE_BYTES, limit), at))


def _read_data_image(config: Config, image: Mapping[str, Any], limit: int) -> Picture:
    """The image of the data that a prompt started from, where its dataset is here."""
    dataset = next((dataset for dataset in config.datasets if dataset.id == image["dataset"]), None)
    if dataset is None:
        raise ValueError(f"there is no dataset {image['dataset']!r}")
    source, path = open_source(dataset), image["path"]
    file = source.open(path) if image["role"] == "media" else source.open_companion(image["role"], path)
    return _shrink_source(file, limit, image.get("start"))


def _read_step(files: _Files, name: str, step: Step, limit: int, beside: Folders | None) -> Figure:
    path, caption = files.files[name, step], f"step {step}"
    if path is None:
        return Figure((), (), caption, problem="not decoded yet")
    return _read_figure(path, f"{name} at {caption}", caption, files.run, limit, beside)


def _read_training(files: _Files, name: str, prompt: str, limit: int, beside: Folders | None) -> Iterator[Figure]:
    folder = files.folder / training_samples.FOLDER / prompt
    for caption in (training_samples.ORIGINAL, training_samples.RECONSTRUCTION):
        for path in (folder / f"{caption}{suffix}" for suffix in SUFFIXES):
            if path.is_file():
                yield _read_figure(path, f"{name}: {caption}", caption, files.run, limit, beside)


def _read_figure(path: Path, alt: str, caption: str, run: str, limit: int, beside: Folders | None) -> Figure:
    link = ""
    try:
        link = _put_beside(path, run, beside) if beside else ""
        picture = _require_small(shrink(path, THUMBNAIL_BOX, limit))
        caption += ", preview" if path.suffix != ".mp4" and read_mark(path).is_preview else ""
        return Figure((picture,), (alt,), caption, link=link)
    except MediaError as error:
        return Figure((), (), caption, problem=f"can't be read: {error}")
    except _TooLarge as error:
        advice = "" if link else ": latentpress report --pictures-beside links it"
        return Figure((), (), caption, problem=f"{error}{advice}", link=link)


class _TooLarge(Exception):
    """A picture or clip that can't be made small enough."""


def _require_small(picture: Picture | None) -> Picture:
    if picture is None:
        raise _TooLarge("too large for this page")
    return picture


def _put_beside(path: Path, run: str, beside: Folders) -> str:
    """Copy the file into the folder beside the page; returns its address, relative to the page."""
    folder, page_folder = beside
    target = folder / quote(run, safe="") / path.parent.name / path.name
    make_folders(target.parent)
    if not target.exists() or hash_file(target, None) != hash_file(path, None):
        with replacing(target) as temporary:
            copyfile(path, temporary)
    return quote(os.path.relpath(target, page_folder))
