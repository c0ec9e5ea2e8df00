"""The validation samples of a run as a grid: a row for each, a cell for each step, pictures and playing clips.

The trainer writes latents (validation/<step>/<name>.safetensors), decode makes files of them (samples/<step>/), and
of the training samples whose captions the prompts are. What is shown is small enough for one page; a cell without a
file says what is missing.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from markupsafe import Markup

from cache.runs.training_run import read_description, spread, step_of
from cache.store.json_checks import check_prompt_image
from schemas.config.pipeline import Config
from schemas.config.validation_samples import ValidationSample, validation_samples
from schemas.errors import LatentpressError
from schemas.text_format import escape_unprintable
from stages.discovery.sources.base import open_source
from stages.media.errors import MediaError
from stages.media.files import MediaPath
from stages.media.preview_mark import is_preview
from stages.pages import training_samples
from stages.pages.html import Picture
from stages.pages.report.kept_pictures import kept_pictures, picture_key
from stages.pages.report.thumbnails import PICTURE_BOX, Clip, shrink_clip, shrink_file
from stages.planning.validation_images import describe_image

SUFFIXES = (".png", ".mp4")
MAX_STEPS = 16  # columns
MAX_CELLS = 480  # of a page, with originals, reconstructions and source images
MIN_STEPS = 3  # the first, a middle one and the last, before prompts are left out
MIN_CELL_BYTES, MAX_CELL_BYTES = 3_000, 300_000
SOURCE_BOX, SOURCE_BYTES = (160, 160), 12_000
Step = int
T = TypeVar("T")


@dataclass(frozen=True)
class Cell:
    """A prompt at a step, or what it is compared with. problem: why there is neither a picture nor a clip. link: the
    file beside the page. preview: the picture was decoded by a tiny autoencoder."""

    label: str
    picture: Picture | None = None
    clip: Clip | None = None
    problem: str = ""
    link: str = ""
    preview: bool = False


@dataclass(frozen=True)
class RunSamples:
    """What a run made of a validation sample. settings: seed, size, steps, guidance. training: the training sample
    whose caption the prompt is, as it was encoded and decoded again; empty where there is none."""

    run: str
    name: str
    prompt: str
    negative_prompt: str
    settings: tuple[tuple[str, str], ...]
    source: Picture | None
    source_problem: str
    training: tuple[Cell, ...]
    cells: tuple[Cell, ...]


@dataclass
class SampleGrid:
    """rows: group of samples that differ by their seeds -> each of them, of each run. notes: what is not shown, and
    where it is."""

    rows: dict[str, list[RunSamples]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes of all pictures and clips."""
        shown: list[Picture | Clip | None] = []
        for row in (row for rows in self.rows.values() for row in rows):
            shown += [row.source, *(part for cell in (*row.training, *row.cells) for part in (cell.picture, cell.clip))]
        return sum(len(each.data) for each in shown if each is not None)


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
    runs: Sequence[tuple[str, Path, Config]], max_bytes: int, beside: tuple[Path, Path] | None = None
) -> SampleGrid:
    """The grid of runs (name, folder, configuration), of at most `max_bytes` of pictures and clips.

    beside: a folder for whole files, which cells link to, and the page's folder. It gets links or copies of the files.
    """
    found = [_find_files(*run) for run in runs]
    grid = SampleGrid()
    for each in found:
        label = f"{each.run}: " if len(runs) > 1 else ""
        if not each.files:
            why = "no validation was made yet" if each.config.validation.prompts else "validation.prompts has none"
            grid.missing.append(f"{label}no samples: {why}.")
        elif undecoded := sum(path is None for path in each.files.values()):
            grid.missing.append(f"{label}{undecoded} of {len(each.files)} samples are not decoded: latentpress decode.")
    names, columns, limit = _share(found, max_bytes, grid)
    for name in names:
        for each in found:
            steps = [step for step in spread(each.steps, columns) if (name, step) in each.files]
            if steps:
                group, row = _read_row(each, name, steps, limit, beside)
                grid.rows.setdefault(group, []).append(row)
    return grid


