"""Made captions as text files beside their pictures and videos, where the user asks for them: never over a file that is
there."""

import os
from collections import Counter
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import PurePosixPath
from typing import BinaryIO

from cache.sets.item_rows import read_captions
from cache.store.exclusive import create_new
from cache.store.store import Store
from schemas.cli.console import Console
from schemas.config.datasets import Dataset
from schemas.config.pipeline import Config
from stages.discovery.sources.base import extensions_of_kinds
from stages.encoding.stage_options import UsageError
from stages.encoding.stage_registry import CAPTION


@dataclass
class WrittenFiles:
    """Counts of a run. existing: files that were there before. several_clips: captions of clips of one video, for which
    its file has no place. sharing: paths of items without a file, because another picture or video would have the same
    caption file."""

    written: int = 0
    existing: int = 0
    several_clips: int = 0
    sharing: list[str] = field(default_factory=list)


def list_writable(config: Config, console: Console) -> list[Dataset]:
    """The datasets whose captions are files in a folder of this machine; the others are named. UsageError for none."""
    used = [dataset for dataset in config.datasets if not dataset.disabled and dataset.describes_missing]
    writable, others = list[Dataset](), list[str]()
    for dataset in used:
        if (dataset.resolved_source, dataset.resolved_caption_strategy) == ("folder", "textfile"):
            writable.append(dataset)
        else:
            others.append(f"{dataset.id} ({dataset.resolved_source}, {dataset.resolved_caption_strategy})")
    if not writable:
        raise UsageError(
            "--write-files is for captions in files beside media in a local folder, which no dataset has: "
            f"{', '.join(others) or 'none is described'}",
            "leave it out: `bucket` reads the captions from the root",
        )
    if others:
        console.log(f"--write-files: no files are written for {', '.join(others)}")
    return writable


def write_caption_files(store: Store, config: Config, datasets: list[Dataset], began: float) -> WrittenFiles:
    """Write `<name>.txt` beside each item of these datasets that has a made caption and no such file, and remove
    temporary files of runs that were killed. began: the time at which this run began, in seconds since 1970."""
    plan, counts = CAPTION.find_plan(store, config), WrittenFiles()
    table = read_captions(store, CAPTION.fingerprint(config))
    captions = dict(zip(table["sample_id"].to_pylist(), table["captions"].to_pylist(), strict=True))
    rows = plan.active.select(["dataset", "path", "sample_id"]).to_pylist()
    clips = Counter((row["dataset"], row["path"]) for row in rows)
    folders = {dataset.id: Store(dataset.root) for dataset in datasets}
    list_stems = cache(_list_stems)
    for folder in folders.values():
        for entry in folder.list_files(temporaries=True):
            if ".txt." in entry.name and entry.modified < began:  # a newer one is of a run that is at work
                folder.remove(entry.name)
    for row in rows:
        texts = captions.get(row["sample_id"])
        if texts is None or row["dataset"] not in folders:
            continue
        if clips[row["dataset"], row["path"]] > 1:
            counts.several_clips += 1
            continue
        rel = str(PurePosixPath(row["path"]).with_suffix(".txt"))
        parent, _, name = folders[row["dataset"]].path(rel).rpartition("/")
        if list_stems(parent)[name.removesuffix(".txt")] > 1:  # of any dataset
            counts.sharing.append(row["path"])
        elif create_new(folders[row["dataset"]], rel, partial(_write, texts)):
            counts.written += 1
        else:
            counts.existing += 1
    return counts


def _list_stems(folder: str) -> Counter[str]:
    """The names of the pictures and videos in a folder, without their extensions."""
    names = [os.path.splitext(name) for name in os.listdir(folder)] if os.path.isdir(folder) else []
    return Counter(stem for stem, ending in names if ending.lower() in extensions_of_kinds(("image", "video")))


def _write(texts: list[str], file: BinaryIO) -> None:
    file.write("".join(f"{text}\n" for text in texts).encode())
