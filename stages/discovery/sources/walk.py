"""Listing a local folder, or the objects below a URL: media files at any depth, and the caption files next to them.

The second scan of an unchanged tree is this walk and little else, so it is written for speed: one `scandir` a folder,
one `stat` a file. Memory is bounded by the largest single folder. Hidden names are left out. Symbolic links are
followed inside the folder (with `follow_links` anywhere), but never back to a folder that contains them; links that
are not followed are counted.
"""

import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from schemas.config.datasets import Dataset, MediaKind
from schemas.errors import LatentpressError
from schemas.regular_files import NOT_REGULAR
from stages.discovery.sources.object_store import RemoteFile, listing_errors, object_version
from stages.discovery.sources.urls import join_url, open_filesystem
from stages.media.files import BACKSLASH_ADVICE, MediaError, extensions_of_kinds

CAPTION_KIND = "text"
OUTSIDE, BACK = "link that leads outside", "link that leads back"
MAX_CONNECTIONS = 16  # concurrent requests for sizes and versions

#: A folder and the chain of folders through which it was reached.
_ParentChain = tuple[str, "_ParentChain | None"]
#: A folder to walk: its path, its path below the top, whether a link was followed on the way, its parents.
_PendingFolder = tuple[str, str, bool, _ParentChain | None]


def extensions_of_dataset(dataset: Dataset) -> dict[str, MediaKind]:
    """Extension -> kind of the media of a dataset: a video dataset may hold images too, which come second."""
    return extensions_of_kinds(("video", "image") if dataset.dataset_type == "video" else ("image",))


@dataclass
class FolderFiles:
    """The files in one folder, row for row: names, kinds, sizes in bytes, versions; None if unknown.

    prefix: the folder's path below the top, "" or with a "/" at its end. texts: stem -> name and version of the caption
    files. problems: row -> problem and advice of a file that can't be used. Versions are modification times in
    nanoseconds, of objects size and ETag.
    """

    prefix: str
    names: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    sizes: list[int | None] = field(default_factory=list)
    versions: list[str | None] = field(default_factory=list)
    texts: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    problems: dict[int, tuple[str, str]] = field(default_factory=dict)

    def add(self, name: str, kind: str, size: int | None, version: str | None) -> None:
        self.names.append(name)
        self.kinds.append(kind)
        self.sizes.append(size)
        self.versions.append(version)

    def add_problem(self, name: str, kind: str, problem: str, advice: str) -> None:
        self.problems[len(self.names)] = problem, advice
        self.add(name, kind, None, None)

    def add_text(self, name: str, version: str | None) -> None:
        """Of "a.txt" and "a.TXT" the former is the caption file of "a"."""
        stem, _, ending = name.rpartition(".")
        if ending == "txt" or stem not in self.texts:
            self.texts[stem] = name, version

    def full_versions(self) -> list[str | None]:
        """Versions that begin with the size, also of local files."""
        pairs = zip(self.sizes, self.versions, strict=True)
        return [f"{size}:{version}" if version and ":" not in version else version for size, version in pairs]


def caption_version(status: os.stat_result) -> str:
    """Its modification time in nanoseconds, and where it differs the time of the last change of its content or name,
    which no program can set back as it can the other."""
    modified, changed = status.st_mtime_ns, status.st_ctime_ns
    return str(modified) if modified == changed else f"{modified}:{changed}"


#: What to do with a file that is probably a table, by its extension.
_TABLE_ADVICE = {
    ".ndjson": "rename it: a table of JSON lines ends with .jsonl",
    ".json": "a table is JSON lines: write one object a line, into a file that ends with .jsonl",
    ".tsv": "rename it: a table with tabs between its cells ends with .csv, too",
    ".xlsx": "save it as .csv",
    ".zip": "unpack it, and name the folder",
}


def require_folder(folder: str, key: str) -> None:
    """Raise LatentpressError, naming the option, unless `folder` is one."""
    if os.path.isdir(folder):
        return
    key = f"{key}: " if key else ""
    if os.path.exists(folder):
        step = _TABLE_ADVICE.get(os.path.splitext(folder)[1].lower(), "name the folder that it is in")
        raise LatentpressError(f"{key}{folder} is a file, not a folder", step)
    if "\\" in folder:
        raise LatentpressError(f"{key}there is no folder {folder}", BACKSLASH_ADVICE)
    step = "mount its disk, or correct the path (media_root: where media are on this machine)"
    if key.endswith(".instance_data_dir: "):
        step += "; for a dataset of the Hugging Face Hub set source: huggingface"
    raise LatentpressError(f"{key}there is no folder {folder}", step)


class _KindByExtension(dict[str, str | None]):
    """Extension without dot -> kind, in any case; None for other extensions."""

    def __missing__(self, ending: str) -> str | None:
        return self.get(ending.lower())


def walk(
    top: str,
    kinds: Mapping[str, str],
    ignored: Counter[str],
    *,
    key: str = "",
    follow_links: bool = False,
    texts: bool = False,
) -> Iterator[FolderFiles]:
    """Every folder below `top`, a local folder or a URL, with its files of `kinds` (extension with dot -> kind), in no
    order.

    key: the option that names `top`, for messages. texts: look for caption files too (".txt"). `ignored` counts what is
    left alone, by extension or reason. Raises LatentpressError for a folder that can't be read: its files would leave
    the training set unnoticed. What others remove meanwhile is left out.
    """
    endings = _KindByExtension({ending[1:]: kind for ending, kind in kinds.items()})
    if texts:
        endings["txt"] = CAPTION_KIND
    if "://" in top:
        return _walk_objects(top, endings, ignored)
    require_folder(top, key)
    return _walk_folder(top, endings, follow_links, ignored)


