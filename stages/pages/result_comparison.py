"""Decodes chosen samples and compares them with their originals, one at a time. Imports torch."""

import math
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

from cache.sets import rejects
from cache.store.damage import DamageError
from schemas.cli.console import Progress, Report
from schemas.config.encoding import StageWorkers
from schemas.errors import LatentpressError
from schemas.geometry import Bucket
from stages.encoding import model_loading
from stages.encoding.vae import base
from stages.media.files import MediaError
from stages.pages.plan_table import NOT_ENCODED, EncodedPlan
from stages.pages.result_page import MAX_LOWEST, MAX_PAGE_BYTES, SampleResult, compare_clips
from stages.pages.sample_preview import PageItem, SamplePixels, frame_indices, make_original_reader, read_samples

TableRow = dict[str, Any]


def compare_samples(
    encoded: EncodedPlan, chosen: dict[str, list[int]], resources: StageWorkers, progress: Progress
) -> list[SampleResult]:
    """The chosen rows of each bucket, in that order, and within a bucket the lowest PSNR first.

    Originals are read ahead in a sandbox. Of each sample only small pictures stay in memory.
    """
    config, results = encoded.table.config, list[SampleResult]()
    pictures = 0
    for bucket, indices in chosen.items():
        shape = Bucket.parse(bucket)
        given = len(shape.references) or config.model.condition is not None
        frames = len(frame_indices(shape.frames)) + given
        pictures += 3 * frames * len(indices)
    max_bytes = MAX_PAGE_BYTES // max(1, pictures)
    autoencoder = base.load_autoencoder(config, model_loading.select_device(resources))
    rows = [row for indices in chosen.values() for row in indices]
    with closing(read_samples(encoded.table, rows, make_original_reader, resources.workers)) as originals:
        for item, original in originals:
            results.append(_compare_sample(encoded, autoencoder, item, original, max_bytes))
            progress.advance(1)
    order = list(chosen)
    return sorted(results, key=lambda result: (order.index(result.bucket), *_sort_key(result)))


def _sort_key(result: SampleResult) -> tuple[float, str]:
    """Samples without a PSNR first, then the lowest PSNR."""
    return (-1.0 if result.psnr is None else result.psnr, result.sample_id)


def _compare_sample(
    encoded: EncodedPlan,
    autoencoder: base.Autoencoder,
    item: PageItem,
    original: SamplePixels | MediaError,
    max_bytes: int,
) -> SampleResult:
    pixels, unreadable = (None, original) if isinstance(original, MediaError) else (original, None)
    captions, model = encoded.captions(item.active_row["texts"]), encoded.table.config.model
    result = SampleResult(item, captions, comparison=None, unreadable=unreadable)
    [stored] = encoded.latents.read([result.sample_id]).values()
    if isinstance(stored, LatentpressError):
        return replace(result, damage=stored)
    path, row = stored
    try:
        decoded = base.decode_tensor(model.family_spec, autoencoder, path, row, "latent", item.bucket)
        comparison = compare_clips(pixels.frames if pixels else None, decoded, item.times, max_bytes)
        if "condition" in row.tensors:
            size = Bucket.parse((item.sample["source_geometry"] or item.sample["geometry"])["bucket"])
            given = 1 if model.condition is None else model.condition.frames
            padded = model.condition is not None and model.condition.padded
            bucket = Bucket(size.width, size.height, size.frames if padded else given)
            decoded = base.decode_tensor(model.family_spec, autoencoder, path, row, "condition", bucket)[:given]
            times = item.times[:given]
            condition = compare_clips(pixels.conditions[0] if pixels else None, decoded, times, max_bytes)
            comparison = replace(comparison, conditions=condition.frames[:1])
        for number, reference in enumerate(item.references):
            [stored] = encoded.latents.read([reference["sample_id"]]).values()
            if isinstance(stored, LatentpressError):
                return replace(result, damage=stored)
            bucket = Bucket.parse(reference["geometry"]["bucket"])
            decoded = base.decode_tensor(model.family_spec, autoencoder, *stored, "latent", bucket)
            shown = compare_clips(pixels.conditions[number] if pixels else None, decoded, [], max_bytes)
            comparison = replace(comparison, conditions=comparison.conditions + shown.frames)
    except DamageError as damage:
        return replace(result, damage=damage)
    return replace(result, comparison=comparison)


def add_to_report(results: list[SampleResult], report: Report, *, with_samples: bool) -> None:
    """Add the results to a report. with_samples: the numbers of each sample too."""
    compared = sorted((result for result in results if result.psnr is not None), key=_sort_key)
    report.details["lowest_psnr"] = [_key_numbers(result) for result in compared[:MAX_LOWEST]]
    if with_samples:
        rows = report.details["samples"] = list[TableRow]()
        for result in results:
            conditions = result.comparison.conditions if result.comparison else ()
            errors = [condition.mse for condition in conditions if condition.mse is not None]
            numbers = {
                "sample_id": result.sample_id,
                "mse": result.mse,
                "condition_mse": sum(errors) / len(errors) if errors else None,
                "captions": [asdict(caption) for caption in result.captions],
                "unread": str(result.unreadable) if result.unreadable else "",
                "damage": result.damage.message if result.damage else "",
            }
            rows.append(_key_numbers(result) | numbers)
    report.done = len(compared)
    if any(caption.problem == NOT_ENCODED for result in results for caption in result.captions):
        report.next_steps.append("latentpress encode-text")
    for result in results:
        if result.unreadable:
            reason, message = result.unreadable.reason, str(result.unreadable)
            row = rejects.make_reject("preview", result.item.name, result.item.path, reason, message)
            report.set_aside.append(row)
        if isinstance(result.damage, DamageError):
            damage = {
                "path": result.damage.path,
                "row": result.damage.row,
                "item": result.item.name,
                "reason": "damaged",
            }
            report.damage.append(damage | {"message": result.damage.reason})
    if report.damage:
        report.next_steps += ["latentpress verify --repair"]


def _key_numbers(result: SampleResult) -> TableRow:
    psnr = math.nan if result.psnr is None else round(result.psnr, 2)
    tokens = ", ".join("unknown" if caption.tokens is None else str(caption.tokens) for caption in result.captions)
    return {"psnr_db": psnr, "bucket": result.bucket, "tokens": tokens, "item": result.item.name}
