"""bucket: from media tables to a plan generation: samples, texts, work units, and what is active.

Pure arithmetic over tables (`stages/planning.py`); publishes only what no earlier generation planned, and the whole
list of what is active. Run again with nothing changed, it publishes nothing.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from cache import generations, rejects
from cache.store import Store
from schemas.config import VALIDATION, Config
from schemas.console import Console, Options, Report, program
from schemas.errors import LatentpressError
from schemas.geometry import Bucket, scale_class
from schemas.identity import sample_id
from stages import planning
from stages.discover import media_path, read_media
from stages.media.errors import MediaError
from stages.media.files import hash_file
from stages.plan import side_multiple
from stages.stage import refuse_shard

Row = dict[str, Any]


def run(config: Config, options: Options, console: Console) -> Report:
    refuse_shard(options, "bucket")
    store = Store(config.root)
    multiple = side_multiple(config.model)
    media = {dataset.id: _media(store, dataset.id) for dataset in config.datasets if not dataset.disabled}
    plan = planning.draft(config, media, multiple)
    add_validation(plan, config, multiple)
    report = Report(program="bucket", dry_run=options.dry_run, set_aside=plan.set_aside)
    if not any(row["role"] == "train" for row in plan.active):
        raise LatentpressError(
            "nothing could be trained: " + _why_empty(media, plan.set_aside),
            "add media, or relax the datasets' limits (minimum_image_size, video.min_frames, resolution)",
        )
    known = {kind: generations.planned(store, kind) for kind in ("text", "latents")}
    new_samples = [row for name, row in plan.samples.items() if name not in known["latents"]]
    new_texts = [row for name, row in plan.texts.items() if name not in known["text"]]
    units = planning.sample_units(config, new_samples) + planning.text_units(config, new_texts)
    report.details = _details(config, plan, units)
    _warn_small(config, report.details["buckets"], console)
    _warn_scale(config, report.details["buckets"], console)
    if options.dry_run:
        report.remaining = len(new_samples) + len(new_texts)
        return report
    before = generations.names(store)
    generation = generations.publish(
        store,
        key=planning.plan_key(config, multiple),
        samples=new_samples,
        texts=new_texts,
        units=units,
        active=plan.active,
        info={
            "family": config.model.family,
            "task": config.model.task,
            "template": config.model.template.name,
            "null_text": plan.null_text,
            "validation": plan.validation,
        },
    )
    rejects.write(store, "bucket", config.model.family + "-" + config.model.task, plan.set_aside)
    new = generation.name not in before
    report.done = len(new_samples) + len(new_texts)
    report.skipped = len(plan.samples) + len(plan.texts) - report.done
    report.details["generation"] = generation.name + ("" if new else " (unchanged)")
    return report


def _media(store: Store, dataset: str) -> list[Row]:
    if not store.exists(media_path(dataset)):
        raise LatentpressError(f"dataset {dataset} was not discovered yet", "run `latentpress discover`")
    return read_media(store, dataset)


def add_validation(plan: planning.Draft, config: Config, multiple: int) -> None:
    """Plan the validation prompts and, for i2i and i2v, the image each of them starts from."""
    family, template = config.model.spec, config.model.template
    if not config.validation.prompts:
        return
    bucket = validation_bucket(config, multiple)
    for prompt in config.validation.prompts:
        condition, image = None, None
        if prompt.image is not None and config.model.task in ("i2i", "i2v"):
            sample = _condition(prompt.name, Path(prompt.image), Bucket(bucket.width, bucket.height))
            condition = sample["sample_id"]
            plan.samples.setdefault(condition, sample)
            plan.active.append(_condition_active(sample))
            if template.with_image:
                image = (VALIDATION, prompt.name, sample["media_id"], sample["geometry"])
        negative = family.negative_prompt if prompt.negative_prompt is None else prompt.negative_prompt
        plan.validation.append(
            {
                "name": prompt.name,
                "prompt": prompt.prompt,
                "negative_prompt": negative,
                "text": planning.add_text(plan, config, prompt.prompt, image=image),
                "negative": planning.add_text(plan, config, negative, negative=True, image=image),
                "bucket": str(bucket),
                "condition": condition,
            }
        )


def validation_bucket(config: Config, multiple: int) -> Bucket:
    """validation.size, checked against the model's strides."""
    family = config.model.spec
    if config.validation.size is None:
        edge = max(multiple, round(family.resolution / multiple) * multiple)
        return Bucket(edge, edge, 121 if family.video else 1)
    try:
        bucket = Bucket.parse(config.validation.size)
        bucket.latent_shape(multiple, family.temporal_stride)
    except ValueError as error:
        raise LatentpressError(f"validation.size: {error}", "correct validation.size") from error
    return bucket