def _walk_folder(
    top: str, endings: _KindByExtension, follow_links: bool, ignored: Counter[str]
) -> Iterator[FolderFiles]:
    real_top = os.path.join(os.path.realpath(top), "")
    todo: list[_PendingFolder] = [(top, "", False, None)]
    while todo:  # one loop, since another call a file costs 3 %
        path, prefix, linked, above = todo.pop()
        files, chain = FolderFiles(prefix), (path, above)
        add_name, add_kind = files.names.append, files.kinds.append
        add_size, add_version = files.sizes.append, files.versions.append
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    name = entry.name
                    if name[0] == ".":
                        continue
                    link = entry.is_symlink()
                    if link and not follow_links:
                        inside = os.path.join(os.path.realpath(entry.path), "").startswith(real_top)
                        if not inside and os.path.exists(entry.path):  # a broken link is a missing file
                            ignored[OUTSIDE] += 1
                            continue
                    if os.path.isdir(entry.path) if link else entry.is_dir():
                        if (link or linked) and _is_ancestor(entry.path, chain):
                            ignored[BACK] += 1
                        else:
                            todo.append((entry.path, f"{prefix}{name}/", link or linked, chain))
                        continue
                    stem, _, ending = name.rpartition(".")
                    kind = endings[ending]
                    if kind is None or not stem:
                        ignored[f".{ending.lower()}" if stem and ending else ""] += 1
                        continue
                    try:
                        status = entry.stat()
                    except OSError as error:
                        removed = isinstance(error, FileNotFoundError) and not link  # since the folder was listed
                        if kind != CAPTION_KIND and not removed:  # a broken link is no caption
                            files.add_problem(name, kind, *_stat_problem(error))
                        continue
                    if kind == CAPTION_KIND:
                        files.add_text(name, f"{status.st_size}:{caption_version(status)}")
                    elif status.st_size or stat.S_ISREG(status.st_mode):
                        add_name(name)
                        add_kind(kind)
                        add_size(status.st_size)
                        add_version(str(status.st_mtime_ns))
                    else:
                        files.add_problem(name, kind, f"unreadable: {NOT_REGULAR}", "point the dataset at files")
        except OSError as error:
            if above is not None and isinstance(error, FileNotFoundError):  # removed since its parent was listed
                continue
            step = "give read permission to the folder, or run again if it was being moved"
            raise LatentpressError(f"{path}: {error.strerror}", step) from error
        yield files


def _is_ancestor(folder: str, chain: _ParentChain | None) -> bool:
    """Whether `folder` is one of those through which it was reached."""
    with suppress(FileNotFoundError):  # removed meanwhile
        status = os.stat(folder)
        while chain is not None:
            parent, chain = chain
            if os.path.samestat(status, os.stat(parent)):
                return True
    return False


def _stat_problem(error: OSError) -> tuple[str, str]:
    if isinstance(error, FileNotFoundError):
        return "missing: is not there", "restore what the link leads to, or delete the link"
    return f"unreadable: can't be read ({error.strerror})", "check its permissions and the disk, then run again"


def _walk_objects(url: str, endings: _KindByExtension, ignored: Counter[str]) -> Iterator[FolderFiles]:
    """The objects of each folder below `url`, as the store names folders."""
    fs, root = open_filesystem(url)
    root = root.rstrip("/")
    todo = [root]
    while todo:
        folder = todo.pop()
        fs.invalidate_cache()  # so that changes are seen, and listings are not kept
        prefix = f"{folder[len(root) + 1 :]}/" if folder != root else ""
        files, is_empty = FolderFiles(prefix), True
        found: list[tuple[str, str, int | None, str | None]] = []
        with listing_errors(url):
            for info in fs.ls(folder, detail=True):
                name = info["name"].rstrip("/")
                last = name[len(folder) + 1 :]
                is_folder = info["type"] == "directory"
                if name == folder and is_folder:
                    ignored["folder without a name"] += 1
                    continue
                if not name.startswith(folder + "/") or "/" in last or last.startswith((".", "?")):
                    continue  # "?": links by which a server's page of links sorts itself
                is_empty = False
                stem, _, ending = last.rpartition(".")
                kind = endings[ending] if stem else None
                if not name.isascii() and name.encode(errors="replace").decode() != name:
                    ignored["name that is not UTF-8"] += 1
                elif is_folder:
                    todo.append(name)
                elif kind is None:
                    ignored[f".{ending.lower()}" if stem and ending else ""] += 1
                else:
                    found.append((last, kind, info.get("size"), object_version(info)))
            if folder == root and is_empty and not fs.exists(root):
                raise FileNotFoundError
        if any(size is None for _, _, size, _ in found):  # a web server's page has names only
            places = [join_url(url, prefix + name) for name, *_ in found]
            with ThreadPoolExecutor(MAX_CONNECTIONS) as pool:
                stats = pool.map(_object_stats, places)
            found = [(name, kind, *stat) for (name, kind, _, _), stat in zip(found, stats, strict=True)]
        for name, kind, size, version in found:
            if kind == CAPTION_KIND:
                files.add_text(name, version)
            else:
                files.add(name, kind, size, version)
        yield files


def _object_stats(url: str) -> tuple[int | None, str | None]:
    try:
        info = RemoteFile(url).info()
    except MediaError:  # opening it fails again, which sets it aside by name
        return None, None
    return info.get("size"), object_version(info)
