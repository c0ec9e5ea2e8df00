"""The places of the files of a plan's members on this machine. Needs no media library, so any program may use it."""

from functools import cached_property
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from cache.sets.plans import Plan, RowLookup
from schemas.config.datasets import Dataset
from schemas.config.pipeline import VALIDATION, Config
from schemas.errors import LatentpressError
from stages.discovery.sources.base import Source, open_source
from stages.media.files import MediaError, MediaPath, require_unchanged


class RequiredFile(NamedTuple):
    """A file that a member is made from. role: "media", "source" or "mask"; content: its media id as planned."""

    dataset: str
    role: str
    path: str
    content: str


class MediaLocations:
    """The files of samples and of the images inside prompts, at their paths as of this plan."""

    def __init__(self, config: Config, plan: Plan) -> None:
        self._config, self._plan = config, plan
        self._sources: dict[str, Source] = {}

    def planned_files(self, kind: str, name: str) -> list[tuple[MediaPath, str]]:
        """The `required_files` of a member, to be opened, each with the media id it was planned with. Raises MediaError
        if the configuration no longer has it."""
        return [(self.open(file), file.content) for file in self.required_files(kind, name)]

    def required_files(self, kind: str, name: str) -> list[RequiredFile]:
        """The files of a member of this kind: of "text" the image inside an i2i prompt, nothing for other prompts; of
        "vision" the media alone; of "latents" the media, for i2i the source image, and the mask if there is one."""
        if kind == "text":
            text = self._plan.texts[name]
            if not text["image_id"]:
                return []
            row = self._images.get(name, {"dataset": text["image_dataset"], "source_path": text["image_path"]})
            return [RequiredFile(row["dataset"], "source", row["source_path"], text["image_id"])]
        sample = self._plan.samples[name]
        row = self._plan.active_rows.get(name, sample)
        dataset = row["dataset"]
        files = [RequiredFile(dataset, "media", row["path"], sample["media_id"])]
        if sample["condition"] == "source" and kind == "latents":
            files.append(RequiredFile(dataset, "source", row["source_path"], sample["source_id"]))
        if sample["mask_id"] and kind == "latents":
            files.append(RequiredFile(dataset, "mask", row["mask_path"], sample["mask_id"]))
        return files

    def backing_file(self, file: RequiredFile) -> MediaPath:
        """The file itself, or the archive that holds it. Raises MediaError if it is not there, LatentpressError if its
        whole place is not."""
        planned = self._resolve(file)
        if not isinstance(planned, RequiredFile):
            return planned
        role = "" if planned.role == "media" else planned.role
        return self._source(planned.dataset).backing_file(role, planned.path)

    def location_option(self, dataset: str, role: str) -> tuple[str, str]:
        """`location_option` of a dataset by its id, or of the validation prompts' images."""
        if dataset == VALIDATION:
            return "validation.prompts", ""
        return location_option(self._dataset(dataset), role)

    def all_present(self, kind: str, name: str) -> bool:
        """Whether all files of a member of this kind ("text", "latents") are there as they were planned."""
        try:
            for path, content in self.planned_files(kind, name):
                require_unchanged(path, content)
        except (MediaError, LatentpressError):  # the latter: its place can't even be opened
            return False
        return True

    def open(self, file: RequiredFile) -> MediaPath:
        """A file of a sample, to be opened; of a validation prompt its own image, or that of the data."""
        planned = self._resolve(file)
        if not isinstance(planned, RequiredFile):
            return planned
        source = self._source(planned.dataset)
        if planned.role == "media":
            return source.open(planned.path)
        return source.open_companion(planned.role, planned.path)

    def _resolve(self, file: RequiredFile) -> MediaPath | RequiredFile:
        """Return the path of a validation prompt's image, or the file of the data chosen for it; else `file`."""
        if file.dataset != VALIDATION:
            return file
        name = file.path
        prompt = next((prompt for prompt in self._config.validation.prompts if prompt.name == name), None)
        if prompt is not None and prompt.image is not None:
            return prompt.image
        for entry in self._plan.info["validation"]:
            if entry["name"] == name and (image := entry.get("image")):
                return RequiredFile(image["dataset"], image["role"], image["path"], file.content)
        raise MediaError("missing", name, "is no validation prompt with an image", "run `latentpress bucket`")

    def _source(self, dataset: str) -> Source:
        if dataset not in self._sources:
            self._sources[dataset] = open_source(self._dataset(dataset))
        return self._sources[dataset]

    def _dataset(self, name: str) -> Dataset:
        datasets = {dataset.id: dataset for dataset in self._config.datasets}
        if name not in datasets:
            problem = f"is no dataset of this configuration ({', '.join(datasets)})"
            raise MediaError("missing", name, problem, "run `latentpress bucket`")
        return datasets[name]

    @cached_property
    def _images(self) -> RowLookup:
        """text_id -> dataset and source_path of a sample whose source image is in that text."""
        active = self._plan.active.select(["dataset", "source_path", "texts", "null_text"])
        active = active.filter(pc.greater(pc.fill_null(pc.utf8_length(active["source_path"]), 0), 0)).combine_chunks()
        owners = active.select(["dataset", "source_path"])
        captions = owners.take(pc.list_parent_indices(active["texts"]))
        captions = captions.append_column("text_id", pc.list_flatten(active["texts"]))
        both = pa.concat_tables([captions, owners.append_column("text_id", active["null_text"])])
        return RowLookup(both.filter(pc.is_valid(both["text_id"])), "text_id")


def location_option(dataset: Dataset, role: str) -> tuple[str, str]:
    """The option that gives the place of a dataset's files of a role on this machine, and its value."""
    option = {"source": "conditioning_data", "mask": "mask_data"}.get(role, "")
    if not option or not getattr(dataset, option):
        option = "media_root" if dataset.media_root else "instance_data_dir"
    return f"datasets.{dataset.id}.{option}", getattr(dataset, option)
