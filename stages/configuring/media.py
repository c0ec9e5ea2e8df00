"""Facts about a folder of media, from names of files and from the files' headers (`read_media`)."""

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stages.discovery.sources.walk import walk
from stages.media.files import IMAGE_EXTENSIONS, VIDEO_EXTENSIONS

#: Common names of folders of media, and of pictures before an edit. The first name that exists is used.
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
MIN_PAIRED = 0.5  # smallest share of pictures with a source of the same name in a folder of sources
MAX_FOLDERS = 20  # folders that are searched for media
KINDS = {**dict.fromkeys(IMAGE_EXTENSIONS, "image"), **dict.fromkeys(VIDEO_EXTENSIONS, "video")}


@dataclass
class Listing:
    """The names in a folder. items: kind -> path without extension -> path, below the folder. captions: path without
    extension -> caption file."""

    folder: Path
    items: dict[str, dict[str, str]] = field(default_factory=lambda: {"image": {}, "video": {}})
    captions: dict[str, str] = field(default_factory=dict)

    @property
    def images(self) -> dict[str, str]:
        return self.items["image"]

    @property
    def videos(self) -> dict[str, str]:
        return self.items["video"]

    @property
    def count(self) -> int:
        return len(self.images) + len(self.videos)


def list_folder(folder: Path) -> Listing:
    """List the media and captions in a folder. Raises LatentpressError if a subfolder can't be read."""
    listing = Listing(folder)
    for files in walk(os.fspath(folder), KINDS, Counter(), texts=True):
        for path, kind in zip(files.paths, files.kinds, strict=True):
            stem = path.rpartition(".")[0]
            listing.items[kind][stem] = path
            if stem in files.texts:
                listing.captions[stem] = files.texts[stem][0]
    return listing


def find_media(folder: Path) -> Path:
    """The subfolder of `folder` that is proposed: a subfolder with a common name, else the only subfolder with media,
    else `folder`."""
    for path in (folder / name for name in MEDIA_NAMES):
        if path.is_dir() and list_folder(path).count:
            return path
    subfolders = [path for path in folder.iterdir() if path.is_dir() and path.name[0] != "."]
    media_folders = [path for path in subfolders if list_folder(path).count] if len(subfolders) <= MAX_FOLDERS else []
    return media_folders[0] if len(media_folders) == 1 else folder


def find_sources(listing: Listing) -> Path | None:
    """Find a folder of source images: a folder next to the media or in them, with pictures of the same names."""
    media = listing.folder
    for parent in (media.parent, media):
        for folder in (parent / name for name in SOURCE_NAMES):
            if folder.is_dir() and folder != media:
                paired = list_folder(folder).images.keys() & listing.images.keys()
                if listing.images and len(paired) >= MIN_PAIRED * len(listing.images):
                    return folder
    return None


@dataclass(frozen=True)
class Media:
    """Media of one kind. count: number of items. width, height: (n,) pixels of the files that were read. duration: (n,)
    seconds, 0 for a picture. captions: number of items with a caption file. problems: messages about files that can't
    be read. prompts: (caption, path of the item's source image below `sources`, or None). names: (n,) paths of the
    files that were read, below the folder."""

    count: int
    width: NDArray[np.float64]
    height: NDArray[np.float64]
    duration: NDArray[np.float64]
    captions: int
    problems: tuple[str, ...] = ()
    prompts: tuple[tuple[str, str | None], ...] = ()
    names: tuple[str, ...] = ()

    def describe(self) -> dict[str, Any]:
        """Facts for a report."""
        sides = [f"{w:g}x{h:g}" for w, h in zip(self.width, self.height, strict=True)]
        area = np.argsort(self.width * self.height, kind="stable")
        sizes = f"{sides[area[0]]} to {sides[area[-1]]}, half of them at least {sides[area[len(area) // 2]]}"
        facts: dict[str, Any] = {"items": self.count, "with_a_caption_file": self.captions, "sizes": sizes}
        if self.duration.any():
            low, middle, high = (float(np.quantile(self.duration, share)) for share in (0, 0.5, 1))
            facts["seconds"] = f"{low:.1f} to {high:.1f}, half of them at least {middle:.1f}"
        read = len(self.width) + len(self.problems)
        if read < self.count:
            facts["read"] = f"{read} files, spread evenly"
        if self.problems:
            facts["unreadable"] = f"{len(self.problems)} of {read}: {'; '.join(self.problems[:3])}"
        return facts
