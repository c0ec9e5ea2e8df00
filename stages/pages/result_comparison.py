"""Chosen samples of the cache decoded and compared with their originals, one at a time."""

import math
from dataclasses import replace
from typing import Any

from cache import rejects
from cache.damage import DamageError
from cache.shard import ShardRow as Encoded
from schemas.cli.console import Progress, Report
from schemas.clips import clip_times
from schemas.config.encoding import Resources
from schemas.errors import LatentpressError
from schemas.geometry import Bucket
from stages.engines.sandbox import SandboxPool, WorkerFailure
from stages.media.errors import MediaError
from stages.pages import clip_comparison, original_reader
from stages.pages.clip_comparison import Comparison
from stages.pages.encoded_plan import NOT_ENCODED, EncodedPlan
from stages.pages.latent_decoder import LatentDecoder
from stages.pages.original_reader import OriginalPixels
from stages.pages.plan_table import PlanTable
from stages.pages.result_page import MAX_WORST, SampleResult
from stages.pages.sample_preview import OpenedSample, PreviewTask, SampleOpener, make_page_item

TableRow = dict[str, Any]


def compare_samples(
    sheet: PlanTable, cached: EncodedPlan, chosen: dict[str, list[int]], resources: Resources, progress: Progress
) -> list[SampleResult]:
    """The rows `chosen` of each bucket, in that order, and within a bucket the lowest PSNR first.

    Originals are read in processes of their own, a few ahead; what stays in memory of a sample are small pictures.
    """
    stages, opener, found = sheet.config.stages, SampleOpener(sheet), list[SampleResult]()
    opened = [opener.open(row) for rows in chosen.values() for row in rows]
    size = _bytes_per_picture(opened)
    decoder = LatentDecoder(sheet.config, resources)
    timeout, memory = stages.item_timeout_s, stages.item_memory_mib
    with SandboxPool(
        original_reader.make_original_reader, workers=resources.workers, timeout_s=timeout, memory_mib=memory
    ) as isolated:
        reads = isolated.map(one.task for one in opened if isinstance(one.task, PreviewTask))
        for one in opened:
            read = next(reads)[1] if isinstance(one.task, PreviewTask) else one.task
            if isinstance(read, WorkerFailure):
                read = read.error(one.active_row["path"])
            found.append(_compare_sample(cached, decoder, one, read, size))
            progress.advance(1)
    return [one for bucket in chosen for one in sorted((r for r in found if r.bucket == bucket), key=_sort_key)]


def _sort_key(result: SampleResult) -> tuple[float, str]:
    """The lowest PSNR first; what could not be compared before all, damage as well."""
    return (-1.0 if result.psnr is None else result.psnr, result.sample_id)


def _bytes_per_picture(opened: list[OpenedSample]) -> int:
    """What one picture may take, so that all of them stay within MAX_PAGE_BYTES."""
    counts = (_frame_count(one.sample) for one in opened)
    pictures = [
        clip_comparison.count_pictures(frames, one.sample["condition"] != "none")
        for frames, one in zip(counts, opened, strict=True)
    ]
    return clip_comparison.MAX_PAGE_BYTES // max(1, sum(pictures))


def _frame_count(sample: TableRow) -> int:
    return Bucket.parse(sample["geometry"]["bucket"]).frames


def _compare_sample(
    cached: EncodedPlan, decoder: LatentDecoder, one: OpenedSample, read: OriginalPixels | MediaError, size: int
) -> SampleResult:
    item, captions = make_page_item(cached.sheet, one), tuple(cached.captions(one.active_row["texts"]))
    original, unread = (None, read) if isinstance(read, MediaError) else (read, None)
    [stored] = cached.latents.read([one.active_row["sample_id"]]).values()
    if isinstance(stored, LatentpressError):
        return SampleResult(item, captions, None, unread, stored)
    try:
        comparison = _decode_and_compare(decoder, one.sample, stored, original, size)
    except DamageError as damage:
        return SampleResult(item, captions, None, unread, damage)
    return SampleResult(item, captions, comparison, unread)


def _decode_and_compare(
    decoder: LatentDecoder, sample: TableRow, stored: tuple[str, Encoded], read: OriginalPixels | None, size: int
) -> Comparison:
    (path, row), bucket = stored, sample["geometry"]["bucket"]
    times: list[float] = []
    if sample["kind"] == "video":
        times = clip_times(sample["start"], sample["rate"], _frame_count(sample))
    decoded = decoder.decode(path, row, "latent", bucket)
    comparison = clip_comparison.compare_clips(read.frames if read else None, decoded, times, size)
    if "condition" not in row.tensors:
        return comparison
    whole = Bucket.parse((sample["source_geometry"] or sample["geometry"])["bucket"])
    beside = decoder.decode(path, row, "condition", str(Bucket(whole.width, whole.height, decoder.given)))
    condition = clip_comparison.compare_clips(read.condition if read else None, beside, times[: decoder.given], size)
    return replace(comparison, condition=condition.frames[0])


def add_to_report(found: list[SampleResult], report: Report, *, everything: bool) -> None:
    """What a report says of the results. everything: with the numbers of each sample."""
    compared = sorted((one for one in found if one.psnr is not None), key=_sort_key)
    report.details["lowest_psnr"] = [_key_numbers(one) for one in compared[:MAX_WORST]]
    if everything:
        report.details["samples"] = [_key_numbers(one) | _all_numbers(one) for one in found]
    report.done = len(compared)
    if any(caption.problem == NOT_ENCODED for one in found for caption in one.captions):
        report.next_steps.append("latentpress encode-text")
    for one in found:
        if one.unread:
            row = rejects.make_reject("preview", one.name, one.item.path, one.unread.reason, str(one.unread))
            report.set_aside.append(row)
        if isinstance(one.damage, DamageError):
            damage = {"path": one.damage.path, "row": one.damage.row, "item": one.name, "reason": "damaged"}
            report.damage.append(damage | {"message": one.damage.reason})
    if report.damage:
        report.next_steps += ["latentpress verify --repair"]


def _key_numbers(one: SampleResult) -> TableRow:
    psnr = math.nan if one.psnr is None else round(one.psnr, 2)
    tokens = ", ".join("unknown" if caption.tokens is None else str(caption.tokens) for caption in one.captions)
    return {"psnr_db": psnr, "bucket": one.bucket, "tokens": tokens, "item": one.name}


def _all_numbers(one: SampleResult) -> TableRow:
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
