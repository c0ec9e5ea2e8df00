"""caption: writes captions of items without a caption, or of all items, with a vision-language model. Its plan contains
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
    **stage_options: Any,
) -> Report:
    """stage_options: options of all encoding stages."""
    require_caption(config)
    start_time = time.time()
    writable_datasets = list_writable(config.datasets, console) if write_files else []
    report = STAGE.run(config, options, console, **stage_options)
    if writable_datasets and not options.dry_run:
        counts = write_caption_files(Store(config.root), config, writable_datasets, start_time)
        report.details |= {"files_written": counts.written_count, "files_there_before": counts.existing_count}
        if counts.clip_count:
            report.details["clips_without_a_file"] = counts.clip_count
        if counts.shared_paths:
            report.details["same_name_without_a_file"] = len(counts.shared_paths)
            names = ", ".join(map(shorten, counts.shared_paths[:3]))
            console.warn(
                f"--write-files: no file is written for {len(counts.shared_paths)} items, because another picture or "
                f"video with the same name would get the same caption: {names}; rename one, and run "
                "`latentpress discover`"
            )
    return report


@dataclass
class WrittenFiles:
    """Result of a run. existing_count: files that existed before the run. clip_count: captions of clips whose video has
    several clips, which cannot share one file. shared_paths: paths of items without a file, because another picture or
    video would have the same caption file."""

    written_count: int = 0
    existing_count: int = 0
    clip_count: int = 0
    shared_paths: list[str] = field(default_factory=list)


def list_writable(datasets: Sequence[Dataset], console: Console) -> list[Dataset]:
    """Returns the datasets whose captions are text files in a local folder, and logs all other datasets. Raises
    UsageError if no dataset has such captions."""
    candidates = [dataset for dataset in datasets if not dataset.disabled and dataset.describes_missing]
    writable_datasets, unsupported_names = list[Dataset](), list[str]()
    for dataset in candidates:
        if (dataset.resolved_source, dataset.resolved_caption_strategy) == ("folder", "textfile"):
            writable_datasets.append(dataset)
        else:
            unsupported_names.append(f"{dataset.id} ({dataset.resolved_source}, {dataset.resolved_caption_strategy})")
    if not writable_datasets:
        raise UsageError(
            "--write-files needs a dataset whose captions are text files next to media in a local folder; "
            f"this configuration has: {', '.join(unsupported_names) or 'no dataset to describe'}",
            "run without --write-files: `bucket` reads the captions from the root",
        )
    if unsupported_names:
        console.log(f"--write-files: no files are written for {', '.join(unsupported_names)}")
    return writable_datasets


def write_caption_files(store: Store, config: Config, datasets: list[Dataset], start_time: float) -> WrittenFiles:
    """Write `<name>.txt` next to each item of these datasets that has a generated caption, unless the file exists, and
    remove temporary files of killed runs. start_time: start of this run, in seconds since 1970."""
    plan, counts = STAGE.find_plan(store, config), WrittenFiles()
    table = read_captions(store, STAGE.fingerprint(config))
    captions = dict(zip(table["sample_id"].to_pylist(), table["captions"].to_pylist(), strict=True))
    rows = plan.active.select(["dataset", "path", "sample_id"]).to_pylist()
    clips = Counter((row["dataset"], row["path"]) for row in rows)
    folders = {dataset.id: Store(dataset.root) for dataset in datasets}
    list_stems = cache(_list_stems)
    for folder in folders.values():
        for entry in folder.list_files(temporaries=True):
            if ".txt." in entry.name and entry.modified < start_time:  # a newer file may be of another running program
                folder.remove(entry.name)
    for row in rows:
        texts = captions.get(row["sample_id"])
        if texts is None or row["dataset"] not in folders:
            continue
        if clips[row["dataset"], row["path"]] > 1:
            counts.clip_count += 1
            continue
        rel = str(PurePosixPath(row["path"]).with_suffix(".txt"))
        parent, _, name = folders[row["dataset"]].path(rel).rpartition("/")
        if list_stems(parent)[name.removesuffix(".txt")] > 1:  # also if the other file is not in a dataset
            counts.shared_paths.append(row["path"])
        elif folders[row["dataset"]].create_new(rel, partial(_write, texts)):
            counts.written_count += 1
        else:
            counts.existing_count += 1
    return counts


def _list_stems(folder: str) -> Counter[str]:
    """Counts of the names of pictures and videos in a folder, without extensions."""
    names = [os.path.splitext(name) for name in os.listdir(folder)] if os.path.isdir(folder) else []
    return Counter(stem for stem, ending in names if ending.lower() in extensions_of_kinds(("image", "video")))


def _write(texts: list[str], file: BinaryIO) -> None:
    file.write("".join(f"{text}\n" for text in texts).encode())


ABOUT = "Write captions of pictures and clips without a caption, with a vision-language model."
app = make_app("caption", ABOUT, run, examples=["--write-files"], passes_to=STAGE.run, divided=True)

if __name__ == "__main__":
    app()
