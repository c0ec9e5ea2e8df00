"""`datasets` of pipeline.yaml: source of the media, captions, companions, and how media is cut.

The options have the same names as in other trainers for these models; docs/datasets.md explains each with an example.
"""

import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr

from schemas.config.section import (
    Name,
    NoEffect,
    OneOrSeveral,
    Problem,
    Section,
    UnitFloat,
    foreign_options,
    idle_options,
    listed,
)
from schemas.family import MOST_REFERENCES, SOURCE_ROLES, Family

SourceName = Literal["folder", "remote", "webdataset", "huggingface", "manifest"]
CaptionStrategy = Literal[
    "textfile", "filename", "instanceprompt", "csv", "jsonl", "parquet", "huggingface", "webdataset"
]
MediaKind = Literal["image", "video"]
TABLE_STRATEGIES: tuple[CaptionStrategy, ...] = ("csv", "jsonl", "parquet")

Aspects = Annotated[tuple[Annotated[float, Field(gt=0, le=1000)], ...], Field(strict=False)]
FINGERPRINT = "[0-9a-f]{24}"
MAX_CLIP_FRAMES = 99_999
MAX_EDGE = 1_000_000  # pixels: the limit of `schemas/geometry.py`
Texts = Annotated[tuple[str, ...], Field(strict=False)]


def _refuse_sides(value: Any) -> Any:
    """ValueError for "1024x768"."""
    if isinstance(value, str) and (sides := re.fullmatch(r"(\d{1,6}) ?[xX*] ?(\d{1,6})", value.strip())):
        edge = round(math.sqrt(int(sides[1]) * int(sides[2])))
        raise ValueError(
            f"{value!r} is a width and a height; write one number, the edge of a square of that area: {edge} "
            "(buckets of other shapes have the same area; resolution_type has other units)"
        )
    return value


Size = Annotated[float, Field(gt=0, le=MAX_EDGE), BeforeValidator(_refuse_sides)]  # in the unit of resolution_type
ClipFrames = Annotated[int, Field(ge=1, le=MAX_CLIP_FRAMES)]
VideoFrames = Annotated[int, Field(ge=1, le=10**9)]


class TagShuffle(Section, json_schema_extra={"affects": "plan"}):
    """A fixed number of orders of a caption's tags, each encoded once; they take turns in training."""

    variants: int = Field(
        4, ge=1, le=64, description="number of orders of the tags, the first as written; equal ones count once"
    )
    delimiter: str = Field(",", min_length=1, description="text between two tags; spaces around it are dropped")
    keep: int = Field(0, ge=0, le=10_000, description="number of tags at the beginning that keep their place")