def _share(found: Sequence[_Files], max_bytes: int, grid: SampleGrid) -> tuple[list[str], int, int]:
    """(names of the rows, columns, bytes of a cell) with which all cells have at most `max_bytes`. `grid` gets notes of
    what is left out."""
    rows: dict[str, list[tuple[int, int]]] = {}  # name -> of each run that has it: its steps, the cells beside them
    for each in found:
        beside = 2 if (each.folder / training_samples.FOLDER).is_dir() else 0
        beside += each.config.model.condition is not None  # source images
        for name, steps in Counter(name for name, _ in each.files).items():
            rows.setdefault(name, []).append((steps, beside))

    def count_cells(columns: int) -> list[int]:
        """For each row: the cells of it and of those before it."""
        return [*accumulate(sum(min(columns, steps) + beside for steps, beside in rows[name]) for name in rows)]

    cells = min(MAX_CELLS, max_bytes // MIN_CELL_BYTES)
    most = max((len(each.steps) for each in found), default=0)
    columns = min(most, MAX_STEPS)
    while columns > MIN_STEPS and count_cells(columns)[-1] > cells:
        columns -= 1
    counts = [count for count in count_cells(columns) if count <= cells]
    if len(counts) < len(rows):
        grid.notes.append(f"{len(counts)} of {len(rows)} rows are shown; the samples folder has all.")
    if most > columns:
        grid.notes.append(f"At most {columns} of {most} steps are shown, spread evenly; the samples folder has all.")
    limit = max_bytes // counts[-1] if counts else 0
    return list(rows)[: len(counts)], columns, min(MAX_CELL_BYTES, limit)


def _find_files(run: str, folder: Path, config: Config) -> _Files:
    files: dict[tuple[str, Step], Path | None] = {}
    samples = {sample.name: sample for sample in validation_samples(config.validation, config.model.family_spec)}
    order = {name: number for number, name in enumerate(samples)}
    for path in sorted((folder / "validation").glob("step-*/*.safetensors")):
        if (step := step_of(path.parent)) is not None:
            files[path.stem, step] = None
    for path in sorted((folder / "samples").glob("step-*/*")):
        if path.suffix in SUFFIXES and (step := step_of(path.parent)) is not None and not path.name.startswith("."):
            files[path.stem, step] = path
    ordered = sorted(files.items(), key=lambda entry: (order.get(entry[0][0], len(order)), entry[0]))
    return _Files(run, folder, config, samples, dict(ordered))


def _read_row(
    files: _Files, name: str, steps: Sequence[Step], limit: int, beside: tuple[Path, Path] | None
) -> tuple[str, RunSamples]:
    """(its group, the row)"""
    sample, about = files.samples.get(name), dict[str, Any]()
    named = name if sample is None else sample.prompt
    prompt = next((one for one in files.config.validation.prompts if one.name == named), None)
    if sample is not None and prompt is not None:
        about = {"prompt": prompt.prompt, "negative_prompt": prompt.negative_prompt, "seed": sample.seed}
    about |= read_description(files.folder / "validation" / f"step-{steps[-1]:06d}" / f"{name}.safetensors")
    values = {"seed": about.get("seed"), "size": about.get("bucket")}
    values |= {key: about.get(key) for key in ("steps", "guidance")}
    source, problem = None, ""
    try:
        if prompt is not None and prompt.image:
            source = _shrink_source(Path(prompt.image), limit)
        elif "image" in about:
            check_prompt_image(about)
            values["source from"] = describe_image(about["image"])
            source = _read_data_image(files.config, about["image"], limit)
    except (MediaError, LatentpressError, OSError, ValueError, KeyError) as error:
        problem = escape_unprintable(f"the source image can't be shown: {error}")
    except _TooLarge as error:
        problem = f"the source image is {error}"
    row = RunSamples(
        run=files.run,
        name=name,
        prompt=str(about.get("prompt") or ""),
        negative_prompt=str(about.get("negative_prompt") or ""),
        settings=tuple((key, f"{value:g}" if isinstance(value, float) else str(value))
                       for key, value in values.items() if value is not None),
        source=source,
        source_problem=problem,
        training=tuple(_read_training(files, named, limit, beside)),
        cells=tuple(_read_step(files, name, step, limit, beside) for step in steps),
    )  # fmt: skip
    group = about.get("group", name if sample is None else sample.group)
    return group if isinstance(group, str) else name, row


def _shrink_source(file: MediaPath, limit: int, at: float | None = None) -> Picture:
    limit = min(SOURCE_BYTES, limit)
    key = picture_key(file, (SOURCE_BOX, at))
    return _fitting(kept_pictures.get(key, limit, lambda: shrink_file(file, SOURCE_BOX, limit, at)))


def _read_data_image(config: Config, image: Mapping[str, Any], limit: int) -> Picture:
    """The image of the data that a prompt started from, where its dataset is here."""
    dataset = next((each for each in config.datasets if each.id == image["dataset"]), None)
    if dataset is None:
        raise ValueError(f"there is no dataset {image['dataset']!r}")
    source, path = open_source(dataset), image["path"]
    file = source.open(path) if image["role"] == "media" else source.open_companion(image["role"], path)
    return _shrink_source(file, limit, image.get("start"))


def _read_step(files: _Files, name: str, step: Step, limit: int, beside: tuple[Path, Path] | None) -> Cell:
    path, label = files.files[name, step], f"step {step}"
    return Cell(label, problem="not decoded yet") if path is None else _read_cell(path, label, files.run, limit, beside)


def _read_training(files: _Files, prompt: str, limit: int, beside: tuple[Path, Path] | None) -> Iterator[Cell]:
    folder = files.folder / training_samples.FOLDER / prompt
    for label in (training_samples.ORIGINAL, training_samples.RECONSTRUCTION):
        for path in (folder / f"{label}{suffix}" for suffix in SUFFIXES):
            if path.is_file():
                yield _read_cell(path, label, files.run, limit, beside)


def _read_cell(path: Path, label: str, run: str, limit: int, beside: tuple[Path, Path] | None) -> Cell:
    link = ""
    try:
        link, key = _put_beside(path, run, beside) if beside else "", picture_key(path, PICTURE_BOX)
        if path.suffix == ".mp4":
            clip = kept_pictures.get(key, limit, lambda: shrink_clip(path, limit))
            return Cell(label, clip=_fitting(clip), link=link)
        picture = kept_pictures.get(key, limit, lambda: shrink_file(path, PICTURE_BOX, limit))
        return Cell(label, picture=_fitting(picture), link=link, preview=is_preview(path))
    except MediaError as error:
        return Cell(label, problem=escape_unprintable(f"can't be read: {error}"))
    except _TooLarge as error:
        advice = "" if link else ": latentpress report --pictures-beside links it"
        return Cell(label, problem=f"{error}{advice}", link=link)


class _TooLarge(Exception):
    """A picture or clip that can't be made small enough."""


def _fitting(small: T | None) -> T:
    if small is None:
        raise _TooLarge("too large for this page")
    return small


def _put_beside(path: Path, run: str, beside: tuple[Path, Path]) -> str:
    """Copy the file into the folder beside the page; returns its address, relative to the page."""
    from shutil import copyfile
    from urllib.parse import quote

    folder, page_folder = beside
    target = folder / quote(run, safe="") / path.parent.name / path.name
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists() or target.stat().st_mtime_ns < path.stat().st_mtime_ns:
        copyfile(path, target)
    return quote(os.path.relpath(target, page_folder))


def describe_clip(clip: Clip, about: str) -> Markup:
    """The element that plays a clip; it has controls, so it needs neither a mouse nor a script."""
    return Markup(
        '<video src="{}" width="{}" height="{}" controls muted loop playsinline preload="auto" aria-label="{}"></video>'
    ).format(clip.uri, clip.width, clip.height, escape_unprintable(about))
