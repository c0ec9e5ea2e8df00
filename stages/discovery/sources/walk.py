"""Listing a local folder, or the objects below a URL: media files at any depth, and the caption files next to them.

Most of the time of a second scan of an unchanged tree is this walk, so it is written for speed: one `scandir` per
folder, one `stat` per file. Memory is bounded by the largest single folder. Hidden names are skipped. Symbolic links
are followed inside the folder (with `follow_links`, to any place), but never back to a folder that contains them; links
that are not followed are counted.
"""

import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from schemas.cli.report import printable
from schemas.config.datasets import Dataset, MediaKind
from schemas.errors import LatentpressError
from schemas.regular_files import NOT_REGULAR
from stages.discovery.sources.columns import CHUNK_ROWS, Columns
from stages.discovery.sources.object_store import RemoteFile, listing_errors, object_version
from stages.discovery.sources.urls import join_url, open_filesystem
from stages.media.files import MediaError, extensions_of_kinds

CAPTION_KIND = "text"
OUTSIDE_LINK, BACK_LINK = "link that leads outside", "link that leads back"
MAX_CONNECTIONS = 16  # concurrent requests for sizes and versions


def extensions_of_dataset(dataset: Dataset) -> dict[str, MediaKind]:
    """Extension -> kind, for the media of a dataset. A video dataset may contain images; their extensions come last."""
    return extensions_of_kinds(("video", "image") if dataset.dataset_type == "video" else ("image",))


class FileList:
    """The files of some folders below a common folder or URL; a folder's files are always in one list.

    paths (below the common folder), kinds, sizes (bytes), versions: one entry per file; sizes and versions are None if
    unknown. A version is the modification time in nanoseconds, for an object its size and ETag. texts: path without
    extension -> (path, version) of a caption file. problems: row -> (problem, advice) of a file that can't be used.
    """

    def __init__(self) -> None:
        self.paths, self.kinds = list[str](), list[str]()
        self.sizes, self.versions = list[int | None](), list[str | None]()
        self.texts: dict[str, tuple[str, str | None]] = {}
        self.problems: dict[int, tuple[str, str]] = {}

    def add(self, path: str, kind: str, size: int | None, version: str | None) -> None:
        """Add a file. If "a.txt" and "a.TXT" exist, "a.txt" is the caption file of "a". A path that is not UTF-8 is
        rejected, because a table can't store it."""
        if kind == CAPTION_KIND:
            stem, _, ending = path.rpartition(".")
            if ending == "txt" or stem not in self.texts:
                self.texts[stem] = path, version
        elif (printed := printable(path)) != path:
            self.add_problem(printed, kind, "name-not-utf8: has a name that is not UTF-8", "rename it")
        else:
            self._append(path, kind, size, version)

    def add_problem(self, path: str, kind: str, problem: str, advice: str) -> None:
        self.problems[len(self.paths)] = problem, advice
        self._append(path, kind, None, None)

    def _append(self, path: str, kind: str, size: int | None, version: str | None) -> None:
        self.paths.append(path)
        self.kinds.append(kind)
        self.sizes.append(size)
        self.versions.append(version)

    def columns(self) -> Columns:
        """The files as columns of a listing."""
        columns = {"path": pa.array(self.paths, pa.string()), "kind": pa.array(self.kinds, pa.string())}
        columns |= {"size": pa.array(self.sizes, pa.int64()), "version": pa.array(self.versions, pa.string())}
        if self.problems:
            rows = [self.problems.get(row, (None, None)) for row in range(len(self.paths))]
            columns["problem"], columns["advice"] = (
                pa.array(column, pa.string()) for column in zip(*rows, strict=True)
            )
        return columns

    def full_versions(self) -> list[str | None]:
        """Versions that begin with the file size, for local files too."""
        pairs = zip(self.sizes, self.versions, strict=True)
        return [f"{size}:{version}" if version and ":" not in version else version for size, version in pairs]


def caption_version(status: os.stat_result) -> str:
    """The version of a caption file: its modification time in nanoseconds and, if different, its change time (ctime),
    which programs can't set."""
    modified, changed = status.st_mtime_ns, status.st_ctime_ns
    return str(modified) if modified == changed else f"{modified}:{changed}"


def require_folder(folder: str, key: str) -> None:
    """Raise LatentpressError, naming the option `key`, unless `folder` is an existing folder."""
    if os.path.isdir(folder):
        return
    problem, step = (
        f"the folder {folder} does not exist",
        "mount its disk, or correct the path (on this machine: media_root)",
    )
    if os.path.exists(folder):
        problem = f"{folder} is a file, not a folder"
        step = "use its folder; the name of a table ends with .csv, .jsonl or .parquet"
    elif key.endswith(".instance_data_dir"):
        step += "; for a dataset on the Hugging Face Hub, set source: huggingface"
    raise LatentpressError(f"{key}: {problem}" if key else problem, step)


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
) -> Iterator[FileList]:
    """The files of `kinds` (extension with dot -> kind) below `top`, a local folder or a URL, some folders at a time,
    in any order.

    key: the option that names `top`, for messages. texts: whether to look for caption files (".txt") too. `ignored`
    counts the remaining files, by extension or reason. Raises LatentpressError for a folder that can't be read, because
    its files would leave the training set unnoticed. Files and folders that are removed during the walk are left out.
    """
    endings = _KindByExtension({ending[1:]: kind for ending, kind in kinds.items()})
    if texts:
        endings["txt"] = CAPTION_KIND
    if "://" in top:
        return _walk_objects(top, endings, ignored)
    require_folder(top, key)
    return _walk_folder(top, endings, follow_links, ignored)