class Video(Section, json_schema_extra={"affects": "plan"}):
    num_frames: ClipFrames = Field(121, description="number of frames of a clip, rounded down to 1 + a multiple of 4")
    min_frames: ClipFrames = Field(5, description="smallest number of frames; shorter videos are excluded (too-short)")
    max_frames: VideoFrames | None = Field(
        None, description="largest number of frames at frame_rate; longer videos are excluded (too-long)"
    )
    frame_rate: Annotated[float, Field(gt=0, le=1000)] | Literal["source"] = Field(
        Family.frame_rate,
        description="frames per second, selected by timestamp; source: all frames of each video, at its own rate; "
        "some families have a different default",
    )
    bucket_strategy: Literal["resolution_frames", "aspect_ratio"] = Field(
        "resolution_frames",
        description="length of clips; resolution_frames: shorter for shorter videos; aspect_ratio: always num_frames",
    )
    frame_interval: ClipFrames | None = Field(
        None,
        description="interval of the frame counts of resolution_frames, which are 1 + a multiple of it; default: "
        "the model's 4",
    )
    clip_selection: Literal["head", "middle", "random", "uniform", "chunks", "slide"] = Field(
        "head",
        description="part of a longer video; chunks: all parts, one after another; slide: a clip every clip_stride "
        "frames",
    )
    clips_per_video: int = Field(
        1, ge=1, le=10_000, description="clips of each video, for clip_selection: random or uniform"
    )
    clip_stride: VideoFrames | None = Field(None, description="frames between starts of clips, for slide")
    scenes: bool = Field(
        False,
        description="find cuts: clips do not cross them, and each scene counts as a video",
        json_schema_extra={"affects": "media"},
    )
    max_repeated_frames: UnitFloat | None = Field(
        None, description="largest fraction of a clip's frames that repeat the frame before (repeats-frames)"
    )

    def rate_or(self, rate: float) -> float:
        """frame_rate; `rate` if each video keeps its own frame rate."""
        return rate if self.frame_rate == "source" else self.frame_rate

    def _problems(self) -> Iterator[Problem]:
        if self.min_frames > self.num_frames:
            yield ("min_frames",), f"{self.min_frames} is greater than num_frames ({self.num_frames})"
        if self.max_frames is not None and self.max_frames < self.min_frames:
            yield ("max_frames",), f"{self.max_frames} is less than min_frames ({self.min_frames})"
        if self.clips_per_video > 1 and self.clip_selection not in ("random", "uniform"):
            yield (
                ("clips_per_video",),
                f"is not used with clip_selection: {self.clip_selection}; valid: random, uniform",
            )
        if self.clip_selection == "slide" and self.clip_stride is None:
            yield ("clip_stride",), "is required with clip_selection: slide; set it, for example to num_frames"
        if self.clip_selection != "slide" and self.clip_stride is not None:
            yield ("clip_stride",), NoEffect(f"is not used with clip_selection: {self.clip_selection}; remove it")
        yield from foreign_options(self, "bucket_strategy", {"frame_interval": ("resolution_frames",)})


