"""The samples of a plan, for pages: which samples are shown, how each is cropped, whether it is encoded, and its pixels
as the encoder gets them, read in sandboxed processes."""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache.sets.plans import Plan
from cache.shards.shard import ShardRow
from cache.shards.shard_io import ReaderPool
from cache.store.store import Store
from schemas.clips import clip_times
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.family import SOURCE_ROLES
from schemas.geometry import Bucket, Crop, aspect_distortion, cropped_share
from schemas.tables import MADE
from stages.discovery.media_locations import MediaLocations
from stages.discovery.media_table import read_media_table
from stages.encoding import stage_registry
from stages.encoding.stage import EncodingStage
from stages.engines.sandbox import SandboxPool, WorkerFailure
from stages.media.files import MediaError, MediaPath, require_unchanged, unreadable_error
from stages.pages.html import Caption
from stages.planning import summary
from stages.planning.plan_builder import crop_statistics

TableRow = dict[str, Any]
StoredRow = tuple[str, ShardRow]  # path of the shard, row
MAX_OPEN_SHARDS = 16
NOT_ENCODED = "not encoded yet"
MAX_SHOWN_FRAMES = 9  # frames of a clip; 1 + 8, because most clips have 1 + 8n frames
UNCROPPED_BOX = (240, 160)  # largest width and height of the picture of a whole item, in pixels
MASK_TINT = (214, 40, 40)  # color of the parts that are not trained on


class PlanTable:
    """The n samples of a plan, without validation samples.

    active: table of n rows of ACTIVE_SCHEMA. shapes: table of n rows: "width" and "height" of the item as displayed,
    null if the media table no longer has the item; "lost" and "stretched", the share that is cut off and the change of
    aspect, null if the size is not known. samples: table of the active samples, including validation samples, with the
    columns from which sizes are computed. locations: locations of the samples' files.
    """

    def __init__(self, store: Store, config: Config, plan: Plan) -> None:
        self.store, self.config, self.plan = store, config, plan
        self.locations = MediaLocations(config, plan)
        self.active = summary.only_trained(plan.active).combine_chunks()
        samples = plan.sample_table.select(["sample_id", "media_id", "geometry", "condition", "mask_id"])
        self.samples = samples.filter(pc.is_in(samples["sample_id"], value_set=plan.active_sample_ids))
        numbers = pc.index_in(self.active["sample_id"], value_set=samples["sample_id"].combine_chunks())
        if numbers.null_count:
            raise LatentpressError(
                f"plan {plan.name} has {numbers.null_count} samples without a description: an older plan was removed",
                "run `latentpress bucket` to plan them again",
            )
        media_id, geometry = samples["media_id"].take(numbers), samples["geometry"].take(numbers).combine_chunks()
        columns = ["path", "media_id", "width", "height"]
        media = [self.active.select(["path", "dataset"]).slice(0, 0)]
        for dataset in pc.unique(self.active["dataset"]).to_pylist():
            with suppress(LatentpressError):  # the dataset was removed; the plan and perhaps the files remain
                table = read_media_table(store, dataset).select(columns)
                media.append(table.append_column("dataset", pa.array([dataset] * len(table), pa.string())))
        rows = self.active.select(["dataset", "path"]).append_column("media_id", media_id)
        rows = rows.append_column("row", pa.array(np.arange(len(rows))))
        listed = pa.concat_tables(media, promote_options="default")
        rows = rows.join(listed, ["dataset", "path", "media_id"]) if len(media) > 1 else rows
        self.shapes = _measure_crops(rows.sort_by("row"), geometry)

    @property
    def buckets(self) -> list[str]:
        return sorted(pc.unique(self.active["bucket"]).to_pylist())

    def count(self, bucket: str, role: str | None = None) -> int:
        rows = self.active.filter(pc.equal(self.active["bucket"], bucket))
        return len(rows) if role is None else len(rows.filter(pc.equal(rows["role"], role)))

    def choose(self, count: int, buckets: Sequence[str], candidates: np.ndarray | None = None) -> dict[str, list[int]]:
        """Choose samples: bucket -> row numbers of `active`, at most `count` each. The samples with the lowest ids are
        chosen: since ids are hashes, this is a random choice that changes little when data is added.

        candidates: (n,) bool, which rows may be chosen.
        """
        table = self.active.select(["bucket", "sample_id"])
        table = table.append_column("row", pa.array(np.arange(len(table))))
        table = table if candidates is None else table.filter(pa.array(candidates))
        # Two files with the same bytes have the same id.
        table = table.group_by(["bucket", "sample_id"]).aggregate([("row", "min")]).sort_by("sample_id")
        bucket_rows = {name: table.filter(pc.equal(table["bucket"], name)) for name in buckets}
        return {name: rows.slice(0, count)["row_min"].to_pylist() for name, rows in bucket_rows.items()}

    def bucket_rows(self) -> list[TableRow]:
        """The table of buckets as `latentpress bucket` prints it, from the plan and the media tables."""
        shapes = self.shapes.append_column("bucket", self.active["bucket"])
        shapes = shapes.filter(pc.is_valid(shapes["width"]))
        crops = crop_statistics(shapes["bucket"], *(shapes[name].to_numpy() for name in ("stretched", "lost")))
        model, latents = self.config.model, self.config.latents
        return summary.bucket_table(model, latents, self.active, self.samples, crops)


