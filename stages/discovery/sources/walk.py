"""Walking a local folder: the media files and caption files at any depth.

The second scan of an unchanged tree is this walk and little else, so it is written for speed: one `scandir` a folder,
one `stat` a file. Memory is bounded by the largest single folder. Hidden names are left out. Symbolic links are
followed inside the folder (with `follow_links` anywhere), but never back to a folder that contains them; links that
are not followed are counted.
"""

import os
import stat
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from schemas.errors import LatentpressError
from schemas.regular_files import NOT_REGULAR

CAPTION_KIND = "text"
OUTSIDE, BACK = "link that leads outside", "link that leads back"

#: A folder and the chain of folders through which it was reached.
_ParentChain = tuple[str, "_ParentChain | None"]
#: A folder to walk: its path, its path below the top, whether a link was followed on the way, its parents.
_PendingFolder = tuple[str, str, bool, _ParentChain | None]


@dataclass
class FolderFiles:
    """The media files in one folder, row for row: names, kinds, sizes in bytes, modification times in nanoseconds.

    prefix: the folder's path below the top, "" or with a "/" at its end. texts: stem -> name and version of the caption
    files. problems_by_row: problem and advice of files that can't be used; their size and time are -1.
    """

    prefix: str
    names: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    sizes: array = field(default_factory=lambda: array("q"))
    times: array = field(default_factory=lambda: array("q"))
    texts: dict[str, tuple[str, str]] = field(default_factory=dict)
    problems_by_row: dict[int, tuple[str, str]] = field(default_factory=dict)

    def appenders(self) -> tuple[Callable[[Any], None], ...]:
        return self.names.append, self.kinds.append, self.sizes.append, self.times.append

    def add_problem(self, name: str, kind: str, problem: str, advice: str) -> None:
        self.problems_by_row[len(self.names)] = problem, advice
        for add, value in zip(self.appenders(), (name, kind, -1, -1), strict=True):
            add(value)


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
BACKSLASH_ADVICE = "write / in place of each backslash: paths of Windows are not read"


def require_folder(folder: str, key: str) -> None:
    """Raise LatentpressError, naming the option, unless `folder` is one."""
    if os.path.isdir(folder):
        return
    if os.path.exists(folder):
        step = _TABLE_ADVICE.get(os.path.splitext(folder)[1].lower(), "name the folder that it is in")
        raise LatentpressError(f"{key}: {folder} is a file, not a folder", step)
    if "\\" in folder:
        raise LatentpressError(f"{key}: there is no folder {folder}", BACKSLASH_ADVICE)
    step = "mount its disk, or correct the path (media_root: where media are on this machine)"
    if key.endswith(".instance_data_dir"):
        step += "; for a dataset of the Hugging Face Hub set source: huggingface"
    raise LatentpressError(f"{key}: there is no folder {folder}", step)


class _KindByExtension(dict[str, str | None]):
    """Extension without dot -> kind, in any case; None for other extensions."""

    def __missing__(self, ending: str) -> str | None:
        return self.get(ending.lower())


def walk(
    top: str, kinds: Mapping[str, str], follow_links: bool, ignored: Counter[str], texts: bool = False
) -> Iterator[FolderFiles]:
    """Every folder below `top` with its files of `kinds` (extension with dot -> kind), in no order.

    texts: look for caption files too (".txt"). `ignored` counts what is left alone, by extension or reason. Raises
    LatentpressError for a folder that can't be read: its files would leave the training set unnoticed. What others
    remove meanwhile is left out.
    """
    endings = _KindByExtension({ending[1:]: kind for ending, kind in kinds.items()})
    if texts:
        endings["txt"] = CAPTION_KIND
    real_top = os.path.join(os.path.realpath(top), "")
    todo: list[_PendingFolder] = [(top, "", False, None)]
    while todo:  # one loop, since another call a file costs 3 %
        path, prefix, linked, above = todo.pop()
        files, chain = FolderFiles(prefix), (path, above)
        add_name, add_kind, add_size, add_time = files.appenders()
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
                    size, time = status.st_size, status.st_mtime_ns
                    if kind == CAPTION_KIND:
                        if ending == "txt" or stem not in files.texts:  # of "a.txt" and "a.TXT" the former
                            files.texts[stem] = name, f"{size}:{caption_version(status)}"
                    elif size or stat.S_ISREG(status.st_mode):
                        add_name(name)
                        add_kind(kind)
                        add_size(size)
                        add_time(time)
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