def _walk_folder(top: str, endings: _KindByExtension, follow_links: bool, ignored: Counter[str]) -> Iterator[FileList]:
    real_top = os.path.join(os.path.realpath(top), "")
    files = FileList()
    todo: list[tuple[str, str, tuple[tuple[int, int], ...]]] = [(top, "", ())]  # (folder, prefix, ids of its parents)
    while todo:  # a single loop, because one more function call per file costs 3 %
        path, prefix, ancestors = todo.pop()
        texts, is_ascii = files.texts, prefix.isascii()
        add_path, add_kind = files.paths.append, files.kinds.append
        add_size, add_version = files.sizes.append, files.versions.append
        try:
            status = os.stat(path)
            folder = status.st_dev, status.st_ino
            if folder in ancestors:
                ignored[BACK_LINK] += 1
                continue
            with os.scandir(path) as entries:
                for entry in entries:
                    name = entry.name
                    if name[0] == ".":
                        continue
                    link = entry.is_symlink()
                    if link and not follow_links:
                        is_inside = os.path.join(os.path.realpath(entry.path), "").startswith(real_top)
                        if not is_inside and os.path.exists(entry.path):  # a broken link is a missing file
                            ignored[OUTSIDE_LINK] += 1
                            continue
                    if os.path.isdir(entry.path) if link else entry.is_dir():
                        todo.append((entry.path, f"{prefix}{name}/", (*ancestors, folder)))
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
                        if kind != CAPTION_KIND and not removed:  # a broken link is not a caption
                            files.add_problem(printable(prefix + name), kind, *_stat_problem(error))
                        continue
                    if kind == CAPTION_KIND:
                        version = f"{status.st_size}:{caption_version(status)}"
                        if ending == "txt" or prefix + stem not in texts:
                            texts[prefix + stem] = prefix + name, version
                    elif not status.st_size and not stat.S_ISREG(status.st_mode):
                        step = "replace it with a regular file"
                        files.add_problem(printable(prefix + name), kind, f"unreadable: {NOT_REGULAR}", step)
                    elif is_ascii and name.isascii():
                        add_path(prefix + name)
                        add_kind(kind)
                        add_size(status.st_size)
                        add_version(str(status.st_mtime_ns))
                    else:
                        files.add(prefix + name, kind, status.st_size, str(status.st_mtime_ns))
        except OSError as error:
            if ancestors and isinstance(error, FileNotFoundError):  # removed since its parent was listed
                continue
            step = "give read permission for the folder, or run again if it was being moved"
            raise LatentpressError(f"{path}: {error.strerror}", step) from error
        if len(files.paths) >= CHUNK_ROWS:
            yield files
            files = FileList()
    yield files


def _stat_problem(error: OSError) -> tuple[str, str]:
    if isinstance(error, FileNotFoundError):
        return "missing: does not exist", "restore the target of the link, or delete the link"
    return f"unreadable: can't be read ({error.strerror})", "check its permissions and the disk, then run again"


def _walk_objects(url: str, endings: _KindByExtension, ignored: Counter[str]) -> Iterator[FileList]:
    """The objects below `url`, folder by folder, with folders as the store lists them."""
    fs, root = open_filesystem(url)
    root = root.rstrip("/")
    files, todo = FileList(), [root]
    while todo:
        folder = todo.pop()
        fs.invalidate_cache()  # so that changes are found, and listings need no memory
        is_empty = True
        found_files: list[tuple[str, str, int | None, str | None]] = []
        with listing_errors(url):
            for info in fs.ls(folder, detail=True):
                name = info["name"].rstrip("/")
                last = name[len(folder) + 1 :]
                is_folder = info["type"] == "directory"
                if name == folder and is_folder:
                    ignored["folder without a name"] += 1
                    continue
                if not name.startswith(folder + "/") or "/" in last or last.startswith((".", "?")):
                    continue  # "?": links that sort a server's page of links
                is_empty = False
                stem, _, ending = last.rpartition(".")
                kind = endings[ending] if stem else None
                if is_folder:
                    todo.append(name)
                elif kind is None:
                    ignored[f".{ending.lower()}" if stem and ending else ""] += 1
                else:
                    found_files.append((name[len(root) + 1 :], kind, info.get("size"), object_version(info)))
            if folder == root and is_empty and not fs.exists(root):
                raise FileNotFoundError
        if any(size is None for _, _, size, _ in found_files):  # a web server's page has only names
            with ThreadPoolExecutor(MAX_CONNECTIONS) as pool:
                stats = pool.map(_object_stats, [join_url(url, path) for path, *_ in found_files])
            found_files = [(path, kind, *stat) for (path, kind, _, _), stat in zip(found_files, stats, strict=True)]
        for row in found_files:
            files.add(*row)
        if len(files.paths) >= CHUNK_ROWS:
            yield files
            files = FileList()
    yield files


def _object_stats(url: str) -> tuple[int | None, str | None]:
    try:
        info = RemoteFile(url).info()
    except MediaError:  # opening it fails again and then rejects it
        return None, None
    return info.get("size"), object_version(info)