def _measure_crops(rows: pa.Table, geometry: pa.StructArray) -> pa.Table:
    """Make the table `PlanTable.shapes`. rows: table with the columns "width" and "height", unless no size is known.
    geometry: geometries of the rows."""
    unknown = pa.nulls(len(rows), pa.int32())
    sides = [rows[name] if name in rows.column_names else unknown for name in ("width", "height")]
    width, height = (np.asarray(pc.fill_null(side, 1)) for side in sides)  # the results of unknown sizes are not used
    crop = Crop(*(np.asarray(geometry.field(name)).astype(np.int64) for name in ("resize_w", "resize_h", "x", "y")))
    coded = geometry.field("bucket").dictionary_encode()
    buckets = [Bucket.parse(name) for name in coded.dictionary.to_pylist()]
    size = np.array([(bucket.width, bucket.height) for bucket in buckets], np.int64).reshape(-1, 2)
    shares = cropped_share(crop, *size[np.asarray(coded.indices)].T), aspect_distortion(width, height, crop)
    is_known = pc.is_valid(sides[0])
    measured = [pc.if_else(is_known, pa.array(share), None) for share in shares]
    return pa.table([*sides, *measured], ["width", "height", "lost", "stretched"])


class StageShards:
    """The shards of one stage. members: ids of the items in encoded units. rejects: ids of rejected items, which do not
    have a row."""

    def __init__(self, table: PlanTable, stage: EncodingStage, readers: ReaderPool) -> None:
        state = stage.state(table.store, table.config, table.plan)
        units = [unit for unit in state.units if unit.unit_id in state.shard_paths]
        self.members = pa.array((name for unit in units for name in unit.members), pa.string())
        self.rejects = pa.array([row["item"] for row in state.rejected_members], pa.string())
        self._paths = [state.shard_paths[unit.unit_id] for unit in units for _ in unit.members]
        self._store, self._readers = table.store, readers

    def read(self, name: str) -> StoredRow:
        """The stored row of an item. Raises LatentpressError if the item is not encoded or was rejected, DamageError if
        its shard is damaged. name: id of the item."""
        index = pc.index(self.members, name).as_py()
        if index < 0:
            raise LatentpressError(NOT_ENCODED, "run the stage that encodes it")
        meta = self._readers.meta(path := self._paths[index])
        if name in meta.ids:
            return self._store.path(path), self._readers.read(path, meta.ids.index(name))
        reason = next((f": {member.message}" for member in meta.rejects if member.id == name), "")
        raise LatentpressError(f"it was rejected when its unit was encoded{reason}")


class EncodedPlan:
    """The encoded samples and texts of a plan.

    is_encoded, is_rejected: (n,) bool, whether a row of `table.active` is encoded, or rejected. missing_count: number
    of samples that are neither encoded nor rejected. folder: folder of the latents' shards in the root.
    """

    def __init__(self, table: PlanTable) -> None:
        readers, ids = ReaderPool(table.store, MAX_OPEN_SHARDS), table.active["sample_id"]
        self.table = table
        self.folder = f"latents/{stage_registry.LATENTS.fingerprint(table.config)}"
        self.latents = StageShards(table, stage_registry.LATENTS, readers)
        self.texts = StageShards(table, stage_registry.TEXT, readers)
        self.is_rejected = pc.is_in(ids, value_set=self.latents.rejects).to_numpy()
        self.is_encoded = pc.is_in(ids, value_set=self.latents.members).to_numpy() & ~self.is_rejected
        self.missing_count = int((~self.is_encoded & ~self.is_rejected).sum())

    def bucket_row(self, bucket: str, shown_count: int) -> TableRow:
        """A bucket's row of the table of encoded samples. shown_count: number of samples on the page."""
        in_bucket = pc.equal(self.table.active["bucket"], bucket).to_numpy()
        encoded = int(self.is_encoded[in_bucket].sum())
        return {"bucket": bucket, "samples": int(in_bucket.sum()), "encoded": encoded, "shown": shown_count}

    def caption(self, name: str) -> Caption:
        """A text and its number of tokens. name: id of the text."""
        text = self.table.plan.texts[name]["text"]
        try:
            _, row = self.texts.read(name)
        except LatentpressError as error:
            return Caption(text, problem=error.message)
        return Caption(text, row.info["tokens"], row.info["kept"])


