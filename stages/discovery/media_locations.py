"""The locations of the files of a plan's members on this machine, and whether the files exist. Needs no media library,
so that any program may use it.

Missing media is not bad media: if a disk is not mounted or `media_root` was forgotten, every file would be rejected,
and training would continue with the rest. So before a stage opens media, and again when a unit lacks files, it checks
some files of each location; if most of them are missing, the stage stops and changes nothing.

discover makes the same check of its listings (`RemovalCheck`): an item that it does not find leaves the media table,
and with the next plan the training set. This is right for deleted files, and wrong for a disk that is not mounted.
"""

import io
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache.sets.item_rows import read_mask
from cache.sets.plans import Plan, RowLookup
from cache.store.damage import DamageError
from schemas.config.datasets import Dataset
from schemas.config.pipeline import VALIDATION, Config
from schemas.config.section import listed
from schemas.errors import LatentpressError
from schemas.family import SOURCE_ROLES
from schemas.tables import MADE, MEDIA_SCHEMA
from schemas.text_format import escape_unprintable
from stages.discovery.sources.base import Source, companion_name, open_source
from stages.discovery.sources.urls import display_location
from stages.discovery.sources.walk import extensions_of_dataset
from stages.media.files import VIDEO_EXTENSIONS, Blob, MediaError, MediaPath, media_size, require_unchanged

MAX_PROBED_FILES = 16  # of each dataset
MADE_MASKS = "made masks"  # used like a dataset's id; ids of datasets contain no space


@dataclass(frozen=True, repr=False)
class MadeMask(Blob):
    """A mask that `masks` made, read from a row of the mask cache like a mask file of the user: a gray PNG. For a clip
    with several frames the PNG is animated, and frame k begins at k x FRAME_S seconds.

    root: folder of the caches. name: path of the mask below `root`, from `cache.sets.item_rows.list_masks`. planned:
    media id of the mask in the plan."""

    root: str
    name: str
    planned_id: str

    def open(self) -> BinaryIO:
        return io.BytesIO(self._content)

    def size(self) -> int:
        return len(self._content)

    def media_id(self) -> str:
        """An id computed from item, model and settings, which determine the mask."""
        return self.planned_id

    def refresh(self) -> None:
        self.__dict__.pop("_content", None)

    @cached_property
    def _content(self) -> bytes:
        try:
            return read_mask(self.root, self.name)
        except FileNotFoundError as error:
            step = "run `latentpress masks`, then `latentpress bucket`"
            raise MediaError("missing", self.name, "does not exist", step) from error
        except DamageError as error:
            step = "run `latentpress verify --repair`, then the same command again"
            raise MediaError("missing", self.name, f"is damaged: {error.reason}", step) from error


class RequiredFile(NamedTuple):
    """A file that a member is made from. role: "media" or the role of a companion. content: media id in the plan."""

    dataset: str
    role: str
    path: str
    content: str