def _condition(name: str, path: Path, bucket: Bucket) -> Row:
    from stages.media.image import probe_image

    try:
        found, media_id = probe_image(path), hash_file(path)
    except (MediaError, OSError) as error:
        raise LatentpressError(
            f"validation prompt {name}: its image can't be read: {error}",
            f"correct validation.prompts ({name}).image",
        ) from error
    cut = planning.geometry(found.width, found.height, bucket)
    return {
        "sample_id": sample_id(media_id, cut, None, {}),
        "role": VALIDATION,
        "dataset": VALIDATION,
        "path": name,
        "media_id": media_id,
        "kind": "image",
        "geometry": cut,
        "start": None,
        "rate": None,
        "condition": "none",
        "source_path": None,
        "source_id": None,
        "source_geometry": None,
    }


def _condition_active(sample: Row) -> Row:
    return {
        "sample_id": sample["sample_id"],
        "role": VALIDATION,
        "dataset": VALIDATION,
        "path": sample["path"],
        "source_path": None,
        "bucket": sample["geometry"]["bucket"],
        "repeats": 0,
        "texts": [],
        "null_text": None,
    }


def _details(config: Config, plan: planning.Draft, units: list[Row]) -> Row:
    family = config.model.spec
    buckets = Counter[str]()
    for row in plan.active:
        if row["role"] == "train":
            buckets[row["bucket"]] += 1 + row["repeats"]
    table = []
    for name, count in sorted(buckets.items()):
        bucket = Bucket.parse(name)
        entry: Row = {"bucket": name, "orientation": bucket.orientation, "samples a pass": count}
        if family.video:
            entry["scale class"] = "x".join(f"{part:g}" for part in scale_class(bucket.width, bucket.height))
        table.append(entry)
    return {
        "buckets": table,
        "texts": len(plan.texts),
        "of these null prompts": len({row["null_text"] for row in plan.active if row["null_text"]}) or 1,
        "new units": dict(Counter(unit["kind"] for unit in units)),
        "MiB to come": round(sum(unit["estimated_bytes"] for unit in units) / 2**20, 2),
    }


def _warn_scale(config: Config, buckets: list[Row], console: Console) -> None:
    """Warn where a Lite checkpoint, made for sides of 480 to 854 pixels, gets buckets of the other scale class."""
    if not config.model.spec.video or "lite" not in config.model.chosen.name:
        return
    outside = [row["bucket"] for row in buckets if row["scale class"] != "1x2x2"]
    if outside:
        console.warn(
            f"{config.model.chosen.name} was made for sides of 480 to 854 pixels; outside are {', '.join(outside)}. "
            "Choose a resolution whose buckets are all of scale class 1x2x2"
        )


def _warn_small(config: Config, buckets: list[Row], console: Console) -> None:
    """Warn of each bucket that holds fewer samples a pass than one global batch on one device."""
    batch = config.train.batch_size * config.train.accumulate
    for row in buckets:
        count = row["samples a pass"]
        if count < batch:
            console.warn(
                f"bucket {row['bucket']}: {count} samples a pass, fewer than a global batch of {batch}, so some are "
                f"drawn twice in a batch; repeats: {-(-batch // count) - 1} would do"
            )


def _why_empty(media: dict[str, list[Row]], aside: list[Row]) -> str:
    found = sum(len(rows) for rows in media.values())
    if not found:
        return "no media was found in any dataset"
    reasons = Counter(row["reason"] for row in aside)
    return f"all {found} files were set aside: " + json.dumps(dict(reasons))


app = program("bucket", "Divide media into buckets and plan samples, texts and work units.", run, extra="media")

if __name__ == "__main__":
    app()