@dataclass(frozen=True)
class PlanSample:
    """A sample on a page. active_row, sample, shape: the sample's rows of ACTIVE_SCHEMA, SAMPLES_SCHEMA and
    `PlanTable.shapes`. references: rows of SAMPLES_SCHEMA, for the sample's reference images."""

    active_row: TableRow
    sample: TableRow
    shape: TableRow
    references: tuple[TableRow, ...] = ()

    @property
    def path(self) -> str:
        return self.active_row["path"]

    @property
    def name(self) -> str:
        return f"{self.active_row['dataset']}/{self.path}"

    @property
    def times(self) -> list[float]:
        """The times of a clip's frames in seconds; empty for an image."""
        if self.sample["kind"] != "video":
            return []
        return clip_times(self.sample["start"], self.sample["rate"], self.bucket.frames)

    @property
    def bucket(self) -> Bucket:
        return Bucket.parse(self.sample["geometry"]["bucket"])

    @property
    def facts(self) -> tuple[str, ...]:
        """Lines about the sample: geometry, times, source image, references and mask."""
        geometry, row, shape, times = self.sample["geometry"], self.active_row, self.shape, self.times
        size = "{width}x{height}".format(**shape) if shape["width"] else "size not known any more"
        resized = "resized to {resize_w}x{resize_h}, cropped at ({x}, {y})".format(**geometry)
        facts = [f"{size} → {self.bucket}: {resized}"]
        if shape["width"]:
            facts.append(f"{shape['lost']:.1%} cut off, stretched by {shape['stretched']:.1%}")
        if times:
            span = f"from {times[0]:.2f} to {times[-1]:.2f} s"
            facts.append(f"{self.bucket.frames} frames at {self.sample['rate']:g} per second, {span}")
        if self.sample["condition"] == "source":
            facts.append(f"source: {row['source_path']}")
        for number, reference in enumerate(self.references, 1):
            facts.append(f"reference {number}: {reference['path']} → {reference['geometry']['bucket']}")
        if self.sample["mask_id"]:
            facts.append(f"mask: {'made by a model' if self.sample.get('mask_kind') == MADE else row['mask_path']}")
        return tuple(facts)

    @property
    def marks(self) -> tuple[str, ...]:
        """Labels for the sample's special properties, such as "held out"."""
        row, geometry = self.active_row, self.sample["geometry"]
        width, height = self.shape["width"], self.shape["height"]
        marks = {
            "held out": row["role"] == "eval",
            "regularization": row["regularization"],
            f"repeats {row['repeats']}": row["repeats"],
            f"weight {row['weight']:g}": row["weight"] != 1,
            "starts from its first frame": self.sample["condition"] == "first-frame",
            "enlarged": width and (geometry["resize_w"] > width or geometry["resize_h"] > height),
        }
        return tuple(mark for mark, applies in marks.items() if applies)


@dataclass(frozen=True)
class SampleTask:
    """A sample to read.

    sample: the sample's row of SAMPLES_SCHEMA. files: role ("media", "source", "mask"; for references the roles of
    SOURCE_ROLES in order) -> file and the media id with which it was planned. condition_frames: number of frames at the
    start of a clip that condition the model. crops: geometries of the source image or the references. uncropped_size:
    (width, height) of the picture of the whole item, for a page; None to read all frames, without masks.
    """

    sample: TableRow
    files: dict[str, tuple[MediaPath, str]]
    decoder: str
    condition_frames: int
    crops: tuple[TableRow, ...]
    uncropped_size: tuple[int, int] | None


@dataclass(frozen=True)
class SamplePixels:
    """uint8 pixels as the encoder gets them. frames: (T, H, W, 3). conditions: the source image, the references or the
    first frames, (F, H, W, 3) each; empty if the sample is not conditioned on images.

    For a task with `uncropped_size`, frames has only the frames of `frame_indices`; masked has the same frames with the
    mask drawn over them, None without a mask; uncropped is the whole image or first frame.
    """

    frames: np.ndarray
    conditions: tuple[np.ndarray, ...]
    masked: np.ndarray | None = None
    uncropped: np.ndarray | None = None


def frame_indices(count: int) -> list[int]:
    """Choose at most MAX_SHOWN_FRAMES of `count` frames, evenly spaced, including the first and the last frame."""
    return np.unique(np.rint(np.linspace(0, count - 1, min(MAX_SHOWN_FRAMES, count)))).astype(int).tolist()


