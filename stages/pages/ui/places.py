"""The folders that a user can browse on the page: the given root folders and the folders below them.

The page shows names of folders, counts of media and, for `import-config`, names of configurations; it does not open
files. Hidden paths, paths with ".." and links to places outside of the roots are refused as if they did not exist."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from schemas.errors import LatentpressError
from stages.configuring.media import KINDS
from stages.pages.ui.app import get, render

MAX_LISTED = 500  # largest number of folders, and of configurations
MAX_ENTRIES = 20_000  # entries of a folder that are counted at most, to limit the time of an answer
CONFIGURATIONS = (".json", ".toml", ".yaml", ".yml", ".env", ".sh", ".bash", ".txt")


class NotPermitted(LatentpressError):
    """Raised if a path is not below the folders that may be browsed, or is not a folder or file as requested."""


@dataclass(frozen=True)
class Entry:
    """A folder. pictures, clips: numbers of pictures and clips directly in it, None if they were not counted."""

    name: str
    path: str
    pictures: int | None
    clips: int | None


@dataclass(frozen=True)
class Listing:
    """The content of a folder. parent: path of the parent folder; "" for the list of roots, None at the top. left_out:
    number of folders that are not in `folders`. configurations: names of configuration files."""

    path: str
    parent: str | None
    folders: Sequence[Entry]
    left_out: int
    pictures: int
    clips: int
    configurations: Sequence[str]


class Places:
    """The folders that may be browsed. roots: these folders; a root inside of another root is not listed separately."""

    def __init__(self, roots: Sequence[Path]) -> None:
        absolute_roots = list(dict.fromkeys(root.absolute() for root in roots))
        self.roots = [
            root for root in absolute_roots if not any(root != top and _is_inside(root, top) for top in absolute_roots)
        ]

    def find_folder(self, text: str) -> Path:
        """The folder at a path that a user typed. Raises NotPermitted if it is not a folder below the roots."""
        return self._find(text, Path.is_dir)

    def find_file(self, text: str) -> Path:
        return self._find(text, Path.is_file)

    def _find(self, text: str, is_kind: Callable[[Path], bool]) -> Path:
        path = Path(text)
        tops = [root for root in (*self.roots, *(root.resolve() for root in self.roots)) if path.is_relative_to(root)]
        if path.is_absolute() and ".." not in path.parts:
            with suppress(OSError, ValueError, RuntimeError):
                target = path.resolve(strict=True)
                is_inside = any(_is_inside(path, top) and _is_inside(target, top.resolve()) for top in tops)
                if is_inside and is_kind(target):
                    return path
        raise NotPermitted(
            f"{text!a} is not below the folders that may be browsed",
            f"valid: folders below {', '.join(map(str, self.roots))}; add more with `latentpress ui --browse FOLDER`",
        )

    def list_roots(self) -> Listing:
        """List the roots as if they were in one folder."""
        folders = [_count(str(root), root) for root in self.roots if root.is_dir()]
        return Listing("", None, folders, 0, 0, 0, ())

    def list_folder(self, text: str) -> Listing:
        """List the content of a folder. Raises NotPermitted if it is not below the roots or can't be read."""
        folder = self.find_folder(text)
        try:
            with os.scandir(folder) as entries:
                visible_entries = [entry for entry in entries if entry.name[0] != "." and entry.name.isprintable()]
            inner = sorted(entry.name for entry in visible_entries if entry.is_symlink() or entry.is_dir())
        except OSError as error:
            raise NotPermitted(f"{folder} can't be read: {error.strerror}", "choose another folder") from error
        folders = [name for name in inner if self._is_found(folder / name, Path.is_dir)]
        names = sorted(entry.name for entry in visible_entries)
        suffixes = {name: os.path.splitext(name)[1].lower() for name in names}
        files = [name for name in names if suffixes[name] in CONFIGURATIONS]
        kinds = [KINDS.get(suffix) for suffix in suffixes.values()]
        is_root = any(folder in (root, root.resolve()) for root in self.roots)
        return Listing(
            str(folder),
            str(folder.parent) if not is_root else "" if len(self.roots) > 1 else None,
            [_count(name, folder / name) for name in folders[:MAX_LISTED]],
            max(0, len(folders) - MAX_LISTED),
            kinds.count("image"),
            kinds.count("video"),
            [name for name in files[:MAX_LISTED] if self._is_found(folder / name, Path.is_file)],
        )

    def _is_found(self, path: Path, is_kind: Callable[[Path], bool]) -> bool:
        with suppress(NotPermitted):
            return bool(self._find(str(path), is_kind))
        return False


def _is_inside(path: Path, top: Path) -> bool:
    """Whether a path is the folder `top`, or is below it and not hidden."""
    return path.is_relative_to(top) and all(part[0] != "." for part in path.relative_to(top).parts)


def _count(name: str, folder: Path) -> Entry:
    """Count the pictures and clips in a folder. The counts are None if it can't be read or has more than MAX_ENTRIES
    entries."""
    kinds = list[str | None]()
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if len(kinds) == MAX_ENTRIES:
                break
            kinds.append(None if entry.name[0] == "." else KINDS.get(os.path.splitext(entry.name)[1].lower()))
        else:
            return Entry(name, str(folder), kinds.count("image"), kinds.count("video"))
    return Entry(name, str(folder), None, None)


FOLDERS_PATH = "/folders"


def list_requested(places: Places, request: Request) -> tuple[Listing, NotPermitted | None]:
    """List the folder that a request names; without a name, the only root or all roots. Returns (listing, None), or
    (list of roots, error) if the named folder can't be listed."""
    path = request.query_params.get("at", "")
    if not path and len(places.roots) == 1:
        path = str(places.roots[0])
    try:
        return (places.list_folder(path) if path else places.list_roots()), None
    except NotPermitted as error:
        return places.list_roots(), error


def make_folders_route(places: Places) -> BaseRoute:
    def show(request: Request) -> Response:
        listing, problem = list_requested(places, request)
        return render(request, "projects/folders.html", title="Folders", listing=listing, problem=problem)

    return get(FOLDERS_PATH, show)
