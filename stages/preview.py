"""preview: an HTML page that compares encoded samples with their originals.

The page shows some samples of each bucket: the original as it was read for encoding, the decoded latents, their PSNR,
and the captions with their tokens. With --plan it shows the current plan instead, before samples are encoded: for each
bucket its row of the table that `bucket` prints, and some of its items as the encoder will get them. The items are read
and cropped by the same functions as for encoding, in a sandbox.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import typer

from cache.sets import rejects
from cache.sets.set_lookup import current_plan
from cache.store.damage import DamageError
from cache.store.files import check_folder, explained, replacing
from cache.store.store import Store
from schemas.activities import activity
from schemas.cli.console import Console, Options, Progress, Report, make_app
from schemas.cli.starting import install_command
from schemas.config.encoding import StageWorkers
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError, UsageError
from schemas.geometry import Bucket
from stages.discovery import media_locations
from stages.encoding.item_plans import read_media
from stages.media.files import MediaError
from stages.pages.html import Caption, Card, Figure, Gallery, Section, render_template
from stages.pages.pictures import FRAME_BOX, IMAGE_BOX, Picture, encode_picture
from stages.pages.plan_samples import (
    NOT_ENCODED,
    UNCROPPED_BOX,
    EncodedPlan,
    PlanSample,
    PlanTable,
    SamplePixels,
    frame_indices,
    read_samples,
)
from stages.planning import summary

TableRow = dict[str, Any]
SampleResults = Iterator[tuple[PlanSample, SamplePixels | MediaError]]
MAX_CAPTIONS = 3  # captions shown per item of a plan
FEATURES = ("sharpness", "luminance", "contrast", "motion", "outlier")
MAX_EXAMPLES = 3  # examples shown per rule
MAX_LOWEST = 10  # samples in the list of the lowest PSNR
SECTION_NOTE = "The lowest PSNR comes first. Samples are chosen by their id, so each run shows the same samples."
PSNR_NOTE = (
    "PSNR is 10 log10(255² / MSE) over the 8-bit pixels of all frames, before the encoder and after the decoder, "
    "at full size. The mean PSNR of a bucket is over the samples on this page."
)
POSTERIOR_NOTES = {
    "sample": "sampled from the posterior",
    "mode": "mean of the posterior",
    "moments": "moments of the posterior, of which the mean is decoded",
}
DIFFERENCE_GAIN = 4  # factor that makes differences visible
DIFFERENCE = f"difference \N{MULTIPLICATION SIGN} {DIFFERENCE_GAIN}"
MAX_PAGE_BYTES = 3 << 20  # maximum size of all pictures on a page of encoded samples


def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    plan: Annotated[
        bool, typer.Option("--plan", help="Show samples of the current plan as they will be encoded.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File of the page.  [default: <output>/preview/latents|plan-<generation>.html]"
        ),
    ] = None,
    items: Annotated[
        int,
        typer.Option("--samples", "--items", min=1, max=100_000, metavar="N", help="Number of samples per bucket."),
    ] = 6,
    bucket: Annotated[
        list[str] | None, typer.Option(metavar="WxH@F", help="Show only this bucket. Repeatable.")
    ] = None,
) -> Report:
    store = Store(config.root)
    current = current_plan(store, config)
    report = Report(program="preview", dry_run=options.dry_run, details={"generation": current.name})
    table = PlanTable(store, config, current)
    buckets = _select_buckets(table, bucket)
    page = out or Path(config.output) / "preview" / f"{'plan' if plan else 'latents'}-{current.name}.html"
    check_folder(page.parent)
    encoded = None if plan else EncodedPlan(table)
    rows_by_bucket = table.choose(items, buckets, encoded.is_encoded if encoded else None)
    total = sum(map(len, rows_by_bucket.values()))
    if encoded:
        report.details["cache"] = encoded.folder
        if encoded.missing_count:
            report.details["not_encoded"] = encoded.missing_count
            report.next_steps.append("latentpress encode-latents")
        if not total:
            location = "" if buckets == table.buckets else f" in {', '.join(buckets)}"
            raise LatentpressError(
                f"no sample{location} of plan {current.name} is encoded yet",
                "run `latentpress encode-latents`, or show the plan: latentpress preview --plan",
            )
    report.details["page"] = str(page)
    report.details["buckets"] = [
        encoded.bucket_row(name, len(rows))
        if encoded
        else {"bucket": name, "samples": table.count(name), "shown": len(rows)}
        for name, rows in rows_by_bucket.items()
    ]
    if options.dry_run:
        report.remaining = total
        return report
    resources = options.resources(config, "decode" if encoded else "preview")
    all_rows = [row for rows in rows_by_bucket.values() for row in rows]
    _require_media(table, all_rows)
    autoencoder = _load_autoencoder(config, resources) if encoded else None
    with (
        console.progress(total, "preview", "samples") as progress,
        closing(read_samples(table, all_rows, resources.workers, with_uncropped=plan)) as results,
    ):
        counted_results = _count_results(results, report, progress)
        pieces = (
            _render_latents(encoded, autoencoder, rows_by_bucket, counted_results, report, with_samples=options.json)
            if encoded
            else _render_plan(table, rows_by_bucket, counted_results, report)
        )
        with explained(str(page)), replacing(page) as temporary, temporary.open("wb") as file:
            size = sum(map(file.write, pieces))
    report.details["written_mib"] = round(size / 2**20, 2)
    return report


def _select_buckets(table: PlanTable, names: list[str] | None) -> list[str]:
    """Return the buckets of the plan with these names. None: all buckets."""
    choices = f"buckets of the plan: {', '.join(table.buckets)}"
    try:
        requested = {str(Bucket.parse(text)) for text in names or table.buckets}
    except ValueError as error:
        raise UsageError(f"--bucket: {error}", choices) from error
    if unknown := requested.difference(table.buckets):
        raise UsageError(f"--bucket: the plan does not have a bucket {min(unknown)}", choices)
    return [name for name in table.buckets if name in requested]


def _require_media(table: PlanTable, rows: list[int]) -> None:
    samples = table.active["sample_id"].take(pa.array(rows, pa.int64())).combine_chunks()
    probed = media_locations.select_probed_members(table.plan, "latents", samples)
    media_locations.require_media(table.locations, "latents", probed)


def _load_autoencoder(config: Config, resources: StageWorkers) -> Any:
    missing = [name for name in ("torch", "diffusers") if find_spec(name) is None]
    if missing:
        raise LatentpressError(
            f"decoding latents needs the library {missing[0]!r}, which is not installed",
            f"Install it with: {install_command('encode')}; `latentpress preview --plan` does not need it",
        )
    with activity("loading torch and the autoencoder's code", at_once=True):
        from stages.encoding import model_loading
        from stages.encoding.vae.base import load_autoencoder
    return load_autoencoder(config.model, config.latents, model_loading.select_device(resources))


def _count_results(results: SampleResults, report: Report, progress: Progress) -> SampleResults:
    """Yield the results, and add samples that cannot be read to the report."""
    for item, pixels in results:
        if isinstance(pixels, MediaError):
            row = rejects.make_reject("preview", item.name, item.path, pixels.reason, str(pixels))
            report.rejects.append(row)
        yield item, pixels
        progress.advance(1)


def _render_page(title: str, intro: Sequence[str], rows: Sequence[TableRow], sections: Iterator[Section]) -> Any:
    """Render the page in pieces. rows: rows of the table of buckets; each gets a link to its section."""
    links = [{"text": row["bucket"], "href": f"#{_bucket_anchor(row['bucket'])}"} for row in rows]
    buckets = [row | {"bucket": link} for row, link in zip(rows, links, strict=True)]
    return render_template("preview.html", title=title, intro=intro, buckets=buckets, sections=sections)


def _bucket_anchor(bucket: str) -> str:
    return f"bucket-{bucket.replace('@', '-')}"


def _shrink(pixels_HWC: np.ndarray, is_clip: bool, max_bytes: float = math.inf) -> Picture:
    return encode_picture(pixels_HWC, FRAME_BOX if is_clip else IMAGE_BOX, max_bytes)


def _side_by_side(
    pictures: Mapping[str, Picture], description: str, notes: Mapping[str, str] | None = None
) -> list[Figure]:
    """One figure per picture. pictures: name -> picture. notes: name -> text after the name."""
    notes = notes or {}
    return [
        Figure((picture,), (f"{name}: {description}",), ", ".join(filter(None, [name, notes.get(name)])))
        for name, picture in pictures.items()
    ]


def _strip(
    versions: Mapping[str, Sequence[Picture]], times: Sequence[float], path: str, notes: Sequence[str] = ()
) -> Gallery:
    """Frames of a clip from left to right, with their versions from top to bottom. notes: texts after the times."""
    figures = []
    for number, pictures in enumerate(zip(*versions.values(), strict=True)):
        time, note = f"{times[number]:.2f} s", notes[number] if notes else ""
        alts = tuple(f"{name}: {time} of {path}" for name in versions)
        figures.append(Figure(pictures, alts, ", ".join(filter(None, [time, note]))))
    note = f"From top to bottom: {', '.join(versions)}." if len(versions) > 1 else ""
    return Gallery(figures, "frames", note)


# -- page of the plan ------------------------------------------------------------------------------------------------


def _render_plan(
    table: PlanTable, rows_by_bucket: dict[str, list[int]], results: SampleResults, report: Report
) -> Iterator[bytes]:
    """Render the page in pieces. Samples are read while their cards are rendered."""
    config, bucket_rows = table.config, {row["bucket"]: row for row in table.bucket_rows()}
    features, model = _describe_features(table), config.model

    def cards(results: SampleResults) -> Iterator[Card]:
        for item, result in results:
            report.done += isinstance(result, SamplePixels)
            captions = [table.plan.texts[name]["text"] for name in item.active_row["texts"]]
            yield plan_card(item, captions, result, features.get(item.sample["media_id"], ()))

    def sections() -> Iterator[Section]:
        for bucket, rows in rows_by_bucket.items():
            note = f"{len(rows)} of {table.count(bucket)} samples"
            note += f"; {count} samples of the bucket are held out" if (count := table.count(bucket, "eval")) else ""
            facts = {key: value for key, value in bucket_rows.get(bucket, {}).items() if key != "bucket"}
            yield Section(bucket, _bucket_anchor(bucket), facts, note, cards(islice(results, len(rows))))
        note = "Items that a rule of the last bucket run excluded."
        yield Section("Excluded by bucket", note=note, table=_rule_rows(excluded), look="texts")
        note = "Items that discover rejected. They are not in a plan."
        yield Section("Rejected by discover", note=note, table=_rule_rows(rejected), look="texts")

    datasets = [dataset.id for dataset in config.datasets if not dataset.disabled]
    excluded = rejects.read_list(table.store, "bucket", f"{model.family}-{model.task}")
    rejected = pa.concat_tables([rejects.read_list(table.store, "discover", name) for name in datasets])
    held_out = pc.sum(pc.equal(table.active["role"], "eval")).as_py() or 0
    size = sum(row["latents_mib"] for row in bucket_rows.values())
    intro = [
        f"{model.family}, {model.task}, {model.flavour_spec.name}",
        f"{table.active.num_rows - held_out} training samples in {len(bucket_rows)} buckets, {held_out} held out; "
        f"their latents take about {size:.4g} MiB. The pictures are read from the media and cropped as for encoding; "
        "this page does not need encoded samples.",
    ]
    return _render_page(f"Plan {table.plan.name}", intro, list(bucket_rows.values()), sections())


def _describe_features(table: PlanTable) -> dict[str, tuple[str, ...]]:
    """Returns media id -> lines about its features; empty if `features` has not run for the current items."""
    if table.config.features is None:
        return {}
    try:
        _, items = read_media(table.store, table.config)
    except LatentpressError:  # the plan may be older than the items
        return {}
    paths = dict(zip(*(table.plan.sample_table[name].to_pylist() for name in ("media_id", "path")), strict=True))
    lines = {}
    for row in items.to_pylist() if items is not None else ():
        numbers = (f"{name} {float(f'{row[name]:.3g}'):g}" for name in FEATURES if row[name] is not None)
        relations = (("cluster", row["cluster"]), ("near-duplicate", row["duplicate_of"]))
        groups = (f"{relation} of {paths.get(media_id, media_id)}" for relation, media_id in relations if media_id)
        lines[row["media_id"]] = (", ".join(numbers), *groups)
    return lines


def plan_card(
    item: PlanSample, captions: Sequence[str], result: SamplePixels | MediaError, features: Sequence[str] = ()
) -> Card:
    """Make the card of a sample, with small pictures or the reason why it cannot be read."""
    hidden_captions = len(captions) - MAX_CAPTIONS
    problems, galleries, is_clip = [], list[Gallery](), bool(item.times)
    if isinstance(result, MediaError):
        problems = [f"cannot be shown ({result.reason}): {result}"]
    else:
        assert result.uncropped is not None
        versions = {f"cropped to {item.bucket}": [_shrink(frame, is_clip) for frame in result.frames]}
        if result.masked is not None:
            versions["mask: red is not trained"] = [_shrink(frame, is_clip) for frame in result.masked]
        original = _outline(item, encode_picture(result.uncropped, UNCROPPED_BOX))
        if is_clip:
            times = [item.times[index] for index in frame_indices(item.bucket.frames)]
            galleries = [Gallery([original]), _strip(versions, times, item.path)]
        else:
            names = [f"reference {number}" for number in range(1, len(item.references) + 1)] or ["i2i source"]
            sources = {
                f"{name}, cropped": _shrink(condition[0], is_clip)
                for name, condition in zip(names, result.conditions, strict=False)
            }
            pictures = sources | {name: version[0] for name, version in versions.items()}
            galleries = [Gallery([*_side_by_side(pictures, item.path), original])]
    return Card(
        item.name,
        galleries,
        item.marks,
        (*item.facts, *features),
        tuple(map(Caption, captions[:MAX_CAPTIONS])),
        more=f"and {hidden_captions} more" if hidden_captions > 0 else "",
        problems=problems,
        is_full_width=is_clip and not problems,
    )


def _outline(item: PlanSample, picture: Picture) -> Figure:
    """Figure of the full picture, with the rectangle of its crop."""
    geometry, bucket = item.sample["geometry"], item.bucket
    width, height = bucket.width / geometry["resize_w"], bucket.height / geometry["resize_h"]
    left, top = geometry["x"] / geometry["resize_w"], geometry["y"] / geometry["resize_h"]
    cut_share = 1 - width * height
    caption = "full picture, " + (f"{cut_share:.1%} cut off" if cut_share else "nothing cut off")
    crop = left * picture.width, top * picture.height, width * picture.width, height * picture.height
    return Figure((picture,), (f"{item.path}: {caption}",), caption, crop)


def _rule_rows(excluded: pa.Table) -> list[TableRow]:
    rows = summary.count_excluded(excluded)
    for row in rows:
        is_in_dataset = pc.starts_with(excluded["item"], f"{row['dataset']}/")
        is_in_row = pc.and_(pc.equal(excluded["reason"], row["rule"]), is_in_dataset)
        row["example"] = excluded.filter(is_in_row).slice(0, MAX_EXAMPLES)["message"].to_pylist()
    return rows


# -- page of encoded samples -----------------------------------------------------------------------------------------


def psnr(mse: float) -> float:
    """Peak signal-to-noise ratio of 8-bit pixels in dB; infinite if `mse` is 0."""
    return 10 * math.log10(255**2 / mse) if mse else math.inf


def format_psnr(decibels: float) -> str:
    return "identical" if math.isinf(decibels) else f"{decibels:.2f} dB"


def frame_errors(original_THWC: np.ndarray, reconstruction_THWC: np.ndarray) -> np.ndarray:
    """Exact mean squared error of each frame of two uint8 clips, (T,), frame by frame to save memory."""
    assert original_THWC.shape == reconstruction_THWC.shape, (original_THWC.shape, reconstruction_THWC.shape)
    assert original_THWC.dtype == reconstruction_THWC.dtype == np.uint8
    pairs = zip(original_THWC, reconstruction_THWC, strict=True)
    return np.array([np.square(first.astype(np.int32) - second).mean(dtype=np.float64) for first, second in pairs])


def _compare(
    original_THWC: np.ndarray | None,
    reconstruction_THWC: np.ndarray,
    item: PlanSample,
    max_bytes: int,
    description: str = "",
    note: str = "",
) -> tuple[Gallery, np.ndarray]:
    """Compare a sample with its reconstruction. Returns (figures of some frames, mean squared error of each frame).

    original_THWC: uint8 frames, or None if the original cannot be read; the errors are then empty. description: name of
    a condition of the sample, of which only the first frame is shown; "" for the sample. note: text above the figures.
    max_bytes: maximum size of a picture.
    """
    is_clip = bool(item.times)
    indices = [0] if description else frame_indices(len(reconstruction_THWC))
    versions, errors = {"reconstruction": reconstruction_THWC[indices]}, np.array([])
    if original_THWC is not None:
        errors, original = frame_errors(original_THWC, reconstruction_THWC), original_THWC[indices]
        absolute = np.abs(original.astype(np.int16) - versions["reconstruction"])
        amplified = np.minimum(absolute * DIFFERENCE_GAIN, 255).astype(np.uint8)
        versions = {"original": original, **versions, DIFFERENCE: amplified}
    pictures = {name: [_shrink(frame, is_clip, max_bytes) for frame in version] for name, version in versions.items()}
    notes = [format_psnr(psnr(errors[index])) for index in indices] if len(errors) else []
    if is_clip and not description:
        return _strip(pictures, [item.times[index] for index in indices], item.path, notes), errors
    first = {name: version[0] for name, version in pictures.items()}
    figures = _side_by_side(first, description or item.path, {"reconstruction": "".join(notes)})
    return Gallery(figures, note=note), errors


def _render_latents(
    encoded: EncodedPlan,
    autoencoder: Any,
    rows_by_bucket: dict[str, list[int]],
    results: SampleResults,
    report: Report,
    with_samples: bool,
) -> Iterator[bytes]:
    """Render the page in pieces. Samples are decoded one by one, and only their small pictures stay in memory.
    with_samples: whether the numbers of each sample are added to the report."""
    config, pictures = encoded.table.config, 0
    for bucket, rows in rows_by_bucket.items():
        shape = Bucket.parse(bucket)
        conditions = len(shape.references) or config.model.condition is not None
        pictures += 3 * (len(frame_indices(shape.frames)) + conditions) * len(rows)
    limit = MAX_PAGE_BYTES // max(1, pictures)
    samples = [_compare_sample(encoded, autoencoder, item, pixels, limit, report) for item, pixels in results]
    # Samples without a PSNR first, then the lowest PSNR.
    samples.sort(key=lambda row: (-1.0 if math.isnan(row[0]["psnr_db"]) else row[0]["psnr_db"], row[0]["sample_id"]))
    compared_rows = [numbers for numbers, _ in samples if not math.isnan(numbers["psnr_db"])]
    report.done, lowest = len(compared_rows), compared_rows[:MAX_LOWEST]
    keys = ("psnr_db", "bucket", "tokens", "item")
    report.details["lowest_psnr"] = [{key: numbers[key] for key in keys} for numbers in lowest]
    if with_samples:
        report.details["samples"] = [numbers for numbers, _ in samples]
    if any(caption["problem"] == NOT_ENCODED for numbers, _ in samples for caption in numbers["captions"]):
        report.next_steps.append("latentpress encode-text")
    if report.damage:
        report.next_steps.append("latentpress verify --repair")
    for row in report.details["buckets"]:
        values = [numbers["psnr_db"] for numbers in compared_rows if numbers["bucket"] == row["bucket"]]
        row["mean_psnr_db"] = round(sum(values) / len(values), 2) if values else math.nan
        row["lowest_psnr_db"] = min(values, default=math.nan)
    lowest_rows = [
        {"psnr": format_psnr(numbers["psnr_db"]), "bucket": numbers["bucket"]}
        | {"sample": {"text": numbers["item"], "href": f"#sample-{numbers['sample_id']}"}}
        for numbers in lowest
    ]
    sections = [Section("Lowest PSNR", table=lowest_rows)] if lowest_rows else []
    for row in report.details["buckets"]:
        bucket, facts = row["bucket"], {key: value for key, value in row.items() if key != "bucket"}
        cards = [card for numbers, card in samples if numbers["bucket"] == bucket]
        sections.append(Section(bucket, _bucket_anchor(bucket), facts, SECTION_NOTE, cards))
    intro, title = [*_describe_cache(encoded), PSNR_NOTE], f"Latents of plan {encoded.table.plan.name}"
    return _render_page(title, intro, report.details["buckets"], iter(sections))


def _describe_cache(encoded: EncodedPlan) -> Iterator[str]:
    config, count, rejected = encoded.table.config, int(encoded.is_encoded.sum()), int(encoded.is_rejected.sum())
    model = config.model
    posterior = f", {POSTERIOR_NOTES[config.latents.posterior]}" if model.family_spec.posterior else ""
    yield f"{model.family}, {model.task}, {model.flavour_spec.name}; {encoded.folder}{posterior}"
    sentence = f"{count} of {len(encoded.is_encoded)} samples are encoded"
    sentence += f", {rejected} rejected" if rejected else ""
    yield sentence + (
        f"; {encoded.missing_count} are not encoded yet: latentpress encode-latents" if encoded.missing_count else ""
    )


def _compare_sample(
    encoded: EncodedPlan,
    autoencoder: Any,
    item: PlanSample,
    pixels: SamplePixels | MediaError,
    max_bytes: int,
    report: Report,
) -> tuple[TableRow, Card]:
    """Returns (numbers, card). Adds damage to the report."""
    comparisons, problems = list[tuple[Gallery, np.ndarray]](), list[str]()
    original, damage = None, None
    if isinstance(pixels, MediaError):
        problems.append(f"the original cannot be read ({pixels.reason}): {pixels}")
    else:
        original = pixels
    try:
        ids = [item.sample["sample_id"], *(reference["sample_id"] for reference in item.references)]
        latents = [encoded.latents.read(name) for name in ids]
    except LatentpressError as error:
        damage = error
    else:
        try:
            comparisons = list(_decode_all(encoded.table.config, autoencoder, item, original, latents, max_bytes))
        except DamageError as error:
            damage = error
    if damage:
        problems.append(f"cannot be decoded: {damage.message}; {damage.next_step}")
    if isinstance(damage, DamageError):
        row = {"path": damage.path, "row": damage.row, "item": item.name, "reason": "damaged"}
        report.damage.append(row | {"message": damage.reason})
    captions = tuple(map(encoded.caption, item.active_row["texts"]))
    galleries = [gallery for gallery, _ in comparisons]
    errors = [frames for _, frames in comparisons if len(frames)]
    # All frames have the same number of pixels, so this is the mean over all pixels.
    mse = float(errors[0].mean()) if errors else None
    numbers = {
        "psnr_db": math.nan if mse is None else round(psnr(mse), 2),
        "bucket": item.active_row["bucket"],
        "tokens": ", ".join("unknown" if caption.tokens is None else str(caption.tokens) for caption in captions),
        "item": item.name,
        "sample_id": item.active_row["sample_id"],
        "mse": mse,
        "condition_mse": float(np.mean([frames[0] for frames in errors[1:]])) if errors[1:] else None,
        "captions": [asdict(caption) for caption in captions],
        "unread": str(pixels) if isinstance(pixels, MediaError) else "",
        "damage": damage.message if damage else "",
    }
    card = Card(
        item.name,
        galleries,
        item.marks,
        item.facts,
        captions,
        problems=problems,
        score="" if mse is None else format_psnr(psnr(mse)),
        anchor=f"sample-{numbers['sample_id']}",
        is_full_width=True,
    )
    return numbers, card


def _decode_all(
    config: Config,
    autoencoder: Any,
    item: PlanSample,
    original: SamplePixels | None,
    latents: Sequence[tuple[str, Any]],
    max_bytes: int,
) -> Iterator[tuple[Gallery, np.ndarray]]:
    """Yield the results of `_compare` for the sample and for its conditions that have latents: the i2i source, the
    references or the i2v first frame. latents: (path, row) of the sample and of each reference. Raises DamageError."""
    from stages.encoding.vae.base import decode_tensor

    model, is_clip = config.model, bool(item.times)
    (path, row), *references = latents
    parts = [(path, row, "latent", item.bucket, item.bucket.frames)]
    if "condition" in row.tensors:
        size = Bucket.parse((item.sample["source_geometry"] or item.sample["geometry"])["bucket"])
        frames = 1 if model.condition is None else model.condition.frames
        is_padded = model.condition is not None and model.condition.padded
        bucket = Bucket(size.width, size.height, size.frames if is_padded else frames)
        parts.append((path, row, "condition", bucket, frames))
    for reference, (path, row) in zip(item.references, references, strict=True):
        parts.append((path, row, "latent", Bucket.parse(reference["geometry"]["bucket"]), 1))
    originals = [original.frames, *original.conditions][: len(parts)] if original else [None] * len(parts)
    for number, ((path, row, name, bucket, frames), pixels) in enumerate(zip(parts, originals, strict=True)):
        decoded = decode_tensor(model.family_spec, autoencoder, path, row, name, bucket)[:frames]
        source = "source" if len(parts) < 3 else f"source {number}"
        description = f"{'first frame' if is_clip else source} of {item.path}" if number else ""
        note = "The first frame, which is also encoded separately:" if is_clip else f"The i2i {source}:"
        yield _compare(pixels, decoded, item, max_bytes, description, note if number else "")


app = make_app(
    "preview",
    "Make an HTML page that compares encoded samples with their originals, or with --plan shows the samples of a plan.",
    run,
    examples=("--samples 12 --device cuda", "--plan", "--plan --bucket 640x384@29"),
)

if __name__ == "__main__":
    app()