class MediaLocations:
    """The files of samples and of the images in prompts, at the paths in the plan."""

    def __init__(self, config: Config, plan: Plan) -> None:
        self._config, self._plan = config, plan
        self._sources: dict[str, Source] = {}

    def planned_files(self, kind: str, name: str) -> list[tuple[MediaPath, str]]:
        """The `required_files` of a member, ready to be opened, each with its media id in the plan. Raises MediaError
        if the configuration no longer has their dataset or prompt."""
        return [(self.open(file), file.content) for file in self.required_files(kind, name)]

    def required_files(self, kind: str, name: str) -> list[RequiredFile]:
        """The files of a member, depending on `kind`. For "text": the images in an i2i prompt; other prompts have none.
        For "vision": only the media. For "latents": the media, for i2i the source image, and the mask if the sample has
        one. For an item plan: the media, and the source image if the plan includes it."""
        if kind == "text":
            text = self._plan.texts[name]
            if text.get("references"):
                return [file for id in text["references"] for file in self.required_files("latents", id)]
            if not text["image_id"]:
                return []
            row = self._images.get(name, {"dataset": text["image_dataset"], "source_path": text["image_path"]})
            return [RequiredFile(row["dataset"], "source", row["source_path"], text["image_id"])]
        sample = self._plan.samples[name]
        row = self._plan.active_rows.get(name, sample)
        dataset = row["dataset"]
        role = row["role"] if row["role"] in SOURCE_ROLES else "media"  # a reference is a companion of other samples
        files = [RequiredFile(dataset, role, row["path"], sample["media_id"])]
        if sample["condition"] == "source" and kind != "vision":
            files.append(RequiredFile(dataset, "source", row["source_path"], sample["source_id"]))
        if sample["mask_id"] and kind == "latents":
            dataset_of_mask = MADE_MASKS if sample["mask_kind"] == MADE else dataset
            files.append(RequiredFile(dataset_of_mask, "mask", row["mask_path"], sample["mask_id"]))
        return files

    def location_option(self, dataset: str, role: str) -> tuple[str, str]:
        """`location_option` for a dataset's id, for MADE_MASKS, or for VALIDATION (images of validation prompts)."""
        if dataset == MADE_MASKS:
            return "root", self._config.root
        if dataset == VALIDATION:
            return "validation.prompts", ""
        return location_option(self._dataset(dataset), role)

    def all_present(self, kind: str, name: str) -> bool:
        """Whether all files of a member of this kind ("text", "latents") exist and still have their planned content."""
        try:
            for path, content in self.planned_files(kind, name):
                require_unchanged(path, content)
        except (MediaError, LatentpressError):  # LatentpressError: the whole location can't be opened
            return False
        return True

    def open(self, file: RequiredFile) -> MediaPath:
        """A file, ready to be opened. For a validation prompt: the image in its options, or the image chosen from the
        data."""
        resolved = self._resolve(file)
        if not isinstance(resolved, RequiredFile):
            return resolved
        source = self._source(resolved.dataset)
        path = resolved.path
        return source.open(path) if resolved.role == "media" else source.open_companion(resolved.role, path)

    def backing_file(self, file: RequiredFile) -> MediaPath:
        """The file itself (a MadeMask for a made mask), or the archive that holds it. Raises MediaError if the file is
        missing, LatentpressError if its whole location is missing."""
        resolved = self._resolve(file)
        if not isinstance(resolved, RequiredFile):
            return resolved
        role = "" if resolved.role == "media" else resolved.role
        return self._source(resolved.dataset).backing_file(role, resolved.path)

    def _resolve(self, file: RequiredFile) -> MediaPath | RequiredFile:
        """Return a MadeMask, the path of a validation prompt's image, or the file of the data chosen for the prompt;
        `file` itself if it is a file of a dataset."""
        if file.dataset == MADE_MASKS:
            return MadeMask(self._config.root, file.path, file.content)
        if file.dataset != VALIDATION:
            return file
        name, _, number = file.path.partition("/")  # number: from 1, if the prompt has several references
        prompt = next((prompt for prompt in self._config.validation.prompts if prompt.name == name), None)
        if prompt is not None and prompt.image is not None:
            return listed(prompt.image)[int(number or 1) - 1]
        for entry in self._plan.info.validation:
            if entry.name == name and (image := entry.image):
                image = image[int(number or 1) - 1] if isinstance(image, list) else image
                return RequiredFile(image.dataset, image.role, image.path, file.content)
        raise MediaError("missing", name, "is not a validation prompt with an image", "run `latentpress bucket`")

    def _source(self, dataset: str) -> Source:
        if dataset not in self._sources:
            self._sources[dataset] = open_source(self._dataset(dataset))
        return self._sources[dataset]

    def _dataset(self, name: str) -> Dataset:
        datasets = {dataset.id: dataset for dataset in self._config.datasets}
        if name not in datasets:
            problem = f"is not a dataset of this configuration ({', '.join(datasets)})"
            raise MediaError("missing", name, problem, "run `latentpress bucket`")
        return datasets[name]

    @cached_property
    def _images(self) -> RowLookup:
        """text_id -> dataset and source_path of a sample whose source image is in the text."""
        active = self._plan.active.select(["dataset", "source_path", "texts", "null_text"])
        active = active.filter(pc.greater(pc.fill_null(pc.utf8_length(active["source_path"]), 0), 0)).combine_chunks()
        owners = active.select(["dataset", "source_path"])
        captions = owners.take(pc.list_parent_indices(active["texts"]))
        captions = captions.append_column("text_id", pc.list_flatten(active["texts"]))
        images = pa.concat_tables([captions, owners.append_column("text_id", active["null_text"])])
        return RowLookup(images.filter(pc.is_valid(images["text_id"])), "text_id")


