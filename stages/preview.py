"""preview: an HTML page of encoded samples beside their originals.

Shows some samples of each bucket: the original as it was read for encoding, the decoded latents, their PSNR, and the
captions with their tokens. With --plan it shows the current plan instead, before anything is encoded: for each bucket
its row of the table that `bucket` prints, and some of its items as the encoder will get them, read and cropped by the
same functions, in a sandbox.
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
Read = Iterator[tuple[PlanSample, SamplePixels | MediaError]]
MAX_CAPTIONS = 3  # shown of an item of a plan
SHOWN_NUMBERS = ("sharpness", "luminance", "contrast", "motion", "outlier")
MAX_EXAMPLES = 3  # shown of a rule
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
MAX_PAGE_BYTES = 3 << 20  # all pictures of a page of encoded samples


def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    plan: Annotated[
        bool, typer.Option("--plan", help="Show the current plan instead: what would be encoded, and how.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The page.  [default: <output>/preview/latents|plan-<generation>.html]"),
    ] = None,
    items: Annotated[
        int,
        typer.Option("--samples", "--items", min=1, max=100_000, metavar="N", help="Samples to show of each bucket."),
    ] = 6,
    bucket: Annotated[list[str] | None, typer.Option(metavar="WxH@F", help="Only this bucket. Repeatable.")] = None,
) -> Report:
    store = Store(config.root)
    current = current_plan(store, config)
    report = Report(program="preview", dry_run=options.dry_run, details={"generation": current.name})
    table = PlanTable(store, config, current)
    buckets = _select_buckets(table, bucket)
    page = out or Path(config.output) / "preview" / f"{'plan' if plan else 'latents'}-{current.name}.html"
    check_folder(page.parent)
    encoded = None if plan else EncodedPlan(table)
    chosen = table.choose(items, buckets, encoded.is_encoded if encoded else None)
    total = sum(map(len, chosen.values()))
    if encoded:
        report.details["cache"] = encoded.folder
        if encoded.missing_count:
            report.details["not_encoded"] = encoded.missing_count
            report.next_steps.append("latentpress encode-latents")
        if not total:
            where = "" if buckets == table.buckets else f" of {', '.join(buckets)}"
            raise LatentpressError(
                f"no sample{where} of plan {current.name} is encoded yet",
                "run `latentpress encode-latents`; `latentpress preview --plan` shows the plan without it",
            )
    report.details["page"] = str(page)
    report.details["buckets"] = [
        encoded.bucket_row(name, len(rows))
        if encoded
        else {"bucket": name, "samples": table.count(name), "shown": len(rows)}
        for name, rows in chosen.items()
    ]
    if options.dry_run:
        report.remaining = total
        return report
    resources = options.resources(config, "decode" if encoded else "preview")
    all_rows = [row for rows in chosen.values() for row in rows]
    _require_media(table, all_rows)
    autoencoder = _load_autoencoder(config, resources) if encoded else None
    with (
        console.progress(total, "preview", "samples") as progress,
        closing(read_samples(table, all_rows, resources.workers, with_uncropped=plan)) as results,
    ):
        read = _count_read(results, report, progress)
        pieces = (
            _render_latents(encoded, autoencoder, chosen, read, report, with_samples=options.json)
            if encoded
            else _render_plan(table, chosen, read, report)
        )
        with explained(str(page)), replacing(page) as temporary, temporary.open("wb") as file:
            size = sum(map(file.write, pieces))
    report.details["written_mib"] = round(size / 2**20, 2)
    return report


def _select_buckets(table: PlanTable, names: list[str] | None) -> list[str]:
    """The buckets of the plan with these names, by default all."""
    has = ", ".join(table.buckets)
    try:
        requested = {str(Bucket.parse(text)) for text in names or table.buckets}
    except ValueError as error:
        raise UsageError(f"--bucket: {error}", f"the plan has {has}") from error
    if unknown := requested.difference(table.buckets):
        raise UsageError(f"--bucket: the plan has no {min(unknown)}", f"it has {has}")
    return [name for name in table.buckets if name in requested]


def _require_media(table: PlanTable, rows: list[int]) -> None:
    samples = table.active["sample_id"].take(pa.array(rows, pa.int64())).combine_chunks()
    probed = media_locations.select_probed_members(table.plan, "latents", samples)
    media_locations.require_media(table.locations, "latents", probed)


def _load_autoencoder(config: Config, resources: StageWorkers) -> Any:
    missing = [name for name in ("torch", "diffusers") if find_spec(name) is None]
    if missing:
        raise LatentpressError(
            f"decoding latents needs the library {missing[0]!r}: not found",
            f"Install it with: {install_command('encode')}; `latentpress preview --plan` works without it",
        )
    with activity("loading torch and the autoencoder's code", at_once=True):
        from stages.encoding import model_loading
        from stages.encoding.vae.base import load_autoencoder
    return load_autoencoder(config.model, config.latents, model_loading.select_device(resources))


def _count_read(results: Read, report: Report, progress: Progress) -> Read:
    """Add what can't be read to the report."""
    for item, pixels in results:
        if isinstance(pixels, MediaError):
            row = rejects.make_reject("preview", item.name, item.path, pixels.reason, str(pixels))
            report.set_aside.append(row)
        yield item, pixels
        progress.advance(1)