def read_sample(task: SampleTask) -> SamplePixels:
    """Read the pixels of a sample. Raises MediaError if a file can't be read or has changed since it was planned."""
    from stages.media.sample_reader import read_cropped_image, read_sample_frames, read_sample_mask

    path, sample = task.files["media"][0], task.sample
    try:
        for file, media_id in task.files.values():
            require_unchanged(file, media_id)
        frames = read_sample_frames(path, sample, task.decoder)
        conditions = [frames[: task.condition_frames]] if sample["condition"] == "first-frame" else []
        for role, crop in zip(SOURCE_ROLES, task.crops, strict=False):
            conditions.append(read_cropped_image(task.files[role][0], crop)[None])
        if task.uncropped_size is None:
            return SamplePixels(frames, tuple(conditions))
        width, height = task.uncropped_size
        full = {"bucket": f"{width}x{height}@1", "resize_w": width, "resize_h": height, "x": 0, "y": 0}
        uncropped = read_sample_frames(path, sample | {"geometry": full}, task.decoder)[0]
        indices, masked, times = frame_indices(len(frames)), None, list[float]()
        if sample["kind"] == "video":
            times = clip_times(sample["start"], sample["rate"], len(frames))
        frames = frames[indices]
        if "mask" in task.files:
            kind, geometry = sample["mask_kind"], sample["mask_geometry"]
            at = indices if kind == MADE else [times[index] for index in indices] if times else []
            trained = read_sample_mask(task.files["mask"][0], kind, geometry, at)[..., None] / np.float32(255)
            tinted = frames * np.float32(0.35) + np.array(MASK_TINT, np.float32) * np.float32(0.65)
            masked = (frames * trained + tinted * (1 - trained)).astype(np.uint8)
        return SamplePixels(frames, tuple(conditions), masked, uncropped)
    except OSError as error:
        raise unreadable_error(path, error) from error


def _make_reader() -> Callable[[SampleTask], SamplePixels]:
    return read_sample


def read_samples(
    table: PlanTable, rows: Iterable[int], workers: int, with_uncropped: bool = False
) -> Generator[tuple[PlanSample, SamplePixels | MediaError]]:
    """Yield samples with their pixels, or with the error if they can't be read. Worker processes read ahead. rows: row
    numbers of `table.active`. with_uncropped: read the whole item and the mask too, but only some frames of a clip."""
    opened = [_open_sample(table, row, with_uncropped) for row in rows]
    with SandboxPool.configured(_make_reader, workers, table.config.stages) as pool:
        results = pool.map(task for _, task in opened if isinstance(task, SampleTask))
        for item, task in opened:
            result = next(results)[1] if isinstance(task, SampleTask) else task
            yield item, result.error(item.path) if isinstance(result, WorkerFailure) else result


def _open_sample(table: PlanTable, row: int, with_uncropped: bool) -> tuple[PlanSample, SampleTask | MediaError]:
    active_row, shape = (columns.slice(row, 1).to_pylist()[0] for columns in (table.active, table.shapes))
    sample, config = table.plan.samples[active_row["sample_id"]], table.config
    references = tuple(table.plan.samples[id] for id in active_row.get("references") or ())
    item = PlanSample(active_row, sample, shape, references)
    try:
        required = table.locations.required_files("latents", active_row["sample_id"])
        required = [file for file in required if file.role != "mask" or with_uncropped]
        files = {file.role: (table.locations.open(file), file.content) for file in required}
        for role, reference in zip(SOURCE_ROLES, references, strict=False):
            (file,) = table.locations.required_files("latents", reference["sample_id"])
            files[role] = table.locations.open(file), file.content
    except MediaError as error:
        return item, error
    except OSError as error:
        return item, unreadable_error(item.path, error)
    except LatentpressError as error:
        return item, MediaError("unreadable", item.path, error.message, error.next_step)
    geometry, uncropped_size = sample["geometry"], None
    if with_uncropped:
        width, height = shape["width"] or geometry["resize_w"], shape["height"] or geometry["resize_h"]
        scale = min(1.0, UNCROPPED_BOX[0] / width, UNCROPPED_BOX[1] / height)
        uncropped_size = max(1, round(width * scale)), max(1, round(height * scale))
    condition_frames = 1 if config.model.condition is None else config.model.condition.frames
    crops = tuple(reference["geometry"] for reference in references)
    crops = (sample["source_geometry"],) if sample["condition"] == "source" else crops
    return item, SampleTask(sample, files, config.latents.decoder, condition_frames, crops, uncropped_size)
