"""Chosen samples of the cache decoded and compared with their originals, one at a time."""

import math
from dataclasses import replace
from typing import Any

from cache import rejects
from cache.damage import DamageError
from cache.shard import Row as Encoded
from schemas.clips import clip_times
from schemas.config.encoding import Resources
from schemas.console import Progress, Report
from schemas.errors import LatentpressError
from schemas.geometry import Bucket
from stages.contactsheet import comparing, originals
from stages.contactsheet.cached import WAITING, Cached
from stages.contactsheet.comparing import Comparison
from stages.contactsheet.decoding import Decoder
from stages.contactsheet.looking import Opened, Opener, Task, item_of
from stages.contactsheet.originals import Original
from stages.contactsheet.resultpage import WORST, Result
from stages.contactsheet.sheet import Sheet
from stages.engines.isolated import Isolated, Lost
from stages.media.errors import MediaError

Row = dict[str, Any]


def compare(
    sheet: Sheet, cached: Cached, chosen: dict[str, list[int]], resources: Resources, progress: Progress
) -> list[Result]:
    """The rows `chosen` of each bucket, in that order, and within a bucket the lowest PSNR first.

    Originals are read in processes of their own, a few ahead; what stays in memory of a sample are small pictures.
    """
    stages, opener, found = sheet.config.stages, Opener(sheet), list[Result]()
    opened = [opener.open(row) for rows in chosen.values() for row in rows]
    size = _picture_bytes(opened)
    decoder = Decoder(sheet.config, resources)
    timeout, memory = stages.item_timeout_s, stages.item_memory_mib
    with Isolated(originals.reader, workers=resources.workers, timeout_s=timeout, memory_mib=memory) as isolated:
        reads = isolated.map(one.task for one in opened if isinstance(one.task, Task))
        for one in opened:
            read = next(reads)[1] if isinstance(one.task, Task) else one.task
            if isinstance(read, Lost):
                read = read.error(one.place["path"])
            found.append(_result(cached, decoder, one, read, size))
            progress.advance(1)
    return [one for bucket in chosen for one in sorted((r for r in found if r.bucket == bucket), key=_order)]


def _order(result: Result) -> tuple[float, str]:
    """The lowest PSNR first; what could not be compared before all, damage as well."""
    return (-1.0 if result.psnr is None else result.psnr, result.sample_id)


def _picture_bytes(opened: list[Opened]) -> int:
    """What one picture may take, so that all of them stay within PAGE_BYTES."""
    counts = (_frames(one.sample) for one in opened)
    pictures = [
        comparing.pictures_of(frames, one.sample["condition"] != "none")
        for frames, one in zip(counts, opened, strict=True)
    ]
    return comparing.PAGE_BYTES // max(1, sum(pictures))


def _frames(sample: Row) -> int:
    return Bucket.parse(sample["geometry"]["bucket"]).frames


def _result(cached: Cached, decoder: Decoder, one: Opened, read: Original | MediaError, size: int) -> Result:
    item, captions = item_of(cached.sheet, one), tuple(cached.captions(one.place["texts"]))
    original, unread = (None, read) if isinstance(read, MediaError) else (read, None)
    [stored] = cached.latents.read([one.place["sample_id"]]).values()
    if isinstance(stored, LatentpressError):
        return Result(item, captions, None, unread, stored)
    try:
        comparison = _compared(decoder, one.sample, stored, original, size)
    except DamageError as damage:
        return Result(item, captions, None, unread, damage)
    return Result(item, captions, comparison, unread)


def _compared(
    decoder: Decoder, sample: Row, stored: tuple[str, Encoded], read: Original | None, size: int
) -> Comparison:
    (path, row), bucket = stored, sample["geometry"]["bucket"]
    times: list[float] = []
    if sample["kind"] == "video":
        times = clip_times(sample["start"], sample["rate"], _frames(sample))
    decoded = decoder.decode(path, row, "latent", bucket)
    comparison = comparing.compare(read.frames if read else None, decoded, times, size)
    if "condition" not in row.tensors:
        return comparison
    whole = Bucket.parse((sample["source_geometry"] or sample["geometry"])["bucket"])
    beside = decoder.decode(path, row, "condition", str(Bucket(whole.width, whole.height, decoder.given)))
    condition = comparing.compare(read.condition if read else None, beside, times[: decoder.given], size)
    return replace(comparison, condition=condition.frames[0])


def report(found: list[Result], report: Report, *, everything: bool) -> None:
    """What a report says of the results. everything: with the numbers of each sample."""
    compared = sorted((one for one in found if one.psnr is not None), key=_order)
    report.details["lowest_psnr"] = [_numbers(one) for one in compared[:WORST]]
    if everything:
        report.details["samples"] = [_numbers(one) | _more(one) for one in found]
    report.done = len(compared)
    if any(caption.problem == WAITING for one in found for caption in one.captions):
        report.next_steps.append("latentpress encode-text")
    for one in found:
        if one.unread:
            row = rejects.reject("preview", one.name, one.item.path, one.unread.reason, str(one.unread))
            report.set_aside.append(row)
        if isinstance(one.damage, DamageError):
            damage = {"path": one.damage.path, "row": one.damage.row, "item": one.name, "reason": "damaged"}
            report.damage.append(damage | {"message": one.damage.reason})
    if report.damage:
        report.next_steps += ["latentpress verify --repair"]


def _numbers(one: Result) -> Row:
    psnr = math.nan if one.psnr is None else round(one.psnr, 2)
    tokens = ", ".join("unknown" if caption.tokens is None else str(caption.tokens) for caption in one.captions)
    return {"psnr_db": psnr, "bucket": one.bucket, "tokens": tokens, "item": one.name}


def _more(one: Result) -> Row:
    """The same and more, as plain values."""
    condition = one.comparison.condition if one.comparison else None
    return {
        "sample_id": one.sample_id,
        "mse": one.mse,
        "condition_mse": condition.mse if condition else None,
        "captions": [{"text": c.text, "tokens": c.tokens, "kept": c.kept, "problem": c.problem} for c in one.captions],
        "unread": str(one.unread) if one.unread else "",
        "damage": one.damage.message if one.damage else "",
    }