def _render_page(title: str, intro: Sequence[str], rows: Sequence[TableRow], sections: Iterator[Section]) -> Any:
    """The page in pieces. rows: the table of buckets, each of which leads to its section."""
    links = [{"text": row["bucket"], "href": f"#{_bucket_anchor(row['bucket'])}"} for row in rows]
    buckets = [row | {"bucket": link} for row, link in zip(rows, links, strict=True)]
    return render_template("preview.html", title=title, intro=intro, buckets=buckets, sections=sections)


def _bucket_anchor(bucket: str) -> str:
    return f"bucket-{bucket.replace('@', '-')}"


def _shrink(pixels_HWC: np.ndarray, is_clip: bool, max_bytes: float = math.inf) -> Picture:
    return encode_picture(pixels_HWC, FRAME_BOX if is_clip else IMAGE_BOX, max_bytes)


def _side_by_side(pictures: Mapping[str, Picture], about: str, notes: Mapping[str, str] | None = None) -> list[Figure]:
    """A figure for each picture by its name. notes: what follows a name."""
    notes = notes or {}
    return [
        Figure((picture,), (f"{name}: {about}",), ", ".join(filter(None, [name, notes.get(name)])))
        for name, picture in pictures.items()
    ]


def _strip(
    versions: Mapping[str, Sequence[Picture]], times: Sequence[float], path: str, notes: Sequence[str] = ()
) -> Gallery:
    """The shown frames of a clip, the versions of each from top to bottom. notes: what follows the time of each."""
    figures = []
    for number, pictures in enumerate(zip(*versions.values(), strict=True)):
        time, note = f"{times[number]:.2f} s", notes[number] if notes else ""
        alts = tuple(f"{name}: {time} of {path}" for name in versions)
        figures.append(Figure(pictures, alts, ", ".join(filter(None, [time, note]))))
    note = f"From top to bottom: {', '.join(versions)}." if len(versions) > 1 else ""
    return Gallery(figures, "frames", note)


# -- the plan, before anything is encoded ----------------------------------------------------------------------------


def _render_plan(table: PlanTable, chosen: dict[str, list[int]], read: Read, report: Report) -> Iterator[bytes]:
    """The page in pieces; items are read as they are rendered."""
    config, rows = table.config, {row["bucket"]: row for row in table.bucket_rows()}
    measured, model = _describe_items(table), config.model

    def cards(results: Read) -> Iterator[Card]:
        for item, result in results:
            report.done += isinstance(result, SamplePixels)
            captions = [table.plan.texts[name]["text"] for name in item.active_row["texts"]]
            yield plan_card(item, captions, result, measured.get(item.sample["media_id"], ()))

    def sections() -> Iterator[Section]:
        for bucket, indices in chosen.items():
            note = f"{len(indices)} of {table.count(bucket)} samples"
            note += f"; {count} of the bucket are held out" if (count := table.count(bucket, "eval")) else ""
            facts = {key: value for key, value in rows.get(bucket, {}).items() if key != "bucket"}
            yield Section(bucket, _bucket_anchor(bucket), facts, note, cards(islice(read, len(indices))))
        note = "Items that a rule of the last bucket run dropped."
        yield Section("Excluded by bucket", note=note, table=_rule_rows(excluded), look="texts")
        note = "Items that discover set aside; no plan contains them."
        yield Section("Set aside by discover", note=note, table=_rule_rows(set_aside), look="texts")

    used = [dataset.id for dataset in config.datasets if not dataset.disabled]
    excluded = rejects.read_list(table.store, "bucket", f"{model.family}-{model.task}")
    set_aside = pa.concat_tables([rejects.read_list(table.store, "discover", name) for name in used])
    held_out = pc.sum(pc.equal(table.active["role"], "eval")).as_py() or 0
    size = sum(row["latents_mib"] for row in rows.values())
    intro = [
        f"{model.family}, {model.task}, {model.flavour_spec.name}",
        f"{table.active.num_rows - held_out} training samples in {len(rows)} buckets, {held_out} held out; "
        f"their latents take about {size:.4g} MiB. The pictures are read from the media and cropped as for encoding; "
        "nothing has to be encoded yet.",
    ]
    return _render_page(f"Plan {table.plan.name}", intro, list(rows.values()), sections())


