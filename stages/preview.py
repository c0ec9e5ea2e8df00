"""preview --plan: the current plan as one HTML page, before anything is encoded.

For each bucket its line of the table that bucket prints, and some of its items as the encoder will see them: read and
cut by the functions that it uses, in a process of their own, so that a decoder that dies costs its item.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.compute as pc
import typer

from cache import rejects
from cache.store import Store, explained
from schemas.config import Config
from schemas.console import Console, Options, Progress, Report, program
from schemas.geometry import Bucket
from stages.contactsheet import page as html
from stages.contactsheet.looking import Opened, Opener, Task, looker
from stages.contactsheet.page import Item, Look
from stages.contactsheet.sheet import Sheet
from stages.engines.isolated import Isolated, Lost
from stages.media.errors import MediaError
from stages.plan import current_plan
from stages.planning import summary
from stages.stage import WrongUse, refuse_shard

Row = dict[str, Any]
CAPTIONS = 3  # of an item that are shown
EXAMPLES = 3  # of a rule that are shown


def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    plan: Annotated[
        bool, typer.Option("--plan", help="Show the current plan: what would be encoded, and how.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page.  [default: <output>/preview/plan-<generation>.html]")
    ] = None,
    items: Annotated[int, typer.Option(min=1, metavar="N", help="Items shown of each bucket.")] = 6,
    bucket: Annotated[list[str] | None, typer.Option(metavar="WxH@F", help="This bucket alone. Repeatable.")] = None,
) -> Report:
    refuse_shard(options, "preview")
    if not plan:
        raise WrongUse("preview needs to know what to show", "latentpress preview --plan shows the current plan")
    store = Store(config.root)
    current = current_plan(store, config)
    sheet = Sheet.of(store, config, current)
    chosen = sheet.choose(items, _wanted(bucket, sheet.buckets))
    page = out or Path(config.output) / "preview" / f"plan-{current.name}.html"
    report = Report(program="preview", dry_run=options.dry_run, details={"generation": current.name})
    report.details["buckets"] = [
        {"bucket": name, "samples": sheet.count(name), "shown": len(rows)} for name, rows in chosen.items()
    ]
    report.details["page"] = str(page)
    if options.dry_run:
        report.remaining = sum(map(len, chosen.values()))
        return report
    with console.progress(sum(map(len, chosen.values())), "preview") as progress:
        size = _write(page, _page(sheet, chosen, options, report, progress))
    report.details["MiB"] = round(size / 2**20, 2)
    return report


def _wanted(asked: Sequence[str] | None, there: Sequence[str]) -> list[str]:
    """The buckets to show, in the plan's order. Raises WrongUse for one that the plan lacks."""
    for text in asked or ():
        try:
            known = str(Bucket.parse(text)) in there
        except ValueError as error:
            raise WrongUse(f"--bucket: {error}", f"the plan has {', '.join(there)}") from error
        if not known:
            raise WrongUse(f"--bucket: the plan has no {Bucket.parse(text)}", f"it has {', '.join(there)}")
    names = {str(Bucket.parse(text)) for text in asked or there}
    return [name for name in there if name in names]


def _write(page: Path, pieces: Iterable[str]) -> int:
    """Write the page, which takes its name when it is whole; returns its bytes."""
    temporary = page.with_name(f".{page.name}.{os.getpid()}.tmp")
    try:
        with explained(str(page)):
            page.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("w", encoding="utf-8") as file:
                for piece in pieces:
                    file.write(piece)
                size = file.tell()
            os.replace(temporary, page)
    finally:
        with suppress(OSError):
            temporary.unlink()
    return size


