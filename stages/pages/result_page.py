"""The page of `latentpress preview`: encoded samples, decoded one at a time and compared with their originals, by PSNR,
small pictures of some frames and their difference. Imports torch."""

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from cache.sets import rejects
from cache.store.damage import DamageError
from schemas.cli.console import Progress, Report
from schemas.config.encoding import StageWorkers
from schemas.errors import LatentpressError
from schemas.geometry import Bucket
from stages.encoding import model_loading
from stages.encoding.vae import base
from stages.media.files import MediaError
from stages.pages.html import Caption, Card, Figure, Gallery, Link, Section, render_template
from stages.pages.pictures import FRAME_BOX, IMAGE_BOX, Picture, encode_picture
from stages.pages.plan_table import NOT_ENCODED, EncodedCaption, EncodedPlan, bucket_anchor, link_buckets
from stages.pages.sample_preview import PageItem, SamplePixels, frame_indices, make_original_reader, read_samples

TableRow = dict[str, Any]
MAX_LOWEST = 10  # samples of the lowest PSNR that are listed
SECTION_NOTE = "The lowest PSNR comes first. Samples are chosen by their id, so each run shows the same ones."
PSNR_NOTE = (
    "PSNR is 10 log10(255² / MSE) over the 8-bit pixels of all frames, before the encoder and after the decoder, "
    "at full size. The mean of a bucket is over the samples shown."
)
POSTERIOR_NOTES = {
    "sample": "drawn from the posterior",
    "mode": "the posterior's mean",
    "moments": "moments, shown by their mean",
}
DIFFERENCE_GAIN = 4  # factor that makes differences visible
DIFFERENCE = f"difference \N{MULTIPLICATION SIGN} {DIFFERENCE_GAIN}"
MAX_PAGE_BYTES = 3 << 20  # all pictures of a page


@dataclass(frozen=True)
class ComparedFrame:
    """An image (time: None), or one frame of a clip. original, difference, mse: None if the original can't be read."""

    reconstruction: Picture
    original: Picture | None
    difference: Picture | None
    mse: float | None
    time: float | None  # seconds


@dataclass(frozen=True)
class Comparison:
    """A sample's original and reconstruction. mse: over all frames. conditions: the i2i source, the references or the
    i2v first frame, which have latents of their own."""

    frames: tuple[ComparedFrame, ...]
    mse: float | None
    conditions: tuple[ComparedFrame, ...] = ()


def psnr(mse: float) -> float:
    """Peak signal-to-noise ratio in dB of 8-bit pixels; infinite for identical ones."""
    return 10 * math.log10(255**2 / mse) if mse else math.inf


def format_psnr(mse: float | None) -> str:
    """Return "" where there is no original."""
    return "" if mse is None else format_decibels(psnr(mse))


def format_decibels(value: float) -> str:
    return "identical" if math.isinf(value) else f"{value:.2f} dB"


def frame_errors(original_THWC: np.ndarray, reconstruction_THWC: np.ndarray) -> np.ndarray:
    """(T,) the mean squared error of each frame of two uint8 clips, exact; a frame at a time, which bounds memory."""
    assert original_THWC.shape == reconstruction_THWC.shape, (original_THWC.shape, reconstruction_THWC.shape)
    assert original_THWC.dtype == reconstruction_THWC.dtype == np.uint8
    pairs = zip(original_THWC, reconstruction_THWC, strict=True)
    return np.array([np.square(first.astype(np.int32) - second).mean(dtype=np.float64) for first, second in pairs])


def compare_clips(
    original_THWC: np.ndarray | None, reconstruction_THWC: np.ndarray, times: Sequence[float], max_bytes: int
) -> Comparison:
    """Compare a sample with its reconstruction, both uint8.

    times: seconds of the frames, none for an image. max_bytes: size limit of each picture.
    """
    errors = None if original_THWC is None else frame_errors(original_THWC, reconstruction_THWC)
    frames = []
    for i in frame_indices(len(reconstruction_THWC)):
        time = times[i] if times else None
        box = IMAGE_BOX if time is None else FRAME_BOX
        reconstruction = encode_picture(reconstruction_THWC[i], box, max_bytes)
        original = difference = mse = None
        if original_THWC is not None and errors is not None:
            original, mse = encode_picture(original_THWC[i], box, max_bytes), float(errors[i])
            absolute = np.abs(original_THWC[i].astype(np.int16) - reconstruction_THWC[i])
            amplified = np.minimum(absolute * DIFFERENCE_GAIN, 255).astype(np.uint8)
            difference = encode_picture(amplified, box, max_bytes)
        frames.append(ComparedFrame(reconstruction, original, difference, mse, time))
    # All frames have the same number of pixels, so this is the mean over all pixels.
    return Comparison(tuple(frames), None if errors is None else float(errors.mean()))


@dataclass(frozen=True)
class SampleResult:
    """A sample compared with its original.

    comparison: None if its latents can't be decoded; `damage` says why. unreadable: why there is no original.
    """

    item: PageItem
    captions: tuple[EncodedCaption, ...]
    comparison: Comparison | None
    unreadable: MediaError | None = None
    damage: LatentpressError | None = None

    @property
    def bucket(self) -> str:
        return self.item.active_row["bucket"]

    @property
    def sample_id(self) -> str:
        return self.item.active_row["sample_id"]

    @property
    def mse(self) -> float | None:
        return None if self.comparison is None else self.comparison.mse

    @property
    def psnr(self) -> float | None:
        """dB over all pixels of all frames; None without a comparison, infinite for identical pixels."""
        return None if self.mse is None else psnr(self.mse)