def _describe_items(table: PlanTable) -> dict[str, tuple[str, ...]]:
    """Media id -> lines of what `features` says of it; empty where it has not run for the present items."""
    if table.config.features is None:
        return {}
    try:
        _, items = read_media(table.store, table.config)
    except LatentpressError:  # the plan may be older than the items
        return {}
    paths = dict(zip(*(table.plan.sample_table[name].to_pylist() for name in ("media_id", "path")), strict=True))
    described = {}
    for row in items.to_pylist() if items is not None else ():
        numbers = (f"{name} {float(f'{row[name]:.3g}'):g}" for name in SHOWN_NUMBERS if row[name] is not None)
        labels = (("cluster", row["cluster"]), ("near-duplicate", row["duplicate_of"]))
        others = (f"{what} of {paths.get(other, other)}" for what, other in labels if other)
        described[row["media_id"]] = (", ".join(numbers), *others)
    return described


def plan_card(
    item: PlanSample, captions: Sequence[str], result: SamplePixels | MediaError, measured: Sequence[str] = ()
) -> Card:
    """A sample with its small pictures, or why there are none."""
    left = len(captions) - MAX_CAPTIONS
    problems, galleries, is_clip = [], list[Gallery](), bool(item.times)
    if isinstance(result, MediaError):
        problems = [f"can't be shown ({result.reason}): {result}"]
    else:
        assert result.uncropped is not None
        versions = {f"cropped to {item.bucket}": [_shrink(frame, is_clip) for frame in result.frames]}
        if result.masked is not None:
            versions["mask: red is not trained"] = [_shrink(frame, is_clip) for frame in result.masked]
        whole = _outline(item, encode_picture(result.uncropped, UNCROPPED_BOX))
        if is_clip:
            times = [item.times[index] for index in frame_indices(item.bucket.frames)]
            galleries = [Gallery([whole]), _strip(versions, times, item.path)]
        else:
            names = [f"reference {number}" for number in range(1, len(item.references) + 1)] or ["i2i source"]
            sources = {
                f"{name}, cropped": _shrink(condition[0], is_clip)
                for name, condition in zip(names, result.conditions, strict=False)
            }
            pictures = sources | {name: version[0] for name, version in versions.items()}
            galleries = [Gallery([*_side_by_side(pictures, item.path), whole])]
    return Card(
        item.name,
        galleries,
        item.marks,
        (*item.facts, *measured),
        tuple(map(Caption, captions[:MAX_CAPTIONS])),
        more=f"and {left} more" if left > 0 else "",
        problems=problems,
        is_full_width=is_clip and not problems,
    )


def _outline(item: PlanSample, picture: Picture) -> Figure:
    """The whole picture with its crop."""
    geometry, bucket = item.sample["geometry"], item.bucket
    width, height = bucket.width / geometry["resize_w"], bucket.height / geometry["resize_h"]
    left, top = geometry["x"] / geometry["resize_w"], geometry["y"] / geometry["resize_h"]
    lost = 1 - width * height
    caption = "whole picture, " + (f"{lost:.1%} cut off" if lost else "nothing cut off")
    crop = left * picture.width, top * picture.height, width * picture.width, height * picture.height
    return Figure((picture,), (f"{item.path}: {caption}",), caption, crop)


def _rule_rows(excluded: pa.Table) -> list[TableRow]:
    rows = summary.count_excluded(excluded)
    for row in rows:
        of_dataset = pc.starts_with(excluded["item"], f"{row['dataset']}/")
        dropped = pc.and_(pc.equal(excluded["reason"], row["rule"]), of_dataset)
        row["example"] = excluded.filter(dropped).slice(0, MAX_EXAMPLES)["message"].to_pylist()
    return rows


# -- what is encoded, beside its originals ---------------------------------------------------------------------------


