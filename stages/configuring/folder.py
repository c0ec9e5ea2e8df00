"""The contents of a folder of media: by names alone, and as discover reads them."""

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from schemas.text_format import shorten
from stages.discovery.sources.base import IMAGE_EXTENSIONS, VIDEO_EXTENSIONS
from stages.discovery.sources.walk import walk

#: Names of folders that people give their media, and those of pictures before an edit; the first that is there counts.
MEDIA_NAMES = (
    "media",
    "photos",
    "pictures",
    "images",
    "clips",
    "videos",
    "after",
    "target",
    "targets",
    "dataset",
    "data",
)
SOURCE_NAMES = ("before", "source", "sources", "input", "inputs", "control", "conditioning", "reference", "references")
LEAST_PAIRED = 0.5  # share of pictures with a source of the same name, by which a folder of sources is known
LONGEST_PROMPT = 300  # characters of a caption that becomes a validation prompt
PROMPTS = 2
MOST_FOLDERS = 20  # that are looked into for media
KINDS = {**dict.fromkeys(IMAGE_EXTENSIONS, "image"), **dict.fromkeys(VIDEO_EXTENSIONS, "video")}


@dataclass
class Listing:
    """The names in a folder. captioned: items with a caption file. stems: of all items, with their folders."""

    images: int = 0
    videos: int = 0
    captioned: int = 0
    stems: set[str] = field(default_factory=set)

    @property
    def items(self) -> int:
        return self.images + self.videos


def list_folder(folder: Path) -> Listing:
    """LatentpressError where a folder in it can't be read."""
    listing = Listing()
    for files in walk(os.fspath(folder), KINDS, False, Counter(), texts=True):
        listing.images += files.kinds.count("image")
        listing.videos += files.kinds.count("video")
        stems = [name.rpartition(".")[0] for name in files.names]
        listing.captioned += sum(stem in files.texts for stem in stems)
        listing.stems.update(files.prefix + stem for stem in stems)
    return listing


def find_media(folder: Path) -> Path:
    """The folder in `folder` that is offered: one of a common name, else the only one that has media, else itself."""
    for path in (folder / name for name in MEDIA_NAMES):
        if path.is_dir() and list_folder(path).items:
            return path
    others = [path for path in folder.iterdir() if path.is_dir() and path.name[0] != "."]
    filled = [path for path in others if list_folder(path).items] if len(others) <= MOST_FOLDERS else []
    return filled[0] if len(filled) == 1 else folder


def find_sources(media: Path, listing: Listing) -> Path | None:
    """A folder beside or in `media` with pictures of the same names, as an edit has."""
    for parent in (media.parent, media):
        for name in SOURCE_NAMES:
            folder = parent / name
            if folder.is_dir() and folder != media:
                stems = list_folder(folder).stems
                if listing.stems and len(stems & listing.stems) >= LEAST_PAIRED * len(listing.stems):
                    return folder
    return None


@dataclass(frozen=True)
class Media:
    """Media of one kind as discover reads them. width, height: (n,) pixels; duration: (n,) seconds, 0 of a picture.
    rejects: rows of its report. prompts: captions, each with the path of the item's source, None where it has none."""

    width: NDArray[np.float64]
    height: NDArray[np.float64]
    duration: NDArray[np.float64]
    captions: int
    rejects: tuple[dict[str, Any], ...] = ()
    more_rejects: int = 0
    prompts: tuple[tuple[str, str | None], ...] = ()

    @classmethod
    def of(cls, table: pa.Table, rejects: tuple[dict[str, Any], ...] = (), more_rejects: int = 0) -> "Media":
        """table: of MEDIA_SCHEMA."""
        captions = pc.fill_null(pc.list_value_length(table["captions"]), 0)
        first = [(row["captions"] or [""])[0] for row in table.select(["captions"]).slice(0, 1000).to_pylist()]
        places = sorted({first.index(text) for text in first if text.strip()})
        chosen = [places[number * len(places) // PROMPTS] for number in range(PROMPTS)] if places else []
        sources = table["source"].slice(0, 1000).to_pylist()
        return cls(
            table["width"].to_numpy().astype(np.float64),
            table["height"].to_numpy().astype(np.float64),
            pc.fill_null(table["duration"], 0.0).to_numpy(),
            pc.sum(captions).as_py() or 0,
            rejects,
            more_rejects,
            tuple((_prompt(first[row]), sources[row]) for row in dict.fromkeys(chosen)),
        )

    def __len__(self) -> int:
        return len(self.width)

    @property
    def set_aside(self) -> int:
        return len(self.rejects) + self.more_rejects

    def describe(self) -> dict[str, Any]:
        """Rows of a report: counts, sizes, lengths, captions, what is set aside and why."""
        sides = [f"{w:g}x{h:g}" for w, h in zip(self.width, self.height, strict=True)]
        area = np.argsort(self.width * self.height, kind="stable")
        sizes = f"{sides[area[0]]} to {sides[area[-1]]}, half of them at least {sides[area[len(area) // 2]]}"
        rows: dict[str, Any] = {"items": len(self), "sizes": sizes, "captions": self.captions}
        if self.duration.any():
            low, middle, high = (float(np.quantile(self.duration, share)) for share in (0, 0.5, 1))
            rows["seconds"] = f"{low:.1f} to {high:.1f}, half of them at least {middle:.1f}"
        reasons = Counter(row["reason"] for row in self.rejects)
        more = f", and {self.more_rejects} more" if self.more_rejects else ""
        by_reason = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
        rows["set_aside"] = f"{self.set_aside}: {by_reason}{more}" if self.set_aside else 0
        return rows


def _prompt(caption: str) -> str:
    """One line; a long one ends at a word."""
    text = " ".join(caption.split())
    return text if len(text) <= LONGEST_PROMPT else shorten(text, LONGEST_PROMPT).removesuffix("...").rpartition(" ")[0]
