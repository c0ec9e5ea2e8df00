"""A local folder as a source: media files at any depth, and the caption files beside them.

The second scan of an unchanged tree is nothing but this walk, so it is written for speed: one `scandir` a folder, one
`stat` a file, plain lists, and columns of Arrow every CHUNK files. Memory is bounded by the largest single folder.
Hidden names are left out. Symbolic links are followed while they stay inside the folder (with `follow_links`
wherever they lead), and never back to a folder that holds them; those left alone are counted.
"""

import os
import stat
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from schemas.datasets import Dataset
from schemas.errors import LatentpressError
from stages.media.files import Media
from stages.sources.base import CHUNK, add_problems, kinds_for
from stages.sources.captions import listed_captions, read_caption_file, stems
from stages.sources.companions import companions_for, complete, refuse_columns

TEXT = "text"
OUTSIDE, BACK = "link that leads outside", "link that leads back"

_text, _long = pa.string(), pa.int64()
#: A folder and, in turn, those that it was reached through.
_Chain = tuple[str, "_Chain | None"]
#: A folder to walk: its path, its path below the top, whether a link was followed on the way, what is above it.
_Place = tuple[str, str, bool, _Chain | None]


@dataclass
class Found:
    """What one folder holds, row for row: names, kinds, sizes in bytes and modification times in nanoseconds.

    prefix: the folder's path below the top, "" or with a "/" at its end. texts: stem -> name, size and time of the
    caption files. odd: what can't be used, by row, with problem and advice; its size is -1 where it is not known.
    """

    prefix: str
    names: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    sizes: array = field(default_factory=lambda: array("q"))
    times: array = field(default_factory=lambda: array("q"))
    texts: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    odd: dict[int, tuple[str, str]] = field(default_factory=dict)

    def appends(self) -> tuple[Callable[[Any], None], ...]:
        return self.names.append, self.kinds.append, self.sizes.append, self.times.append

    def add_odd(self, name: str, kind: str, problem: str, advice: str) -> None:
        self.odd[len(self.names)] = problem, advice
        for add, value in zip(self.appends(), (name, kind, -1, -1), strict=True):
            add(value)


