"""The validation samples of a run as a grid: a row for each sample, a cell for each step, pictures and playing clips.

The trainer writes latents (validation/<step>/<name>.safetensors). `decode` decodes these latents into files
(samples/<step>/), and also the training samples whose captions are used as prompts. Pictures and clips are shrunk so
that all of them fit into one page; a cell without a file shows the reason.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import copyfile
from typing import Any
from urllib.parse import quote

from cache.models.weights import hash_file
from cache.runs.training_run import spread
from cache.runs.validations import SUFFIXES, describe_sample, latent_path, read_mark
from cache.store.files import make_folders, replacing
from cache.store.json_checks import ImagedPrompt, PromptImage
from schemas.config.pipeline import Config
from schemas.config.section import listed
from schemas.errors import LatentpressError
from stages.discovery.sources.base import open_source
from stages.media.files import MediaError, MediaPath
from stages.pages import training_samples
from stages.pages.html import Figure, Gallery
from stages.pages.pictures import THUMBNAIL_BOX, describe, list_samples, shrink
from stages.planning.validation_prompts import describe_image

MAX_STEPS = 16  # columns
MAX_CELLS = 480  # cells on a page, including originals, reconstructions and source images
MIN_STEPS = 3  # the first, a middle and the last step; rows are left out before there are fewer columns
MIN_CELL_BYTES, MAX_CELL_BYTES = 3_000, 300_000
SOURCE_BOX, SOURCE_BYTES = (160, 160), 12_000
Folders = tuple[Path, Path]
Files = dict[str, dict[int, Path | None]]  # name -> step -> picture or clip, None if it is not decoded


@dataclass(frozen=True)
class SampleRow:
    """A validation sample of a run. about: result of `describe`. settings: seed, size, steps and guidance as text.
    gallery: figures of the source image, of the training sample with this caption (original and reconstruction), if
    these exist, and of the steps."""

    run: str
    about: dict[str, Any]
    settings: str
    gallery: Gallery


@dataclass
class SampleGrid:
    """The grid of a page. rows: group of samples that differ by their seeds -> a row for each sample and run. notes:
    sentences about samples that are left out. gaps: sentences about samples that do not exist."""

    rows: dict[str, list[SampleRow]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)


class SampledRun:
    """The validation samples of a run. files: name -> step -> picture or clip, None if it is not decoded.
    leading_cells: largest number of cells before the steps of a row."""

    def __init__(self, name: str, folder: Path, config: Config) -> None:
        self.name, self.folder, self.config, self.files = name, folder, config, list_samples(config, folder)
        self.steps = sorted({step for steps in self.files.values() for step in steps})
        condition, has_training = config.model.condition, (folder / training_samples.FOLDER).is_dir()
        self.leading_cells = (2 if has_training else 0) + (condition.most if condition else 0)


def gather_samples(
    runs: Sequence[tuple[str, Path, Config]], max_bytes: int, copy_folders: Folders | None = None
) -> SampleGrid:
    """Make the grid of runs (name, folder, configuration), with at most `max_bytes` of pictures and clips.

    copy_folders: (folder that gets copies of the full-size files, to which cells link; folder of the page), None for no
    copies.
    """
    grid, sampled_runs = SampleGrid(), [SampledRun(*run) for run in runs]
    for run in sampled_runs:
        label = f"{run.name}: " if len(runs) > 1 else ""
        paths = [path for steps in run.files.values() for path in steps.values()]
        if not paths:
            reason = "no validation was made yet" if run.config.validation.prompts else "validation.prompts is empty"
            grid.gaps.append(f"{label}no samples: {reason}.")
        elif undecoded := paths.count(None):
            grid.gaps.append(f"{label}{undecoded} of {len(paths)} samples are not decoded; run latentpress decode.")
    names, columns, limit = _share(sampled_runs, max_bytes, grid.notes)
    for name in names:
        for run in sampled_runs:
            if steps := [step for step in spread(run.steps, columns) if step in run.files.get(name, ())]:
                group, row = _read_row(run, name, steps, limit, copy_folders)
                grid.rows.setdefault(group, []).append(row)
    return grid


def _share(sampled_runs: Sequence[SampledRun], max_bytes: int, notes: list[str]) -> tuple[list[str], int, int]:
    """Choose (names of the rows, number of columns, bytes per cell) so that all cells together have at most
    `max_bytes`. Sentences about rows and steps that are left out are added to `notes`."""
    all_names = names = list(dict.fromkeys(name for run in sampled_runs for name in run.files))
    step_count = max((len(run.steps) for run in sampled_runs), default=0)
    columns, cells = min(step_count, MAX_STEPS), min(MAX_CELLS, max_bytes // MIN_CELL_BYTES)

    def count() -> int:
        pairs = [(run, name) for name in names for run in sampled_runs if name in run.files]
        return sum(min(columns, len(run.files[name])) + run.leading_cells for run, name in pairs)

    while columns > MIN_STEPS and count() > cells:
        columns -= 1
    while count() > cells:
        names = names[:-1]
    if len(names) < len(all_names):
        notes.append(f"{len(names)} of {len(all_names)} rows are shown; the samples folder has all of them.")
    if step_count > columns:
        notes.append(
            f"At most {columns} of {step_count} steps are shown, spread evenly; the samples folder has all of them."
        )
    limit = min(MAX_CELL_BYTES, max_bytes // max(1, count()))
    # The limit is a power of two, so that most pictures stay the same when a step is added.
    return names, columns, 1 << limit.bit_length() >> 1


def _read_row(
    run: SampledRun, name: str, steps: Sequence[int], limit: int, copy_folders: Folders | None
) -> tuple[str, SampleRow]:
    """Read a sample. Returns (group of the sample, its row). limit: largest size of a picture or clip in bytes."""
    config, latent = run.config, latent_path(run.folder, steps[-1], name)
    metadata, about = describe_sample(config, latent), describe(config, run.folder, name, steps[-1])
    sample = next((sample for sample in config.validation_samples() if sample.name == name), None)
    prompt = name if sample is None else sample.prompt
    settings = {key: value for key, value in about.items() if key not in ("prompt", "negative_prompt")}
    try:
        prompt_images = next((listed(row.image) for row in config.validation.prompts if row.name == prompt), ())
        if prompt_images:
            opened: list[tuple[MediaPath, float | None]] = [(Path(image), None) for image in prompt_images]
        else:
            data_images = ImagedPrompt.model_validate(metadata).image or []
            images = data_images if isinstance(data_images, list) else [data_images]
            settings |= {"source from": describe_image(images)} if images else {}
            opened = [(_open_data_image(config, image), image.start) for image in images]
        names = [f"source {number}" if len(opened) > 1 else "source" for number in range(1, len(opened) + 1)]
        sources = [
            _shrink(path, f"{title} of {name}", title, min(SOURCE_BYTES, limit), SOURCE_BOX, at)
            for title, (path, at) in zip(names, opened, strict=True)
        ]
    except (MediaError, LatentpressError, OSError, ValueError, KeyError) as error:
        sources = [Figure((), (), "source", problem=f"can't be shown: {error}")]
    training = [
        _read_file(run, path, f"{name}: {path.stem}", path.stem, limit, copy_folders)
        for part in (training_samples.ORIGINAL, training_samples.RECONSTRUCTION)
        for suffix in SUFFIXES
        if (path := run.folder / training_samples.FOLDER / prompt / f"{part}{suffix}").is_file()
    ]
    figures = [replace(figure, has_separator=figure is part[-1]) for part in (sources, training) for figure in part]
    for step in steps:
        caption = f"step {step}"
        if (file := run.files[name][step]) is None:
            figures.append(Figure((), (), caption, problem="not decoded yet"))
        else:
            figures.append(_read_file(run, file, f"{name} at {caption}", caption, limit, copy_folders))
    words = ", ".join(f"{key} {value}" for key, value in settings.items())
    group = metadata.get("group", name if sample is None else sample.group)
    return group if isinstance(group, str) else name, SampleRow(run.name, about, words, Gallery(figures, "steps"))


def _open_data_image(config: Config, image: PromptImage) -> MediaPath:
    """Open the image from a dataset that a prompt starts from. Raises ValueError if the configuration does not have the
    dataset."""
    dataset = next((dataset for dataset in config.datasets if dataset.id == image.dataset), None)
    if dataset is None:
        raise ValueError(f"dataset {image.dataset!r} is not in the configuration")
    source = open_source(dataset)
    return source.open(image.path) if image.role == "media" else source.open_companion(image.role, image.path)


def _read_file(run: SampledRun, path: Path, alt: str, caption: str, limit: int, copy_folders: Folders | None) -> Figure:
    """Make the figure of a picture or clip of a run. If `copy_folders` is set, the file is copied into its folder, and
    the figure links to the copy."""
    caption += ", preview" if read_mark(path).is_preview else ""
    link = ""
    if copy_folders:
        folder, page_folder = copy_folders
        target = folder / quote(run.name, safe="") / path.parent.name / path.name
        make_folders(target.parent)
        if not target.exists() or hash_file(target, None) != hash_file(path, None):
            with replacing(target) as temporary:
                copyfile(path, temporary)
        link = quote(os.path.relpath(target, page_folder))
    return replace(_shrink(path, alt, caption, limit), link=link)


def _shrink(
    path: MediaPath,
    alt: str,
    caption: str,
    limit: int,
    box: tuple[int, int] = THUMBNAIL_BOX,
    at: float | None = None,
) -> Figure:
    """Make a figure of a picture or clip in at most `limit` bytes, or with the reason why it is not shown."""
    try:
        if picture := shrink(path, box, limit, at):
            return Figure((picture,), (alt,), caption)
        return Figure((), (), caption, problem="too large for this page")
    except MediaError as error:
        return Figure((), (), caption, problem=f"can't be shown: {error}")