def psnr(mse: float) -> float:
    """Peak signal-to-noise ratio in dB of 8-bit pixels; infinite for identical ones."""
    return 10 * math.log10(255**2 / mse) if mse else math.inf


def format_psnr(decibels: float) -> str:
    return "identical" if math.isinf(decibels) else f"{decibels:.2f} dB"


def frame_errors(original_THWC: np.ndarray, reconstruction_THWC: np.ndarray) -> np.ndarray:
    """(T,) the mean squared error of each frame of two uint8 clips, exact; a frame at a time, which bounds memory."""
    assert original_THWC.shape == reconstruction_THWC.shape, (original_THWC.shape, reconstruction_THWC.shape)
    assert original_THWC.dtype == reconstruction_THWC.dtype == np.uint8
    pairs = zip(original_THWC, reconstruction_THWC, strict=True)
    return np.array([np.square(first.astype(np.int32) - second).mean(dtype=np.float64) for first, second in pairs])


def _compare(
    original_THWC: np.ndarray | None,
    reconstruction_THWC: np.ndarray,
    item: PlanSample,
    max_bytes: int,
    about: str = "",
    note: str = "",
) -> tuple[Gallery, np.ndarray]:
    """Some frames of a sample beside its reconstruction, both uint8, and the mean squared error of all frames, none if
    the original can't be read. about: of a condition of the sample, of which the first frame is shown. max_bytes: size
    limit of each picture."""
    is_clip = bool(item.times)
    shown = [0] if about else frame_indices(len(reconstruction_THWC))
    versions, errors = {"reconstruction": reconstruction_THWC[shown]}, np.array([])
    if original_THWC is not None:
        errors, original = frame_errors(original_THWC, reconstruction_THWC), original_THWC[shown]
        absolute = np.abs(original.astype(np.int16) - versions["reconstruction"])
        amplified = np.minimum(absolute * DIFFERENCE_GAIN, 255).astype(np.uint8)
        versions = {"original": original, **versions, DIFFERENCE: amplified}
    pictures = {name: [_shrink(frame, is_clip, max_bytes) for frame in version] for name, version in versions.items()}
    notes = [format_psnr(psnr(errors[index])) for index in shown] if len(errors) else []
    if is_clip and not about:
        return _strip(pictures, [item.times[index] for index in shown], item.path, notes), errors
    first = {name: version[0] for name, version in pictures.items()}
    figures = _side_by_side(first, about or item.path, {"reconstruction": "".join(notes)})
    return Gallery(figures, note=note), errors


def _render_latents(
    encoded: EncodedPlan, autoencoder: Any, chosen: dict[str, list[int]], read: Read, report: Report, with_samples: bool
) -> Iterator[bytes]:
    """The page in pieces. Samples are decoded one at a time, and only small pictures of each stay in memory.
    with_samples: add the numbers of each sample to the report."""
    config, pictures = encoded.table.config, 0
    for bucket, indices in chosen.items():
        shape = Bucket.parse(bucket)
        given = len(shape.references) or config.model.condition is not None
        pictures += 3 * (len(frame_indices(shape.frames)) + given) * len(indices)
    limit = MAX_PAGE_BYTES // max(1, pictures)
    found = [_compare_sample(encoded, autoencoder, item, pixels, limit, report) for item, pixels in read]
    # Samples without a PSNR first, then the lowest PSNR.
    found.sort(key=lambda one: (-1.0 if math.isnan(one[0]["psnr_db"]) else one[0]["psnr_db"], one[0]["sample_id"]))
    compared = [numbers for numbers, _ in found if not math.isnan(numbers["psnr_db"])]
    report.done, lowest = len(compared), compared[:MAX_LOWEST]
    keys = ("psnr_db", "bucket", "tokens", "item")
    report.details["lowest_psnr"] = [{key: numbers[key] for key in keys} for numbers in lowest]
    if with_samples:
        report.details["samples"] = [numbers for numbers, _ in found]
    if any(caption["problem"] == NOT_ENCODED for numbers, _ in found for caption in numbers["captions"]):
        report.next_steps.append("latentpress encode-text")
    if report.damage:
        report.next_steps.append("latentpress verify --repair")
    for row in report.details["buckets"]:
        values = [numbers["psnr_db"] for numbers in compared if numbers["bucket"] == row["bucket"]]
        row["mean_psnr_db"] = round(sum(values) / len(values), 2) if values else math.nan
        row["lowest_psnr_db"] = min(values, default=math.nan)
    rows = [
        {"psnr": format_psnr(numbers["psnr_db"]), "bucket": numbers["bucket"]}
        | {"sample": {"text": numbers["item"], "href": f"#sample-{numbers['sample_id']}"}}
        for numbers in lowest
    ]
    sections = [Section("Lowest PSNR", table=rows)] if rows else []
    for row in report.details["buckets"]:
        bucket, facts = row["bucket"], {key: value for key, value in row.items() if key != "bucket"}
        cards = [card for numbers, card in found if numbers["bucket"] == bucket]
        sections.append(Section(bucket, _bucket_anchor(bucket), facts, SECTION_NOTE, cards))
    intro, title = [*_describe_cache(encoded), PSNR_NOTE], f"Latents of plan {encoded.table.plan.name}"
    return _render_page(title, intro, report.details["buckets"], iter(sections))