def _page(
    sheet: Sheet, chosen: dict[str, list[int]], options: Options, report: Report, progress: Progress
) -> Iterator[str]:
    config, lines = sheet.config, {line["bucket"]: line for line in sheet.lines()}
    yield html.head(f"Plan {sheet.plan.name}", _about(sheet, list(lines.values())), list(lines.values()))
    opener, workers = Opener(sheet), options.resources(config, "preview").workers
    timeout, memory = config.stages.item_timeout_s, config.stages.item_memory_mib
    with Isolated(looker, workers=workers, timeout_s=timeout, memory_mib=memory) as isolated:
        for bucket, rows in chosen.items():
            held, count = sheet.count(bucket, "eval"), sheet.count(bucket)
            note = f"{len(rows)} of {count} samples" + (f", {held} of which are held out" if held else "")
            cards = _cards(sheet, [opener.open(row) for row in rows], isolated, report, progress)
            yield from html.bucket_section(bucket, lines.get(bucket, {}), note, cards)
    yield from _exclusions(sheet)
    yield html.tail()


def _about(sheet: Sheet, lines: list[Row]) -> list[str]:
    model, held = sheet.config.model, pc.sum(pc.equal(sheet.active.column("role"), "eval")).as_py() or 0
    train = sheet.active.num_rows - held
    size = sum(line["MiB of latents"] for line in lines)
    return [
        f"{model.family}, {model.task}, {model.chosen.name}",
        f"{train} samples to train on in {len(lines)} buckets, {held} held out; about {size:.4g} MiB of latents to "
        "train on. Nothing of this has to be encoded yet: the pictures are read from the media, cut as they will be.",
    ]


def _exclusions(sheet: Sheet) -> Iterator[str]:
    model, store = sheet.config.model, sheet.store
    out = rejects.read_one(store, "bucket", f"{model.family}-{model.task}")
    note = "Items that a rule of the last run of bucket put out, with some of them."
    yield html.rules_section("Excluded by bucket", note, _rules(out))
    used = [dataset.id for dataset in sheet.config.datasets if not dataset.disabled]
    out = pa.concat_tables([rejects.read_one(store, "discover", name) for name in used])
    note = "Items that discover set aside, so that no plan has them."
    yield html.rules_section("Set aside by discover", note, _rules(out))


def _rules(out: pa.Table) -> list[Row]:
    rows = summary.excluded(out)
    for row in rows:
        mine = pc.and_(
            pc.equal(out.column("reason"), row["rule"]), pc.starts_with(out.column("item"), f"{row['dataset']}/")
        )
        row["for example"] = out.filter(mine).slice(0, EXAMPLES).column("message").to_pylist()
    return rows


def _cards(
    sheet: Sheet, opened: list[Opened], isolated: Isolated[Task, Look], report: Report, progress: Progress
) -> Iterator[str]:
    looks = isolated.map(one.task for one in opened if isinstance(one.task, Task))
    for one in opened:
        found: Look | Lost | MediaError = next(looks)[1] if isinstance(one.task, Task) else one.task
        place = one.place
        if isinstance(found, Lost):
            found = found.error(place["path"])
        if isinstance(found, Look):
            report.done += 1
        else:
            item = f"{place['dataset']}/{place['path']}"
            report.set_aside.append(rejects.reject("preview", item, place["path"], found.reason, str(found)))
        progress.advance(1)
        yield html.card(_item(sheet, one, found))


def _item(sheet: Sheet, one: Opened, found: Look | MediaError) -> Item:
    texts = one.place["texts"]
    known = sheet.width[one.row] > 0
    return Item(
        place=one.place,
        sample=one.sample,
        size=(int(sheet.width[one.row]), int(sheet.height[one.row])) if known else None,
        lost=float(sheet.lost[one.row]),
        stretched=float(sheet.stretched[one.row]),
        captions=tuple(sheet.plan.texts[name]["text"] for name in texts[:CAPTIONS]),
        more_captions=max(0, len(texts) - CAPTIONS),
        look=found if isinstance(found, Look) else None,
        problem="" if isinstance(found, Look) else f"can't be shown ({found.reason}): {found}",
    )


app = program(
    "preview",
    "Show the plan as an HTML page: some items of each bucket as they will be cut.",
    run,
    examples=("--plan", "--plan --bucket 640x384@29 --items 12"),
    extra="media",
)

if __name__ == "__main__":
    app()