def location_option(dataset: Dataset, role: str) -> tuple[str, str]:
    """The option with the location of a dataset's files of a role on this machine, and its value."""
    option = {"mask": "mask_data", "media": ""}.get(role, "conditioning_data")
    if not option or not getattr(dataset, option):
        option = "media_root" if dataset.media_root else "instance_data_dir"
    location, key = getattr(dataset, option), f"datasets.{dataset.id}.{option}"
    if isinstance(location, tuple):
        number = SOURCE_ROLES.index(role)
        return f"{key}.{number}", location[number]
    return key, location


class MissingMediaError(LatentpressError):
    """Most of the checked files of a location are missing."""


# -- before a stage opens media --------------------------------------------------------------------------------------


def spread_evenly(names: pa.Array | pa.ChunkedArray, max_count: int = MAX_PROBED_FILES) -> list[str]:
    """At most `max_count` of the names, evenly spaced from the first to the last name."""
    rows = np.linspace(0, len(names) - 1, min(max_count, len(names))).astype(np.int64)
    return names.take(pa.array(rows)).to_pylist()


def select_probed_members(plan: Plan, kind: str, members: pa.Array) -> tuple[str, ...]:
    """Some of `members` of this kind ("text", "latents", "vision", "items") of each dataset that have files."""
    if kind == "text":
        table, name, dataset = plan.text_table, "text_id", "image_dataset"
    else:
        table, name, dataset = plan.active, "sample_id", "dataset"
    table = table.select([name, dataset]).filter(pc.is_valid(table.column(dataset)))
    table = table.filter(pc.is_in(table.column(name), value_set=members))
    probed: list[str] = []
    for value in pc.unique(table.column(dataset)).to_pylist():
        probed += spread_evenly(table.filter(pc.equal(table.column(dataset), value)).column(name))
    return tuple(probed)


def require_media(places: MediaLocations, kind: str, members: Iterable[str]) -> None:
    """Raise MissingMediaError if more than half of the members' files in one location are missing."""
    groups: dict[tuple[str, str], dict[str, RequiredFile]] = {}
    for name in members:
        for need in places.required_files(kind, name):
            groups.setdefault((need.dataset, need.role), {})[need.path] = need
    for (dataset, role), needs in groups.items():
        key, location = places.location_option(dataset, role)
        if dataset == VALIDATION:
            step = "restore them, or correct validation.prompts and run `latentpress bucket`; nothing was rejected"
        elif dataset == MADE_MASKS:
            step = "run `latentpress masks`, then `latentpress bucket`; nothing was rejected"
        else:
            option = key.rpartition(".")[2].replace("instance_data_dir", "media_root")
            step = (
                f"mount the disk, restore the files, or set their place: --set datasets.{dataset}.{option}=PLACE; "
                "nothing was rejected. To remove deleted files from the plan, run `latentpress discover`, then "
                "`latentpress bucket`"
            )
        try:
            with ThreadPoolExecutor(MAX_PROBED_FILES) as pool:
                missing_errors = [error for error in pool.map(partial(_absence_error, places), needs.values()) if error]
        except LatentpressError as error:
            raise MissingMediaError(f"{key}: {error.message}", step) from error
        if 2 * len(missing_errors) > len(needs):
            first = f"{escape_unprintable(str(missing_errors[0].path))}: {missing_errors[0].problem}"
            place = f"{display_location(location)}: " if location else ""
            problem = f"{place}{len(missing_errors)} of {len(needs)} checked files are missing"
            raise MissingMediaError(f"{key}: {problem}; the first: {first}", step)


