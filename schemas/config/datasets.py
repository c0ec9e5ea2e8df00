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

    variants: int = Field(4, ge=1, le=64, description="orders of its tags, the first as written; equal ones count once")
    delimiter: str = Field(",", min_length=1, description="separates tags; spaces around it are dropped")
    keep: int = Field(0, ge=0, le=10_000, description="tags at the beginning that keep their place")


class Video(Section, json_schema_extra={"affects": "plan"}):
    num_frames: ClipFrames = Field(121, description="frames of a clip; rounded down to 1 + a multiple of 4")
    min_frames: ClipFrames = Field(5, description="a video that yields fewer is excluded (too-short)")
    max_frames: VideoFrames | None = Field(
        None, description="a video that yields more, at frame_rate, is excluded (too-long)"
    )
    frame_rate: Annotated[float, Field(gt=0, le=1000)] | Literal["source"] = Field(
        Family.frame_rate,
        description="frames per second, chosen by timestamp; source: all frames of each video, at its own rate; some "
        "families have another default",
    )
    bucket_strategy: Literal["resolution_frames", "aspect_ratio"] = Field(
        "resolution_frames",
        description="resolution_frames: shorter videos make shorter clips; aspect_ratio: all have num_frames",
    )
    frame_interval: ClipFrames | None = Field(
        None, description="frame counts of resolution_frames are 1 + a multiple of it; default: the model's 4"
    )
    clip: Literal["head", "middle", "random", "uniform", "chunks", "slide"] = Field(
        "head", description="which part of a longer video; chunks: every part; slide: a clip every clip_stride frames"
    )
    clips: int = Field(1, ge=1, le=10_000, description="clips of each video, where clip is random or uniform")
    clip_stride: VideoFrames | None = Field(None, description="frames between the starts of clips, where clip is slide")
    scenes: bool = Field(
        False,
        description="find cuts; no clip crosses one, and each scene counts as a video",
        json_schema_extra={"affects": "media"},
    )
    max_repeated_frames: UnitFloat | None = Field(
        None, description="largest share of a clip's frames that may repeat the one before (repeats-frames)"
    )

    def rate_or(self, rate: float) -> float:
        """frame_rate; `rate` if each video keeps its own frame rate."""
        return rate if self.frame_rate == "source" else self.frame_rate

    def _problems(self) -> Iterator[Problem]:
        if self.min_frames > self.num_frames:
            yield ("min_frames",), f"{self.min_frames} is more than num_frames, {self.num_frames}"
        if self.max_frames is not None and self.max_frames < self.min_frames:
            yield ("max_frames",), f"{self.max_frames} is less than min_frames, {self.min_frames}"
        if self.clips > 1 and self.clip not in ("random", "uniform"):
            yield ("clips",), f"clip: {self.clip} does not count clips; valid with random and uniform"
        if (self.clip == "slide") != (self.clip_stride is not None):
            yield ("clip_stride",), "goes with clip: slide, and slide needs it"
        yield from foreign_options(self, "bucket_strategy", {"frame_interval": ("resolution_frames",)})


