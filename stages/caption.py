"""caption: writes captions of items without a caption, or of all items, by a vision-language model. Its plan contains
the items of the media tables, because a plan of samples needs captions.

The captions are stored under the root, from which `bucket` reads them. The user's folders are not changed without
--write-files.
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

_WRITE_HELP = "Also write <name>.txt next to media in local folders, unless the file exists."


def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    write_files: Annotated[bool, typer.Option("--write-files", help=_WRITE_HELP)] = False,
    **more: Any,
) -> Report:
    """more: options of all encoding stages."""
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
                f"--write-files: no file is written for {len(counts.sharing)} items, because another picture or video "
                f"with the same name would get the same caption: {names}; rename one, and run `latentpress discover`"
            )
    return report


@dataclass
class WrittenFiles:
    """Counts of a run. existing: files that existed before the run. several_clips: captions of videos with several
    clips, which cannot share one file. sharing: paths of items without a file, because another picture or video would
    have the same caption file."""

    written: int = 0
    existing: int = 0
    several_clips: int = 0
    sharing: list[str] = field(default_factory=list)


def list_writable(datasets: Sequence[Dataset], console: Console) -> list[Dataset]:
    """The datasets whose captions are text files in a local folder. Logs all other datasets. Raises UsageError if there
    is no such dataset."""
    described = [dataset for dataset in datasets if not dataset.disabled and dataset.describes_missing]
    writable, unsupported = list[Dataset](), list[str]()
    for dataset in described:
        if (dataset.resolved_source, dataset.resolved_caption_strategy) == ("folder", "textfile"):
            writable.append(dataset)
        else:
            unsupported.append(f"{dataset.id} ({dataset.resolved_source}, {dataset.resolved_caption_strategy})")
    if not writable:
        raise UsageError(
            "--write-files needs a dataset whose captions are text files next to media in a local folder; "
            f"this configuration has: {', '.join(unsupported) or 'no dataset to describe'}",
            "run without --write-files: `bucket` reads the captions from the root",
        )
    if unsupported:
        console.log(f"--write-files: no files are written for {', '.join(unsupported)}")
    return writable


def write_caption_files(store: Store, config: Config, datasets: list[Dataset], began: float) -> WrittenFiles:
    """Write `<name>.txt` next to each item of these datasets that has a generated caption, unless the file exists, and
    remove temporary files of killed runs. began: start time of this run, in seconds since 1970."""
    plan, counts = STAGE.find_plan(store, config), WrittenFiles()
    table = read_captions(store, STAGE.fingerprint(config))
    captions = dict(zip(table["sample_id"].to_pylist(), table["captions"].to_pylist(), strict=True))
    rows = plan.active.select(["dataset", "path", "sample_id"]).to_pylist()
    clips = Counter((row["dataset"], row["path"]) for row in rows)
    folders = {dataset.id: Store(dataset.root) for dataset in datasets}
    list_stems = cache(_list_stems)
    for folder in folders.values():
        for entry in folder.list_files(temporaries=True):
            if ".txt." in entry.name and entry.modified < began:  # a newer file may be of another running program
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
        if list_stems(parent)[name.removesuffix(".txt")] > 1:  # also if the other file is not in a dataset
            counts.sharing.append(row["path"])
        elif folders[row["dataset"]].create_new(rel, partial(_write, texts)):
            counts.written += 1
        else:
            counts.existing += 1
    return counts


def _list_stems(folder: str) -> Counter[str]:
    """Counts of the names of pictures and videos in a folder, without extensions."""
    names = [os.path.splitext(name) for name in os.listdir(folder)] if os.path.isdir(folder) else []
    return Counter(stem for stem, ending in names if ending.lower() in extensions_of_kinds(("image", "video")))


def _write(texts: list[str], file: BinaryIO) -> None:
    file.write("".join(f"{text}\n" for text in texts).encode())


ABOUT = "Describe pictures and clips without a caption, by a vision-language model."
app = make_app("caption", ABOUT, run, examples=["--write-files"], passes_to=STAGE.run, divided=True)

if __name__ == "__main__":
    app()
