"""A local folder as a source: media files, the caption files beside them, and i2i source images.

Sorted by path, so that the order in which a file system lists things changes nothing. Symbolic links are
followed only while they stay inside the folder; the others are counted among the other files.
"""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from schemas.config import Dataset
from schemas.errors import LatentpressError
from stages.media.errors import MediaError, unreadable

IMAGES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".avif", ".heic"))
VIDEOS = frozenset((".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v"))


@dataclass(frozen=True)
class Item:
    """One file: path relative to the folder with "/", size in bytes, modification time in nanoseconds."""

    path: str
    kind: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Listing:
    items: list[Item]
    ignored: dict[str, int]

    @property
    def ignored_text(self) -> str:
        """What was left alone, by extension: "no other files" or "12 other files: .json 3, .md 9"."""
        if not self.ignored:
            return "no other files"
        counts = ", ".join(f"{what or 'no extension'} {count}" for what, count in sorted(self.ignored.items()))
        return f"{sum(self.ignored.values())} other files: {counts}"


def scan(dataset: Dataset) -> Listing:
    """Every media file below the dataset's folder. An absent or unreadable folder is an error naming it."""
    root = _existing(dataset.root, f"datasets.{dataset.id}.instance_data_dir")
    kinds = {suffix: "image" for suffix in IMAGES}
    if dataset.dataset_type == "video":
        kinds |= {suffix: "video" for suffix in VIDEOS}
    items, ignored = [], Counter[str]()
    for path in _walk(root, root.resolve(), ignored):
        suffix = path.suffix.lower()
        if suffix in kinds:
            items.append(_item(path, root, kinds[suffix]))
        elif suffix != ".txt":
            ignored[suffix] += 1
    return Listing(sorted(items, key=lambda item: item.path), dict(ignored))


def captions(dataset: Dataset, item: Item) -> list[str]:
    """The non-empty lines of <name>.txt beside the file. No file, no text or not UTF-8: set aside, by name."""
    path = (Path(dataset.root) / item.path).with_suffix(".txt")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        media = Path(dataset.root) / item.path
        raise MediaError("no-caption", media, "has no caption", f"write one into {path.name} beside it") from None
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 (byte {error.start})"
        raise MediaError("caption-not-utf8", path, problem, "save it as UTF-8") from error
    except OSError as error:
        raise unreadable(path, error) from error
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise MediaError("empty-caption", path, "holds no text", "write a caption, one alternative a line")
    return list(dict.fromkeys(lines))


class Companions:
    """The source images of i2i targets: the same relative name, any image extension, in conditioning_data.

    Each of its folders is listed once, however many targets there are. Several threads may call `of`.
    """

    def __init__(self, dataset: Dataset) -> None:
        assert dataset.conditioning_data is not None
        self._root = _existing(dataset.conditioning_data, f"datasets.{dataset.id}.conditioning_data")
        self._folders: dict[Path, dict[str, list[Path]]] = {}

    def of(self, item: Item) -> Item:
        stem = (self._root / item.path).with_suffix("")
        found = self._images(stem.parent).get(stem.name, [])
        if not found:
            problem, step = "is not there", f"put the source image at {stem}.png"
            raise MediaError("no-source", self._root / item.path, problem, step)
        if len(found) > 1:
            names = ", ".join(path.name for path in found)
            raise MediaError("several-sources", stem, f"stands for several files ({names})", "keep one of them")
        return _item(found[0], self._root, "image")

    def _images(self, folder: Path) -> dict[str, list[Path]]:
        """Name without extension -> the images of that name."""
        if folder not in self._folders:
            images: dict[str, list[Path]] = {}
            for path in sorted(folder.iterdir()) if folder.is_dir() else ():
                if path.suffix.lower() in IMAGES and not path.name.startswith("."):
                    images.setdefault(path.stem, []).append(path)
            self._folders[folder] = images
        return self._folders[folder]


def _existing(folder: str, key: str) -> Path:
    root = Path(folder)
    if not root.is_dir():
        raise LatentpressError(
            f"{key}: {folder} is not a folder", "create it, or correct the path in the configuration"
        )
    return root


def _walk(folder: Path, top: Path, ignored: Counter[str]) -> Iterator[Path]:
    """Everything below `folder` that is no folder; what hangs or is gone is found out when it is read."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        step = "give read permission to the folder, or run again if it was being moved"
        raise LatentpressError(f"{folder}: {error.strerror}", step) from error
    for entry in entries:
        if entry.name.startswith("."):
            continue
        path = Path(entry.path)
        if entry.is_symlink() and path.exists() and not _inside(path, top):
            ignored["link that leads outside"] += 1
        elif entry.is_dir():
            yield from _walk(path, top, ignored)
        else:
            yield path


def _inside(link: Path, top: Path) -> bool:
    """Whether a link stays inside the folder and does not lead back to a folder that holds it."""
    target = link.resolve()
    return target.is_relative_to(top) and not link.parent.resolve().is_relative_to(target)


def _item(path: Path, root: Path, kind: str) -> Item:
    name = path.relative_to(root).as_posix()
    try:
        status = path.stat()
    except OSError:  # a link to nothing, or gone by now: reading it says so, and it is set aside
        return Item(name, kind, 0, 0)
    return Item(name, kind, status.st_size, status.st_mtime_ns)