class Dataset(Section, json_schema_extra={"affects": "plan"}):
    id: Name = Field(
        description="name of the dataset, in paths, reports and `--set datasets.ID.key=...`",
        json_schema_extra={"affects": "media"},
    )
    dataset_type: MediaKind = Field(
        "image",
        description="an image dataset ignores videos; a video dataset takes images as well, as clips of a frame",
        json_schema_extra={"affects": "media"},
    )
    disabled: bool = Field(False, description="true: neither discovered nor planned")
    source: SourceName | None = Field(
        None,
        description="default: by instance_data_dir, a URL, tars, a table or a folder",
        json_schema_extra={"affects": "media"},
    )
    instance_data_dir: str = Field(
        min_length=1,
        description="folder, URL, tars ({000..012}.tar), manifest, or a dataset of the hub",
        json_schema_extra={"affects": "media"},
    )
    media_root: str | None = Field(
        None,
        description="location of the media on this machine, if another; changes no identity",
        json_schema_extra={"affects": "nothing"},
    )
    split: str = Field("train", description="split of a huggingface dataset", json_schema_extra={"affects": "media"})
    media_column: str | None = Field(
        None,
        description="column of a manifest or huggingface dataset with the media; default: the first usual one",
        json_schema_extra={"affects": "media"},
    )
    follow_links: bool = Field(
        False, description="follow symbolic links that lead outside the folder", json_schema_extra={"affects": "media"}
    )
    identity: Literal["content", "store"] = Field(
        "content",
        description="content: hash every file once; store: the store's own checksum and size",
        json_schema_extra={"affects": "media"},
    )
    skip_file_discovery: bool = Field(
        False,
        description="use the media table as it is; `discover` does not list the source",
        json_schema_extra={"affects": "nothing"},
    )

    caption_strategy: CaptionStrategy | None = Field(
        None, description="default: the source's own", json_schema_extra={"affects": "media"}
    )
    caption_file: str | None = Field(
        None,
        description="the table, for csv, jsonl and parquet; default: the manifest itself",
        json_schema_extra={"affects": "media"},
    )
    caption_column: Texts = Field(
        ("caption",),
        description="column(s); several, and lists, are alternatives",
        json_schema_extra={"affects": "media"},
    )
    captions_per_file: Literal["one", "lines"] = Field(
        "lines",
        description="of a text file; one: all of it is a caption; lines: each line is, as alternatives",
        json_schema_extra={"affects": "media"},
    )
    instance_prompt: str | None = Field(
        None, description="the caption of every item, for instanceprompt", json_schema_extra={"affects": "media"}
    )
    trigger_word: str = Field("", description="put before each caption that does not contain it, with a space")
    prepend: str = Field("", description="put before every caption; no space is added")
    append: str = Field("", description="put after every caption; no space is added")
    tag_shuffle: TagShuffle | None = Field(None, description="a fixed number of orders of each caption's tags")
    caption_filter: Texts = Field((), description="removed from captions: plain text, or /regular expression/")

    make_captions: Literal["missing", "all", "none"] | None = Field(
        None,
        description="items that `caption` describes; default: those without a caption, where it is configured",
        json_schema_extra={"affects": "media"},
    )
    make_captions_where: str | None = Field(
        None, description="filter on columns: only of these items", json_schema_extra={"affects": "media"}
    )
    made_captions: Literal["fill", "beside", "instead"] = Field(
        "fill",
        description="fill: where an item has none; beside, instead: with, or in place of, those of its files",
        json_schema_extra={"affects": "media"},
    )
    caption_sets: Texts = Field(
        ("current",), description="made captions that are used, all as alternatives: current, or names under captions/"
    )

    conditioning_data: OneOrSeveral[str] | None = Field(
        None,
        description="folder or URL of i2i source images, named as the targets; several: of references, in order",
        json_schema_extra={"affects": "media"},
    )
    conditioning_column: OneOrSeveral[str] | None = Field(
        None,
        description="column (webdataset: extension) of the i2i source image; several: of references, in order",
        json_schema_extra={"affects": "media"},
    )
    conditioning_count: int | None = Field(
        None,
        ge=1,
        le=MOST_REFERENCES,
        description="references of an item in conditioning_data, at most, named NAME_1, NAME_2 and so on; default: "
        "one, named as the target",
        json_schema_extra={"affects": "media"},
    )
    mask_data: str | None = Field(
        None,
        description="folder or URL of masks, named as the media; white is trained on",
        json_schema_extra={"affects": "media"},
    )
    mask_column: str | None = Field(
        None, description="column (webdataset: extension) of the mask", json_schema_extra={"affects": "media"}
    )
    make_masks: Literal["missing", "none"] | None = Field(
        None, description="items of which `masks` makes a mask; default: those without one, where it is configured"
    )

    where: str | None = Field(
        None, description="filter on extra columns, such as: score > 5 and license in ('cc0', 'cc-by')"
    )
    repeats: int = Field(0, ge=0, le=1_000_000, description="extra passes in an epoch: 0 = once")
    weight: float = Field(1.0, gt=0, le=1e6, description="factor on the draws in an epoch; 0.5: every other epoch")
    is_regularization_data: bool = Field(False, description="these samples keep the model as it was")
    eval: bool = Field(False, description="hold the whole dataset out for the eval loss")
    eval_fraction: UnitFloat = Field(
        0.0, description="share of the items held out for the eval loss, chosen by content"
    )

    resolution: OneOrSeveral[Size] | None = Field(
        None, description="size of buckets, by resolution_type; several: a sample in each; default: the family's own"
    )
    resolution_type: Literal["pixel_area", "area", "pixel"] = Field(
        "pixel_area",
        description="pixel_area: edge of the square of a bucket's area; area: megapixels; pixel: shorter edge",
    )
    buckets: Literal["computed", "family"] = Field(
        "computed", description="computed: from resolution and strides; family: the sizes the model was made with"
    )
    bucket_step: int = Field(
        64, ge=1, le=MAX_EDGE, description="pixels; sides of computed buckets are multiples of it; 1: the model's own"
    )
    max_aspect: float = Field(2.5, ge=1, le=100, description="longest side of a bucket over its shorter one")
    crop: bool = Field(True, description="true: cover the bucket and crop; false: stretch to it")
    crop_aspect: Literal["preserve", "square", "closest", "random"] = Field(
        "preserve", description="shape of the crop; the last two: of crop_aspect_buckets"
    )
    crop_aspect_buckets: Aspects = Field(
        (), description="width / height for closest and random, such as [1.0, 0.75, 1.33]"
    )
    crop_style: Literal["center", "random", "corner", "face"] = Field(
        "center",
        description="place of the crop; random: seeded by the item's identity; corner: upper left; face: the largest",
    )
    face_detector: str | None = Field(
        None, description="YuNet file that finds faces for crop_style: face; default: OpenCV's cascade"
    )
    minimum_image_size: Size | None = Field(
        None, description="smaller is excluded (too-small); in the unit of resolution_type"
    )
    maximum_image_size: Size | None = Field(
        None, description="larger is excluded (too-large), or first scaled down to target_downsample_size"
    )
    target_downsample_size: Size | None = Field(
        None, description="size to which items larger than maximum_image_size are scaled before the crop"
    )
    allow_upscale: bool = Field(False, description="false: an item smaller than its bucket is excluded (needs-upscale)")
    max_distortion: float | None = Field(
        None, ge=0, le=1000, description="largest change of aspect by stretching: 0.05 is 5 % (too-distorted)"
    )
    max_cropped: UnitFloat | None = Field(
        None, description="largest share of the area that the crop may cut off (too-cropped)"
    )
    animations: Literal["first-frame", "video"] = Field(
        "first-frame", description="how an animated GIF, WebP or PNG is read", json_schema_extra={"affects": "media"}
    )
    video: Video = Video()

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
        given = listed(self.resolution) if self.buckets == "computed" else ()
        return tuple(sorted(set(given))) or (default,)

    @property
    def resolved_source(self) -> SourceName:
        """The configured source, else the source that the location implies."""
        if self.source:
            return self.source
        where = self.instance_data_dir.split("?")[0].lower()
        if where.endswith((".tar", ".tar.gz", ".tgz")):
            return "webdataset"
        if where.endswith((".csv", ".jsonl", ".parquet")):
            return "manifest"
        return "remote" if "://" in where else "folder"

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
        """Whether items without a caption are kept, because a model describes them."""
        return self.make_captions in ("missing", "all")

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
                yield (
                    ("caption_sets", number),
                    f"{name!r} names none; valid: current, and 24 hex digits as of captions/",
                )
        if self.conditioning_data and self.conditioning_column:
            yield ("conditioning_column",), "and conditioning_data name the same thing; keep one"
        for key in ("conditioning_data", "conditioning_column"):
            if len(listed(getattr(self, key))) > MOST_REFERENCES:
                yield (key,), f"has {len(listed(getattr(self, key)))} places; at most {MOST_REFERENCES}"
        if self.conditioning_count and not isinstance(self.conditioning_data, str):
            yield ("conditioning_count",), "goes with one folder or URL in conditioning_data; a list counts its own"
        if self.mask_data and self.mask_column:
            yield ("mask_column",), "and mask_data name the same thing; keep one"
        if self.animations == "video" and self.dataset_type != "video":
            yield ("animations",), "video needs dataset_type: video; images take first-frame"
        if self.eval and self.eval_fraction:
            yield ("eval_fraction",), "has no effect where eval: true holds out everything"
        for key in (
            "instance_data_dir",
            "media_root",
            "caption_file",
            "conditioning_data",
            "mask_data",
            "face_detector",
        ):
            for location in listed(getattr(self, key)):
                _, scheme, rest = location.rpartition("://")
                if scheme and "@" in rest.partition("/")[0]:
                    yield (key,), "holds a user name or password; take it out and give it by the environment"

        strategy, source = self.resolved_caption_strategy, self.resolved_source
        if strategy == "instanceprompt" and not self.instance_prompt:
            yield ("instance_prompt",), "caption_strategy instanceprompt needs it"
        if strategy in ("webdataset", "huggingface") and source != strategy:
            yield ("caption_strategy",), f"{strategy} goes with source: {strategy}; this one is {source}"
        if strategy == "textfile" and source in ("webdataset", "huggingface"):
            yield ("caption_strategy",), f"textfile does not go with source: {source}"
        if strategy in TABLE_STRATEGIES and source != "manifest" and not self.caption_file:
            yield ("caption_file",), f"caption_strategy {strategy} needs the table of captions"

        yield from self._options_without_effect()

        if self.crop_aspect in ("closest", "random") and not self.crop_aspect_buckets:
            yield ("crop_aspect_buckets",), f"crop_aspect {self.crop_aspect} needs a list, such as [1.0, 0.75, 1.33]"
        if self.face_detector and self.crop_style != "face":
            yield ("face_detector",), "goes with crop_style: face"
        low, target, high = self.minimum_image_size, self.target_downsample_size, self.maximum_image_size
        if target is not None and high is None:
            yield ("maximum_image_size",), "target_downsample_size needs it: what is larger is scaled down"
        if target is not None and high is not None and target > high:
            yield ("target_downsample_size",), f"is more than maximum_image_size, {high:g}"
        if low is not None and high is not None and low > high:
            yield ("minimum_image_size",), f"{low:g} is more than maximum_image_size, {high:g}"

    def _options_without_effect(self) -> Iterator[Problem]:
        """Problems of options for a caption strategy, source or media type that this dataset does not use."""
        strategy, source = self.resolved_caption_strategy, self.resolved_source
        in_table, places = strategy in TABLE_STRATEGIES, (self.instance_data_dir, self.media_root or "")
        folders = [*listed(self.conditioning_data), self.mask_data or "://", *(places if source == "folder" else ())]
        at_url = source in ("remote", "manifest") or (
            source == "webdataset" and any("://" in place for place in places)
        )
        columns = "a manifest, a huggingface dataset, or caption_strategy csv, jsonl or parquet"
        goes_with = {
            "instance_prompt": (strategy == "instanceprompt", "caption_strategy: instanceprompt"),
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
        here = f"(this dataset has source: {source}, caption_strategy: {strategy})"
        for key, (is_used, what) in goes_with.items():
            if not is_used:
                yield from idle_options(self, (key,), f"has no effect: it goes with {what} {here}; remove it")
        if source in ("folder", "remote"):
            for key, instead in (("conditioning_column", "conditioning_data"), ("mask_column", "mask_data")):
                reason = f"source: {source} has no columns; use {instead}, or a manifest of the files with that column"
                yield from idle_options(self, (key,), reason)
        if self.dataset_type == "image":
            reason = "has no effect: it goes with dataset_type: video; remove it"
            for path, _ in idle_options(self.video, tuple(Video.model_fields), reason):
                yield ("video", *path), reason
