"""caption: captions for items that have none, or for all, by a vision-language model. In place of a plan of samples,
which needs captions, it has one of the media tables' items.

They are kept under the root, where `bucket` finds them, and the user's folders are not touched unless --write-files.
"""

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import PurePosixPath
from typing import Annotated, Any, BinaryIO

import typer

from cache.sets.item_rows import read_captions
from cache.store.store import Store
from schemas.cli.console import Console, Options, Report, make_app
from schemas.config.datasets import Dataset
from schemas.config.pipeline import Config
from schemas.errors import UsageError
from schemas.text_format import shorten
from stages.encoding.captions.settings import require_caption
from stages.encoding.stage_registry import CAPTION as STAGE
from stages.media.files import extensions_of_kinds

_WRITE_HELP = "Also write <name>.txt beside media in local folders, where there is none."


def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    write_files: Annotated[bool, typer.Option("--write-files", help=_WRITE_HELP)] = False,
    **more: Any,
) -> Report:
    """more: the options of every encoding stage."""
    require_caption(config)
    began = time.time()
    writable = list_writable(config.datasets, console) if write_files else []
    report = STAGE.run(config, options, console, **more)
    if writable and not options.dry_run:
        counts = write_caption_files(Store(config.root), config, writable, began)
        report.details |= {"files_written": counts.written, "files_there_before": counts.existing}
        if counts.several_clips:
            report.details["clips_without_a_file"] = counts.several_clips
        if counts.sharing:
            report.details["same_name_without_a_file"] = len(counts.sharing)
            names = ", ".join(map(shorten, counts.sharing[:3]))
            console.warn(
                f"--write-files: {len(counts.sharing)} items have no file, as another picture or video of the same "
                f"name would get its caption too: {names}; rename one of each, and run `latentpress discover`"
            )
    return report


@dataclass
class WrittenFiles:
    """Counts of a run. existing: files that were there before. several_clips: captions of clips of one video, for which
    its file has no place. sharing: paths of items without a file, because another picture or video would have the same
    caption file."""

    written: int = 0
    existing: int = 0
    several_clips: int = 0
    sharing: list[str] = field(default_factory=list)


def list_writable(datasets: Sequence[Dataset], console: Console) -> list[Dataset]:
    """The datasets whose captions are files in a folder of this machine; the others are named. UsageError for none."""
    used = [dataset for dataset in datasets if not dataset.disabled and dataset.describes_missing]
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
    plan, counts = STAGE.find_plan(store, config), WrittenFiles()
    table = read_captions(store, STAGE.fingerprint(config))
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
        elif folders[row["dataset"]].create_new(rel, partial(_write, texts)):
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


ABOUT = "Describe pictures and clips that have no caption, by a vision-language model."
app = make_app("caption", ABOUT, run, examples=["--write-files"], passes_to=STAGE.run, divided=True)

if __name__ == "__main__":
    app()