class Dataset(Section, json_schema_extra={"affects": "plan"}):
    id: Name = Field(
        description="name of the dataset, in paths, reports and `--set datasets.ID.key=...`",
        json_schema_extra={"affects": "media"},
    )
    dataset_type: MediaKind = Field(
        "image",
        description="kind of the samples; image: videos are ignored; video: images are clips of one frame",
        json_schema_extra={"affects": "media"},
    )
    disabled: bool = Field(False, description="do not discover or plan the dataset")
    source: SourceName | None = Field(
        None,
        description="kind of the source; derived from instance_data_dir by default: URL, tars, table or folder",
        json_schema_extra={"affects": "media"},
    )
    instance_data_dir: str = Field(
        min_length=1,
        description="folder, URL, tar files ({000..012}.tar), manifest, or a dataset of the Hugging Face Hub",
        json_schema_extra={"affects": "media"},
    )
    media_root: str | None = Field(
        None,
        description="location of the media on this machine, if it is not instance_data_dir; identities do not "
        "depend on it",
        json_schema_extra={"affects": "nothing"},
    )
    split: str = Field("train", description="split of a huggingface dataset", json_schema_extra={"affects": "media"})
    media_column: str | None = Field(
        None,
        description="column with the media, for a manifest or huggingface dataset; default: the first column with "
        "a usual name",
        json_schema_extra={"affects": "media"},
    )
    follow_links: bool = Field(
        False, description="follow symbolic links that lead outside the folder", json_schema_extra={"affects": "media"}
    )
    identity: Literal["content", "store"] = Field(
        "content",
        description="identity of a file; content: hash of its bytes, read once; store: checksum and size from the "
        "object store",
        json_schema_extra={"affects": "media"},
    )
    skip_file_discovery: bool = Field(
        False,
        description="use the existing media table; `discover` does not list the source",
        json_schema_extra={"affects": "nothing"},
    )

    caption_strategy: CaptionStrategy | None = Field(
        None,
        description="source of the captions; by default derived from the source of the media",
        json_schema_extra={"affects": "media"},
    )
    caption_file: str | None = Field(
        None,
        description="table of captions, for csv, jsonl and parquet; default: the manifest itself",
        json_schema_extra={"affects": "media"},
    )
    caption_column: Texts = Field(
        ("caption",),
        description="column with captions; several columns, and lists in a column, are alternatives",
        json_schema_extra={"affects": "media"},
    )
    captions_per_file: Literal["one", "lines"] = Field(
        "lines",
        description="captions in a text file; one: the whole text; lines: each line, as alternatives",
        json_schema_extra={"affects": "media"},
    )
    instance_prompt: str | None = Field(
        None,
        description="caption of items without one; with caption_strategy: instanceprompt, of every item",
        json_schema_extra={"affects": "media"},
    )
    trigger: str = Field(
        "",
        description="words that are put, with a space, before captions that do not contain them; caption of items "
        "without one",
        json_schema_extra={"affects": "media"},
    )
    prepend: str = Field("", description="text that is put before every caption; no space is added")
    append: str = Field("", description="text that is put after every caption; no space is added")
    tag_shuffle: TagShuffle | None = Field(None, description="encode each caption with its tags in several orders")
    caption_filter: Texts = Field((), description="texts and /regular expressions/ to remove from captions")

    make_captions: Literal["missing", "all", "none"] | None = Field(
        None,
        description="items that `caption` describes; default: missing if `caption` is configured; missing: items "
        "without a caption",
        json_schema_extra={"affects": "media"},
    )
    make_captions_where: str | None = Field(
        None,
        description="filter on columns for the items to describe",
        json_schema_extra={"affects": "media"},
    )
    generated_captions: Literal["fill", "add", "replace"] = Field(
        "fill",
        description="use of generated captions; fill: for items without a caption; add: in addition to the files' "
        "captions; replace: instead of the files' captions",
        json_schema_extra={"affects": "media"},
    )
    caption_sets: Texts = Field(
        ("current",),
        description="generated captions to use, all as alternatives: current, or folders of captions/",
    )

    conditioning_data: OneOrSeveral[str] | None = Field(
        None,
        description="folder or URL of i2i source images with the names of the targets; several: references, in order",
        json_schema_extra={"affects": "media"},
    )
    conditioning_column: OneOrSeveral[str] | None = Field(
        None,
        description="column (webdataset: extension) of the i2i source image; several: references, in order",
        json_schema_extra={"affects": "media"},
    )
    conditioning_count: int | None = Field(
        None,
        ge=1,
        le=MOST_REFERENCES,
        description="largest number of references of an item in conditioning_data, named NAME_1, NAME_2 and so on; "
        "default: one reference with the name of the target",
        json_schema_extra={"affects": "media"},
    )
    mask_data: str | None = Field(
        None,
        description="folder or URL of masks with the names of the media; white is trained",
        json_schema_extra={"affects": "media"},
    )
    mask_column: str | None = Field(
        None, description="column (webdataset: extension) of the mask", json_schema_extra={"affects": "media"}
    )
    make_masks: Literal["missing", "none"] | None = Field(
        None,
        description="items for which `masks` generates a mask; default: missing if `masks` is configured; missing: "
        "items without a mask",
    )

    where: str | None = Field(None, description="filter on columns, such as: score > 5 and license in ('cc0', 'cc-by')")
    repeats: int = Field(0, ge=0, le=1_000_000, description="further passes over the dataset in an epoch; 0: one pass")
    weight: float = Field(
        1.0, gt=0, le=1e6, description="factor of the number of draws in an epoch; 0.5: a draw every other epoch"
    )
    is_regularization_data: bool = Field(
        False,
        description="train the samples by train.methods.regularization, to keep the model's abilities",
    )
    eval: bool = Field(False, description="hold out the whole dataset for the eval loss")
    eval_fraction: UnitFloat = Field(0.0, description="fraction of items held out for the eval loss, by content")

    resolution: OneOrSeveral[Size] | None = Field(
        None,
        description="size of buckets, in the unit of resolution_type; several: a sample for each; default: the "
        "family's own",
    )
    resolution_type: Literal["pixel_area", "area", "pixel"] = Field(
        "pixel_area",
        description="unit of sizes; pixel_area: edge of a square with the bucket's area; area: megapixels; pixel: "
        "shorter edge",
    )
    buckets: Literal["computed", "family"] = Field(
        "computed",
        description="sizes of buckets; computed: from resolution and strides; family: the sizes that the model was "
        "trained with",
    )
    bucket_step: int = Field(
        64,
        ge=1,
        le=MAX_EDGE,
        description="pixels; sides of computed buckets are multiples of it; 1: multiples of the model's own step",
    )
    max_aspect: float = Field(2.5, ge=1, le=100, description="largest ratio of a bucket's longer to its shorter side")
    crop: bool = Field(True, description="cover the bucket and crop; false: stretch to the bucket")
    crop_aspect: Literal["preserve", "square", "closest", "random"] = Field(
        "preserve", description="shape of the crop; closest, random: a shape from crop_aspect_buckets"
    )
    crop_aspect_buckets: Aspects = Field(
        (), description="ratios of width to height for closest and random, such as [1.0, 0.75, 1.33]"
    )
    crop_style: Literal["center", "random", "corner", "face"] = Field(
        "center",
        description="position of the crop; random: seeded by the item's identity; corner: upper left; face: around "
        "the largest face",
    )
    face_detector: str | None = Field(
        None, description="YuNet model file that finds faces for crop_style: face; default: OpenCV's cascade"
    )
    minimum_image_size: Size | None = Field(
        None, description="smallest size, in the unit of resolution_type; smaller items are excluded (too-small)"
    )
    maximum_image_size: Size | None = Field(
        None,
        description="largest size; larger items are excluded (too-large), or first scaled to target_downsample_size",
    )
    target_downsample_size: Size | None = Field(
        None, description="size to which items above maximum_image_size are scaled before the crop"
    )
    allow_upscale: bool = Field(
        False, description="enlarge items that are smaller than their bucket; false: exclude them (needs-upscale)"
    )
    max_distortion: float | None = Field(
        None, ge=0, le=1000, description="largest change of the aspect ratio by stretching; 0.05: 5 % (too-distorted)"
    )
    max_cropped: UnitFloat | None = Field(
        None, description="largest fraction of the area that is cropped (too-cropped)"
    )
    animations: Literal["first-frame", "video"] = Field(
        "first-frame", description="reading of animated GIF, WebP and PNG files", json_schema_extra={"affects": "media"}
    )
    video: Video = Field(Video(), description="clips of videos")

    _portable_paths: dict[str, str] = PrivateAttr(default_factory=dict)

    def portable_path(self, key: str) -> str | None:
        """A location that is equal on every machine: relative to the configuration's folder if it is relative in the
        file or below this folder. `schemas/config/loading.py` records it; without a file, the location is unchanged."""
        return self._portable_paths.get(key, getattr(self, key))

    @property
    def source_roles(self) -> tuple[str, ...]:
        """The roles of the source images that an item may have, in order."""
        places = listed(self.conditioning_data) or listed(self.conditioning_column)
        return SOURCE_ROLES[: self.conditioning_count or len(places)]

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of companions in a media table: at least the first source image, and the mask."""
        return (*(self.source_roles or SOURCE_ROLES[:1]), "mask")

    @property
    def root(self) -> str:
        return self.media_root or self.instance_data_dir

    def resolutions(self, default: float) -> tuple[float, ...]:
        """Resolutions in ascending order; `default` (the family's) if none is configured or with `buckets: family`."""
        configured = listed(self.resolution) if self.buckets == "computed" else ()
        return tuple(sorted(set(configured))) or (default,)

    @property
    def resolved_source(self) -> SourceName:
        """The configured source, else the source that the location implies."""
        if self.source:
            return self.source
        location = self.instance_data_dir.split("?")[0].lower()
        if location.endswith((".tar", ".tar.gz", ".tgz")):
            return "webdataset"
        if location.endswith((".csv", ".jsonl", ".parquet")):
            return "manifest"
        return "remote" if "://" in location else "folder"

    @property
    def resolved_caption_strategy(self) -> CaptionStrategy:
        """The configured strategy, else the default strategy of the source."""
        if self.caption_strategy:
            return self.caption_strategy
        source = self.resolved_source
        if source == "manifest":
            ending = self.instance_data_dir.split("?")[0].rpartition(".")[2].lower()
            return next((name for name in TABLE_STRATEGIES if name == ending), "csv")
        return source if source in ("webdataset", "huggingface") else "textfile"

    @property
    def describes_missing(self) -> bool:
        """Whether a model describes items without a caption."""
        return self.make_captions in ("missing", "all")

    @property
    def trigger_words(self) -> str:
        """The trigger without a comma at its end."""
        return self.trigger.strip(" ,")

    @property
    def default_caption(self) -> str:
        """Caption of items without one: instance_prompt, else the trigger; "" if a model describes such items, or if
        they are rejected."""
        return "" if self.describes_missing else self.instance_prompt or self.trigger_words

    @property
    def accepts_missing_captions(self) -> bool:
        """Whether `discover` keeps items without a caption, because they get one later."""
        return self.describes_missing or bool(self.default_caption)

    @property
    def makes_masks(self) -> bool:
        """Whether a model makes the masks of items without one."""
        return self.make_masks == "missing"

    @property
    def used_caption_sets(self) -> tuple[str, ...]:
        """Names of the generated captions that are used: current, and names under captions/."""
        return self.caption_sets if self.describes_missing or self.caption_sets != ("current",) else ()

    def _problems(self) -> Iterator[Problem]:
        for key in ("where", "make_captions_where"):
            if (filter := getattr(self, key)) is not None:
                from schemas.config.filters import Filter  # which imports pyarrow

                try:
                    Filter(filter)
                except ValueError as error:
                    yield (key,), str(error)
        for number, name in enumerate(self.caption_sets):
            if name != "current" and not re.fullmatch(FINGERPRINT, name):
                valid = "valid: current, and the names of folders in captions/ (24 hex digits)"
                yield ("caption_sets", number), f"{name!r} is not the name of a caption set; {valid}"
        if self.conditioning_data and self.conditioning_column:
            yield ("conditioning_column",), "is used in place of conditioning_data; remove one of the two"
        for key in ("conditioning_data", "conditioning_column"):
            if len(listed(getattr(self, key))) > MOST_REFERENCES:
                yield (key,), f"has {len(listed(getattr(self, key)))} items; valid: at most {MOST_REFERENCES}"
        if self.conditioning_count and not isinstance(self.conditioning_data, str):
            yield ("conditioning_count",), "is only valid if conditioning_data is one folder or URL; remove it"
        if self.mask_data and self.mask_column:
            yield ("mask_column",), "is used in place of mask_data; remove one of the two"
        if self.animations == "video" and self.dataset_type != "video":
            yield ("animations",), "video needs dataset_type: video; for images, set it to first-frame"
        if self.eval and self.eval_fraction:
            yield (
                ("eval_fraction",),
                NoEffect("has no effect, because eval: true holds out all items; remove one of the two"),
            )
        for key in (
            "instance_data_dir",
            "media_root",
            "caption_file",
            "conditioning_data",
            "mask_data",
            "face_detector",
        ):
            for location in listed(getattr(self, key)):
                _, scheme, address = location.rpartition("://")
                if scheme and "@" in address.partition("/")[0]:
                    yield (key,), "contains a user name or password; set these in the environment instead"

        strategy, source = self.resolved_caption_strategy, self.resolved_source
        if strategy == "instanceprompt" and not self.instance_prompt:
            yield (
                ("instance_prompt",),
                "is required with caption_strategy: instanceprompt; set it to the caption of every item",
            )
        if strategy != "instanceprompt" and self.instance_prompt and self.describes_missing:
            yield ("instance_prompt",), "and make_captions both give captions to items without one; keep one"
        if strategy in ("webdataset", "huggingface") and source != strategy:
            yield ("caption_strategy",), f"{strategy} needs source: {strategy}; this dataset has source: {source}"
        if strategy == "textfile" and source in ("webdataset", "huggingface"):
            yield (
                ("caption_strategy",),
                f"textfile is not valid with source: {source}; use {source}, or a table of captions",
            )
        if strategy in TABLE_STRATEGIES and source != "manifest" and not self.caption_file:
            yield ("caption_file",), f"is required with caption_strategy: {strategy}; set it to the table of captions"

        yield from self._options_without_effect()

        if self.crop_aspect in ("closest", "random") and not self.crop_aspect_buckets:
            yield (
                ("crop_aspect_buckets",),
                f"is required with crop_aspect: {self.crop_aspect}, for example [1.0, 0.75, 1.33]",
            )
        if self.face_detector and self.crop_style != "face":
            yield ("face_detector",), NoEffect("has no effect without crop_style: face; set that, or remove this")
        low, target, high = self.minimum_image_size, self.target_downsample_size, self.maximum_image_size
        if target is not None and high is None:
            yield ("maximum_image_size",), "is required with target_downsample_size, to which larger items are scaled"
        if target is not None and high is not None and target > high:
            yield ("target_downsample_size",), f"{target:g} is greater than maximum_image_size ({high:g})"
        if low is not None and high is not None and low > high:
            yield ("minimum_image_size",), f"{low:g} is greater than maximum_image_size ({high:g})"

    def _options_without_effect(self) -> Iterator[Problem]:
        """Problems of options for a caption strategy, source or media type that this dataset does not use."""
        strategy, source = self.resolved_caption_strategy, self.resolved_source
        in_table, locations = strategy in TABLE_STRATEGIES, (self.instance_data_dir, self.media_root or "")
        folders = [*listed(self.conditioning_data), self.mask_data or "://", *(locations if source == "folder" else ())]
        at_url = source in ("remote", "manifest") or (
            source == "webdataset" and any("://" in location for location in locations)
        )
        columns = "a manifest, a huggingface dataset, or caption_strategy csv, jsonl or parquet"
        users = {  # option -> whether it is used, and what uses it
            "trigger": (not self.is_regularization_data, "training data: regularization data keep their captions"),
            "captions_per_file": (strategy in ("textfile", "webdataset"), "captions in text files"),
            "caption_file": (in_table, "caption_strategy csv, jsonl or parquet"),
            "caption_column": (
                in_table or strategy in ("webdataset", "huggingface"),
                "captions in a table, in the records of a webdataset or in a huggingface dataset",
            ),
            "media_column": (in_table or source in ("manifest", "huggingface"), columns),
            "split": (source == "huggingface", "source: huggingface"),
            "identity": (at_url, "media at a URL"),
            "follow_links": (any("://" not in folder for folder in folders), "local folders"),
            "crop_aspect_buckets": (self.crop_aspect in ("closest", "random"), "crop_aspect: closest or random"),
        }
        kind = f"(this dataset has source: {source}, caption_strategy: {strategy})"
        for key, (is_used, user) in users.items():
            if not is_used:
                yield from idle_options(self, (key,), f"has no effect: it is used by {user} {kind}; remove it")
        if source in ("folder", "remote"):
            for key, folder in (("conditioning_column", "conditioning_data"), ("mask_column", "mask_data")):
                reason = f"source: {source} has no columns; use {folder}, or a manifest of the files with that column"
                yield from idle_options(self, (key,), reason)
        if self.dataset_type == "image":
            reason = "has no effect with dataset_type: image; remove it, or set dataset_type: video"
            for path, message in idle_options(self.video, tuple(Video.model_fields), reason):
                yield ("video", *path), message