def _describe_cache(encoded: EncodedPlan) -> Iterator[str]:
    config, count, rejected_count = encoded.table.config, int(encoded.is_encoded.sum()), int(encoded.is_rejected.sum())
    model = config.model
    posterior = f", {POSTERIOR_NOTES[config.latents.posterior]}" if model.family_spec.posterior else ""
    yield f"{model.family}, {model.task}, {model.flavour_spec.name}; {encoded.folder}{posterior}"
    sentence = f"{count} of {len(encoded.is_encoded)} samples are encoded"
    sentence += f", {rejected_count} rejected" if rejected_count else ""
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
    """(numbers, card); damage is added to the report."""
    compared, problems = list[tuple[Gallery, np.ndarray]](), list[str]()
    original, damage = None, None
    if isinstance(pixels, MediaError):
        problems.append(f"no original to compare with ({pixels.reason}): {pixels}")
    else:
        original = pixels
    try:
        ids = [item.sample["sample_id"], *(reference["sample_id"] for reference in item.references)]
        stored = [encoded.latents.read(name) for name in ids]
    except LatentpressError as error:
        damage = error
    else:
        try:
            compared = list(_decode_all(encoded.table.config, autoencoder, item, original, stored, max_bytes))
        except DamageError as error:
            damage = error
    if damage:
        problems.append(f"can't be decoded: {damage.message}; {damage.next_step}")
    if isinstance(damage, DamageError):
        row = {"path": damage.path, "row": damage.row, "item": item.name, "reason": "damaged"}
        report.damage.append(row | {"message": damage.reason})
    captions = tuple(map(encoded.caption, item.active_row["texts"]))
    galleries = [gallery for gallery, _ in compared]
    errors = [frames for _, frames in compared if len(frames)]
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
    stored: Sequence[tuple[str, Any]],
    max_bytes: int,
) -> Iterator[tuple[Gallery, np.ndarray]]:
    """`_compare` of the sample, and of its conditions that have latents of their own: the i2i source, the references or
    the i2v first frame. stored: rows of the sample and of its references. DamageError if one is damaged."""
    from stages.encoding.vae.base import decode_tensor

    model, is_clip = config.model, bool(item.times)
    (path, row), *references = stored
    parts = [(path, row, "latent", item.bucket, item.bucket.frames)]
    if "condition" in row.tensors:
        size = Bucket.parse((item.sample["source_geometry"] or item.sample["geometry"])["bucket"])
        given = 1 if model.condition is None else model.condition.frames
        padded = model.condition is not None and model.condition.padded
        bucket = Bucket(size.width, size.height, size.frames if padded else given)
        parts.append((path, row, "condition", bucket, given))
    for reference, (path, row) in zip(item.references, references, strict=True):
        parts.append((path, row, "latent", Bucket.parse(reference["geometry"]["bucket"]), 1))
    wanted = [original.frames, *original.conditions][: len(parts)] if original else [None] * len(parts)
    for number, ((path, row, name, bucket, frames), pixels) in enumerate(zip(parts, wanted, strict=True)):
        decoded = decode_tensor(model.family_spec, autoencoder, path, row, name, bucket)[:frames]
        source = "source" if len(parts) < 3 else f"source {number}"
        about = f"{'first frame' if is_clip else source} of {item.path}" if number else ""
        note = "The first frame, which is also encoded alone:" if is_clip else f"The i2i {source}:"
        yield _compare(pixels, decoded, item, max_bytes, about, note if number else "")


app = make_app(
    "preview",
    "Show encoded samples beside their originals, or with --plan what would be encoded, as an HTML page.",
    run,
    examples=("--samples 12 --device cuda", "--plan", "--plan --bucket 640x384@29"),
)

if __name__ == "__main__":
    app()