def bucket_rows(encoded: EncodedPlan, results: Sequence[SampleResult], buckets: Sequence[str]) -> list[TableRow]:
    """The table of buckets: how much is encoded and shown, mean and lowest PSNR of what is shown."""
    rows = []
    for bucket in buckets:
        in_bucket = [result for result in results if result.bucket == bucket]
        values = [result.psnr for result in in_bucket if result.psnr is not None]
        mean = sum(values) / len(values) if values else math.nan
        row = encoded.bucket_row(bucket, len(in_bucket)) | {"mean_psnr_db": round(mean, 2)}
        rows.append(row | {"lowest_psnr_db": round(min(values, default=math.nan), 2)})
    return rows


def render_result_page(
    encoded: EncodedPlan, results: Sequence[SampleResult], rows: Sequence[TableRow]
) -> Iterator[bytes]:
    """The page in pieces. rows: of `bucket_rows`."""
    compared = sorted((result.psnr, result.sample_id, result) for result in results if result.psnr is not None)
    lowest = [
        {"psnr": format_decibels(psnr), "bucket": result.bucket, "sample": Link(result.item.name, f"#sample-{name}")}
        for psnr, name, result in compared[:MAX_LOWEST]
    ]
    sections = [Section("Lowest PSNR", table=lowest)] if lowest else []
    for row in rows:
        facts = {key: value for key, value in row.items() if key != "bucket"}
        cards = [result_card(result) for result in results if result.bucket == row["bucket"]]
        sections.append(Section(row["bucket"], bucket_anchor(row["bucket"]), facts, SECTION_NOTE, cards))
    return render_template(
        "preview.html",
        title=f"Latents of plan {encoded.table.plan.name}",
        intro=[*_describe_cache(encoded), PSNR_NOTE],
        buckets=link_buckets(rows),
        sections=sections,
    )


def _describe_cache(encoded: EncodedPlan) -> Iterator[str]:
    config, count, set_aside = encoded.table.config, int(encoded.encoded.sum()), int(encoded.set_aside.sum())
    model = config.model
    posterior = f", {POSTERIOR_NOTES[config.latents.posterior]}" if model.family_spec.posterior else ""
    yield f"{model.family}, {model.task}, {model.flavour_spec.name}; {encoded.folder}{posterior}"
    sentence = f"{count} of {len(encoded.encoded)} samples are encoded"
    sentence += f", {set_aside} set aside" if set_aside else ""
    yield sentence + (f"; {encoded.missing} are not encoded yet: latentpress encode-latents" if encoded.missing else "")


def result_card(result: SampleResult) -> Card:
    """A sample's pictures beside its captions, or why there are none."""
    problems = []
    if result.unreadable:
        problems.append(f"no original to compare with ({result.unreadable.reason}): {result.unreadable}")
    if result.damage:
        problems.append(f"can't be decoded: {result.damage.message}; {result.damage.next_step}")
    return Card(
        result.item.name,
        tuple(_galleries(result.comparison, result.item.path)) if result.comparison else (),
        result.item.marks,
        result.item.facts,
        tuple(Caption(caption.text, caption.token_summary, not caption.complete) for caption in result.captions),
        problems=tuple(problems),
        score=format_psnr(result.mse),
        anchor=f"sample-{result.sample_id}",
        whole=True,
    )


def _galleries(comparison: Comparison, path: str) -> Iterator[Gallery]:
    frames = comparison.frames
    is_clip = frames[0].time is not None
    if is_clip:
        order = f"original, reconstruction, {DIFFERENCE}" if frames[0].original else "reconstruction"
        yield Gallery([_stack(frame, path) for frame in frames], "frames", f"From top to bottom: {order}.")
    else:
        yield Gallery(list(_side_by_side(frames[0], path)))
    for number, condition in enumerate(comparison.conditions, 1):
        several = f" {number}" if len(comparison.conditions) > 1 else ""
        note = "The first frame, which is also encoded alone:" if is_clip else f"The i2i source{several}:"
        about = f"{'first frame' if is_clip else f'source{several}'} of {path}"
        yield Gallery(list(_side_by_side(condition, about)), note=note)


def _name_pictures(frame: ComparedFrame) -> dict[str, Picture]:
    pictures = {"original": frame.original, "reconstruction": frame.reconstruction, DIFFERENCE: frame.difference}
    return {name: picture for name, picture in pictures.items() if picture is not None}


def _side_by_side(frame: ComparedFrame, path: str) -> Iterator[Figure]:
    for name, picture in _name_pictures(frame).items():
        parts = [name, format_psnr(frame.mse) if name == "reconstruction" else ""]
        yield Figure((picture,), (f"{name}: {path}",), ", ".join(filter(None, parts)))


def _stack(frame: ComparedFrame, path: str) -> Figure:
    """One frame of a clip, from top to bottom."""
    time, pictures = f"{frame.time:.2f} s", _name_pictures(frame)
    caption = ", ".join(filter(None, [time, format_psnr(frame.mse)]))
    return Figure(tuple(pictures.values()), tuple(f"{name}: {time} of {path}" for name in pictures), caption)


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
    autoencoder = base.load_autoencoder(config.model, config.latents, model_loading.select_device(resources))
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