class Folder:
    """See stages/sources/base.py for what each method does."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset, self._root = dataset, dataset.root
        self.ignored: Counter[str] = Counter()
        self._companions = companions_for(dataset)
        self._captions = listed_captions(dataset)

    def scan(self, known: pa.Table | None) -> Iterator[pa.Table]:
        dataset = self._dataset
        key = "media_root" if dataset.media_root else "instance_data_dir"
        existing(self._root, f"datasets.{dataset.id}.{key}")
        refuse_columns(dataset, "a folder has")
        self.ignored.clear()
        rows = _Rows(texts=self._captions is None)
        for found in walk(self._root, kinds_for(dataset), dataset.follow_links, self.ignored, texts=rows.texts):
            start = 0
            while start < len(found.names):
                start = rows.extend(found, start)
                if rows.full:
                    yield self._chunk(rows)
                    rows = _Rows(rows.texts)
        yield self._chunk(rows)

    def open(self, path: str) -> Media:
        return os.path.join(self._root, path)

    def open_companion(self, role: str, path: str) -> Media:
        return self._companions[role].open(path)

    def holder(self, role: str, path: str) -> Media:
        return self.open_companion(role, path) if role else self.open(path)

    def read_captions(self, path: str) -> list[str]:
        return read_caption_file(os.path.join(self._root, path))

    def _chunk(self, rows: "_Rows") -> pa.Table:
        return complete(rows.columns(), self._captions, self._companions)


def existing(folder: str, key: str) -> None:
    """Raise LatentpressError, naming the option, unless `folder` is one."""
    if not os.path.isdir(folder):
        step = "mount its disk, or correct the path (media_root says where media lie on this machine)"
        raise LatentpressError(f"{key}: {folder} is not a folder", step)


def walk(
    top: str, kinds: Mapping[str, str], follow_links: bool, ignored: Counter[str], texts: bool = False
) -> Iterator[Found]:
    """Every folder below `top` with its files of `kinds` (extension with dot -> kind), in no order.

    texts: look for caption files too (".txt"). What is left alone is counted in `ignored`, by extension or reason.
    Raises LatentpressError for a folder that can't be read: its files would leave the training set unnoticed.
    """
    endings = _Endings({ending[1:]: kind for ending, kind in kinds.items()} | ({"txt": TEXT} if texts else {}))
    walker = _Walker(top, endings, follow_links, ignored)
    todo: list[_Place] = [(top, "", False, None)]
    while todo:
        found, below = walker.folder(*todo.pop())
        todo += below
        yield found


class _Endings(dict[str, str | None]):
    """Extension without dot -> kind, whatever its case; None where it is none of ours."""

    def __missing__(self, ending: str) -> str | None:
        return self.get(ending.lower())


class _Walker:
    def __init__(self, top: str, kinds: _Endings, follow_links: bool, ignored: Counter[str]) -> None:
        self._kinds, self._follow_links, self._ignored = kinds, follow_links, ignored
        self._real = os.path.join(os.path.realpath(top), "")

    def folder(self, path: str, prefix: str, linked: bool, above: _Chain | None) -> tuple[Found, list[_Place]]:
        """What `path` holds, and the folders in it to go on with. All in one loop: a call more a file is 3 % more."""
        found = Found(prefix)
        below: list[_Place] = []
        chain, kinds, texts = (path, above), self._kinds, found.texts
        name_it, kind_it, size_it, time_it = found.appends()
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    name = entry.name
                    if name[0] == ".":
                        continue
                    link = entry.is_symlink()
                    if link and self._leads_outside(entry.path):
                        self._ignored[OUTSIDE] += 1
                        continue
                    if os.path.isdir(entry.path) if link else entry.is_dir():
                        if (link or linked) and _is_above(entry.path, chain):
                            self._ignored[BACK] += 1
                        else:
                            below.append((entry.path, f"{prefix}{name}/", link or linked, chain))
                        continue
                    stem, _, ending = name.rpartition(".")
                    kind = kinds[ending]
                    if kind is None or not stem:
                        self._ignored[f".{ending.lower()}" if stem and ending else ""] += 1
                        continue
                    try:
                        status = entry.stat()
                    except OSError as error:
                        if kind != TEXT:  # a link to nothing is no caption
                            found.add_odd(name, kind, *_unseen(error))
                        continue
                    size, time = status.st_size, status.st_mtime_ns
                    if kind == TEXT:
                        if ending == "txt" or stem not in texts:  # of "a.txt" and "a.TXT" the former
                            texts[stem] = name, size, time
                    elif size or stat.S_ISREG(status.st_mode):
                        name_it(name)
                        kind_it(kind)
                        size_it(size)
                        time_it(time)
                    else:
                        found.add_odd(name, kind, "unreadable: is not a regular file", "point the dataset at files")
        except OSError as error:
            step = "give read permission to the folder, or run again if it was being moved"
            raise LatentpressError(f"{path}: {error.strerror}", step) from error
        return found, below

    def _leads_outside(self, link: str) -> bool:
        """A link to nothing leads nowhere: its file is missing, which is worth saying."""
        if self._follow_links or not os.path.exists(link):
            return False
        return not os.path.join(os.path.realpath(link), "").startswith(self._real)


def _is_above(folder: str, chain: _Chain | None) -> bool:
    """Whether `folder` is one of those that were walked through to reach it."""
    there = os.stat(folder)
    while chain is not None:
        if os.path.samestat(there, os.stat(chain[0])):
            return True
        chain = chain[1]
    return False


def _unseen(error: OSError) -> tuple[str, str]:
    if isinstance(error, FileNotFoundError):
        return "missing: is not there", "restore what the link leads to, or delete the link"
    return f"unreadable: can't be read ({error.strerror})", "check its permissions and the disk, then run again"


class _Rows:
    """Up to CHUNK files as they are found; `columns` makes them Arrow."""

    def __init__(self, texts: bool) -> None:
        self.texts = texts
        self.full = False
        self._paths: list[str] = []
        self._kinds: list[str] = []
        self._sizes, self._times = array("q"), array("q")
        self._captions: list[str | None] = []
        self._caption_sizes: list[int | None] = []
        self._caption_times: list[int | None] = []
        self._odd: dict[int, tuple[str, str]] = {}

    def extend(self, found: Found, start: int) -> int:
        """Take files of a folder from `start` on, as many as fit; the first that was not taken."""
        here = len(self._paths)
        stop = min(len(found.names), start + CHUNK - here)
        names, prefix = found.names[start:stop], found.prefix
        self._paths += [prefix + name for name in names]
        self._kinds += found.kinds[start:stop]
        self._sizes += found.sizes[start:stop]
        self._times += found.times[start:stop]
        if self.texts:
            get, none = found.texts.get, (None, None, None)
            texts = [get(name.rpartition(".")[0], none) for name in names]
            self._captions += [prefix + text[0] if text[0] else None for text in texts]
            self._caption_sizes += [text[1] for text in texts]
            self._caption_times += [text[2] for text in texts]
        if found.odd:
            self._odd |= {here + row - start: odd for row, odd in found.odd.items() if start <= row < stop}
        self.full = len(self._paths) == CHUNK
        return stop

    def columns(self) -> dict[str, pa.Array]:
        problems, advices = self._problems()
        sizes, times = pa.array(self._sizes, _long), pa.array(self._times, _long)
        unknown = pc.less(sizes, 0)
        columns = {
            "path": pa.array(self._paths, _text),
            "kind": pa.array(self._kinds, _text),
            "size": pc.if_else(unknown, pa.scalar(None, _long), sizes),
            "version": pc.if_else(unknown, pa.scalar(None, _text), times.cast(_text)),
            "problem": problems,
            "advice": advices,
        }
        if self.texts:
            columns["captions_at"] = captions = pa.array(self._captions, _text)
            size, time = (pa.array(x, _long).cast(_text) for x in (self._caption_sizes, self._caption_times))
            columns["captions_version"] = pc.binary_join_element_wise(size, time, ":")
            if captions.null_count:
                self._add_absent(columns, pc.is_null(captions))
        return columns

    def _add_absent(self, columns: dict[str, pa.Array], absent: pa.Array) -> None:
        name = stems(pc.replace_substring_regex(columns["path"], r"(?s)^.*/", ""))
        step = pc.binary_join_element_wise("write one into ", name, ".txt beside it", "")
        null = pa.scalar(None, _text)
        add_problems(columns, pc.if_else(absent, "no-caption: has no caption", null), pc.if_else(absent, step, null))

    def _problems(self) -> tuple[pa.Array, pa.Array]:
        """Problems and advices. A path that is not UTF-8 can be in no table, and stands there as it is printed."""
        for row, path in enumerate(self._paths):
            if not path.isascii() and (printed := printable(path)) != path:
                self._paths[row] = printed
                self._odd[row] = "name-not-utf8: has a name that is not UTF-8", "rename it"
                if self.texts:
                    self._captions[row] = None
        if not self._odd:
            none = pa.nulls(len(self._paths), _text)
            return none, none
        odd = [self._odd.get(row, (None, None)) for row in range(len(self._paths))]
        return pa.array([problem for problem, _ in odd], _text), pa.array([advice for _, advice in odd], _text)


def printable(text: str) -> str:
    """`text` with the bytes of a file's name that are not UTF-8 shown as escapes."""
    return text.encode(errors="backslashreplace").decode()
