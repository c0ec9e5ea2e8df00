"""Where the files of a plan's members lie on this machine. Needs no media library, so that any program may ask."""

from functools import cached_property
from pathlib import Path

from cache.generations import Generation
from schemas.config import VALIDATION, Config, Dataset
from schemas.errors import LatentpressError
from stages.media.errors import MediaError
from stages.media.files import check

#: A file and the content it was planned with.
Wanted = tuple[Path, str]


class Places:
    """The files of samples and of the images inside prompts, where they lie as of this plan."""

    def __init__(self, config: Config, plan: Generation) -> None:
        self._config, self._plan = config, plan

    def of_sample(self, name: str) -> list[Wanted]:
        """The media, and for i2i the source image. MediaError: the configuration no longer has it."""
        sample = self._plan.samples[name]
        planned = (sample["dataset"], sample["path"], sample["source_path"])
        dataset, path, source = self._samples.get(name, planned)
        files = [(media_file(self._config, dataset, path), sample["media_id"])]
        if sample["condition"] == "source":
            files.append((source_file(self._config, dataset, source), sample["source_id"]))
        return files

    def of_text(self, name: str) -> list[Wanted]:
        """The image inside an i2i prompt; nothing for other prompts."""
        text = self._plan.texts[name]
        if not text["image_id"]:
            return []
        dataset, path = self._images.get(name, (text["image_dataset"], text["image_path"]))
        return [(source_file(self._config, dataset, path), text["image_id"])]

    def whole(self, kind: str, name: str) -> bool:
        """Whether all files of a member of this kind ("text", "latents") are there as they were planned."""
        try:
            for path, content in self.of_text(name) if kind == "text" else self.of_sample(name):
                check(path, content)
        except MediaError:
            return False
        return True

    @cached_property
    def _samples(self) -> dict[str, tuple[str, str, str]]:
        return {row["sample_id"]: (row["dataset"], row["path"], row["source_path"]) for row in self._plan.active}

    @cached_property
    def _images(self) -> dict[str, tuple[str, str]]:
        found = {}
        for row in self._plan.active:
            if row["source_path"]:
                for name in (*row["texts"], row["null_text"]):
                    found[name] = (row["dataset"], row["source_path"])
        return found


def media_file(config: Config, dataset: str, path: str) -> Path:
    """A sample's file on this machine."""
    if dataset == VALIDATION:
        prompt = next((prompt for prompt in config.validation.prompts if prompt.name == path), None)
        if prompt is None or prompt.image is None:
            raise MediaError("missing", path, "is no validation prompt with an image", "run `latentpress bucket`")
        return Path(prompt.image)
    return Path(_dataset(config, dataset).root) / path


def source_file(config: Config, dataset: str, path: str) -> Path:
    """The i2i source image of a sample on this machine; of a validation prompt it is the prompt's own image."""
    if dataset == VALIDATION:
        return media_file(config, dataset, path)
    folder = _dataset(config, dataset).conditioning_data
    if folder is None:
        raise LatentpressError(f"dataset {dataset} has no conditioning_data", "add it to the configuration")
    return Path(folder) / path


def _dataset(config: Config, name: str) -> Dataset:
    found = next((dataset for dataset in config.datasets if dataset.id == name), None)
    if found is None:
        known = ", ".join(dataset.id for dataset in config.datasets)
        raise MediaError("missing", name, f"is no dataset of this configuration ({known})", "run `latentpress bucket`")
    return found