def _absence_error(places: MediaLocations, need: RequiredFile) -> MediaError | None:
    """The error for a missing file; None if it exists. Objects count as missing if the store fails or denies access."""
    file: MediaPath | None = None
    try:
        file = places.backing_file(need)
        media_size(file)
    except MediaError as error:
        if file is None or error.reason == "missing" or (error.reason == "unreadable" and isinstance(file, Blob)):
            return error
    return None


# -- in a listing ----------------------------------------------------------------------------------------------------


def describe_ignored(counts: Counter[str]) -> str:
    """Text for the numbers of ignored files by extension or reason: "12: .json 3, .md 9"."""
    parts = (f"{reason or 'no extension'} {count}" for reason, count in sorted(counts.items()))
    return f"{counts.total()}: {', '.join(parts)}"


@dataclass
class RemovalCheck:
    """Compares the numbers of items and companions in a listing with the numbers that the last discovery found."""

    dataset: Dataset
    before: pa.Table | None
    listed: Counter[str] = field(default_factory=Counter)

    def count(self, chunk: pa.Table) -> None:
        """Count rows of a listing."""
        self.listed["media"] += len(chunk)
        for role in self.dataset.roles:
            self.listed[role] += len(chunk) - chunk[role].null_count

    def require_media(self, missing: int, fraction: float, accept_removed: bool, ignored: Counter[str]) -> None:
        """Raise MissingMediaError if most items or companions are missing, LatentpressError if the dataset never had an
        item.

        missing: number of listed items whose files do not exist. fraction: accepted share of missing items if above
        0.5 (max_reject_fraction). accept_removed: check only `missing`. ignored: numbers of ignored files."""
        listed = self.listed["media"]
        if missing > max(0.5, fraction) * listed:
            step = "or raise stages.max_reject_fraction to continue without the missing items"
            raise self._error("media", f"{missing} of {listed} listed items do not exist", step)
        if accept_removed:
            return
        dataset, before = self.dataset, self.before or MEDIA_SCHEMA.empty_table()
        if not listed and not len(before):
            key, location = location_option(dataset, "media")
            video = dataset.dataset_type == "video"
            kinds = "images or videos" if video else "images"
            problem = f"{key}: {display_location(location)} does not contain {kinds}"
            if not ignored:
                step = "mount the disk, correct the place or media_root, or set disabled: true for this dataset"
                raise LatentpressError(f"{problem}: it is empty", step)
            formats = ", ".join(sorted(ending[1:] for ending in extensions_of_dataset(dataset)))
            step = f"convert the files to a supported format ({formats}), or correct the place"
            if not video and any(ending in VIDEO_EXTENSIONS for ending in ignored):
                step = f"set dataset_type: video for the videos; {step}"
            raise LatentpressError(f"{problem}; ignored files: {describe_ignored(ignored)}", step)
        companions = [*dataset.source_roles, *(["mask"] if dataset.mask_data or dataset.mask_column else [])]
        for role in ("media", *companions):
            column, name = ("path", "items") if role == "media" else (role, f"{companion_name(role)}s")
            earlier = len(before) - before[column].null_count if column in before.schema.names else 0
            count = self.listed[role] - (missing if role == "media" else 0)
            if 2 * count < earlier:
                further = f"; other files: {describe_ignored(ignored)}" if ignored and not count else ""
                problem = f"{count} {name} exist, but the last discovery found {earlier}{further}"
                step = "if you removed them on purpose, run `latentpress discover --accept-removed`"
                raise self._error(role, problem, step)

    def _error(self, role: str, problem: str, step: str) -> MissingMediaError:
        key, location = location_option(self.dataset, role)
        option = "media_root (the place of the media on this machine)" if role == "media" else key.rpartition(".")[2]
        return MissingMediaError(
            f"{key}: {display_location(location)}: {problem}. Nothing was changed",
            f"mount the disk, or correct {option}; {step}",
        )
