"""Decodes chosen samples and compares them with their originals, one at a time."""

import math
from dataclasses import replace
from typing import Any

from cache import rejects
from cache.damage import DamageError
from schemas.cli.console import Progress, Report
from schemas.clips import clip_times
from schemas.config.encoding import Resources
from schemas.errors import LatentpressError
from schemas.geometry import Bucket
from stages.engines.sandbox import SandboxPool, WorkerFailure
from stages.media.errors import MediaError
from stages.pages import clip_comparison
from stages.pages.clip_comparison import Comparison
from stages.pages.encoded_plan import NOT_ENCODED, EncodedPlan, StoredRow
from stages.pages.latent_decoder import LatentDecoder
from stages.pages.result_page import MAX_LOWEST, SampleResult
from stages.pages.sample_preview import OpenedSample, OriginalPixels, PreviewTask, SampleOpener, make_original_reader

TableRow = dict[str, Any]


def compare_samples(
    encoded: EncodedPlan, chosen: dict[str, list[int]], resources: Resources, progress: Progress
) -> list[SampleResult]:
    """The chosen rows of each bucket, in that order, and within a bucket the lowest PSNR first.

    Originals are read ahead in a sandbox. Of each sample only small pictures stay in memory.
    """
    config, opener, results = encoded.table.config, SampleOpener(encoded.table), list[SampleResult]()
    opened = [opener.open(row) for rows in chosen.values() for row in rows]
    samples = [one.item.sample for one in opened]
    pictures = (clip_comparison.count_pictures(_frame_count(each), each["condition"] != "none") for each in samples)
    max_bytes = clip_comparison.MAX_PAGE_BYTES // max(1, sum(pictures))
    decoder = LatentDecoder(config, resources)
    timeout, memory = config.stages.item_timeout_s, config.stages.item_memory_mib
    with SandboxPool(make_original_reader, workers=resources.workers, timeout_s=timeout, memory_mib=memory) as pool:
        originals = pool.map(one.task for one in opened if isinstance(one.task, PreviewTask))
        for one in opened:
            original = next(originals)[1] if isinstance(one.task, PreviewTask) else one.task
            if isinstance(original, WorkerFailure):
                original = original.error(one.item.path)
            results.append(_compare_sample(encoded, decoder, one, original, max_bytes))
            progress.advance(1)
    return [one for bucket in chosen for one in sorted((r for r in results if r.bucket == bucket), key=_sort_key)]


def _sort_key(result: SampleResult) -> tuple[float, str]:
    """Samples without a PSNR first, then the lowest PSNR."""
    return (-1.0 if result.psnr is None else result.psnr, result.sample_id)


def _frame_count(sample: TableRow) -> int:
    return Bucket.parse(sample["geometry"]["bucket"]).frames


def _compare_sample(
    encoded: EncodedPlan,
    decoder: LatentDecoder,
    opened: OpenedSample,
    original: OriginalPixels | MediaError,
    max_bytes: int,
) -> SampleResult:
    pixels, unreadable = (None, original) if isinstance(original, MediaError) else (original, None)
    captions = encoded.captions(opened.item.active_row["texts"])
    result = SampleResult(opened.item, captions, comparison=None, unreadable=unreadable)
    [stored] = encoded.latents.read([result.sample_id]).values()
    if isinstance(stored, LatentpressError):
        return replace(result, damage=stored)
    try:
        return replace(result, comparison=_decode_and_compare(decoder, opened.item.sample, stored, pixels, max_bytes))
    except DamageError as damage:
        return replace(result, damage=damage)


def _decode_and_compare(
    decoder: LatentDecoder, sample: TableRow, stored: StoredRow, original: OriginalPixels | None, max_bytes: int
) -> Comparison:
    (path, row), times = stored, list[float]()
    if sample["kind"] == "video":
        times = clip_times(sample["start"], sample["rate"], _frame_count(sample))
    decoded = decoder.decode(path, row, "latent", sample["geometry"]["bucket"])
    comparison = clip_comparison.compare_clips(original.frames if original else None, decoded, times, max_bytes)
    if "condition" not in row.tensors:
        return comparison
    size = Bucket.parse((sample["source_geometry"] or sample["geometry"])["bucket"])
    decoded = decoder.decode(path, row, "condition", str(Bucket(size.width, size.height, decoder.given)))
    pixels = original.condition if original else None
    condition = clip_comparison.compare_clips(pixels, decoded, times[: decoder.given], max_bytes)
    return replace(comparison, condition=condition.frames[0])


def add_to_report(results: list[SampleResult], report: Report, *, with_samples: bool) -> None:
    """Add the results to a report. with_samples: the numbers of each sample too."""
    compared = sorted((result for result in results if result.psnr is not None), key=_sort_key)
    report.details["lowest_psnr"] = [_key_numbers(result) for result in compared[:MAX_LOWEST]]
    if with_samples:
        report.details["samples"] = [_all_numbers(result) for result in results]
    report.done = len(compared)
    if any(caption.problem == NOT_ENCODED for result in results for caption in result.captions):
        report.next_steps.append("latentpress encode-text")
    for result in results:
        if result.unreadable:
            reason, message = result.unreadable.reason, str(result.unreadable)
            row = rejects.make_reject("preview", result.name, result.item.path, reason, message)
            report.set_aside.append(row)
        if isinstance(result.damage, DamageError):
            damage = {"path": result.damage.path, "row": result.damage.row, "item": result.name, "reason": "damaged"}
            report.damage.append(damage | {"message": result.damage.reason})
    if report.damage:
        report.next_steps += ["latentpress verify --repair"]


def _key_numbers(result: SampleResult) -> TableRow:
    psnr = math.nan if result.psnr is None else round(result.psnr, 2)
    tokens = ", ".join("unknown" if caption.tokens is None else str(caption.tokens) for caption in result.captions)
    return {"psnr_db": psnr, "bucket": result.bucket, "tokens": tokens, "item": result.name}


def _all_numbers(result: SampleResult) -> TableRow:
    condition = result.comparison.condition if result.comparison else None
    return _key_numbers(result) | {
        "sample_id": result.sample_id,
        "mse": result.mse,
        "condition_mse": condition.mse if condition else None,
        "captions": [
            {"text": caption.text, "tokens": caption.tokens, "kept": caption.kept, "problem": caption.problem}
            for caption in result.captions
        ],
        "unread": str(result.unreadable) if result.unreadable else "",
        "damage": result.damage.message if result.damage else "",
    }
