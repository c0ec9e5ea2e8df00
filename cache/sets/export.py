"""Training sets for other places: a copy that can be trained on, and WebDataset tars for other programs.

A copy is a root with the set's tables and shards under their own names, so `train.set` may name it. A tar has one row
for each sample, with the sample's latent, its other tensors and all its texts; latentpress does not read tars.
"""

import shutil
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import Field

from cache.order.set_columns import find_runs
from cache.sets import plans
from cache.sets.set_lookup import update_pointers
from cache.sets.table_checks import Provenance, SetPrompt
from cache.sets.trainset import TrainSet
from cache.shards import shard_io
from cache.shards.shard import SIDECAR_SUFFIX, TAR_SUFFIX, ShardMeta, ShardRow, find_done_units
from cache.shards.tensor_checks import SAMPLE
from cache.store.damage import as_damage
from cache.store.json_checks import EmptyName, Foreign, Name, Stored
from cache.store.store import Store
from schemas.errors import USAGE, LatentpressError

COPY_BYTES = 1 << 22
SET_FILES = ("index.arrow", "texts.arrow", "shards.arrow")
ROW_FACTS = ("role", "dataset", "bucket", "repeats", "weight", "regularization")  # columns of the index
SET_FACTS = ("family", "flavour", "task", "template")  # keys of set.json


class TargetError(LatentpressError):
    """The target of an export already has another export."""

    exit_code = USAGE


def shard_paths(data: TrainSet) -> list[str]:
    """The set's shards, relative to its root."""
    return data.tables["shards"].column("path").to_pylist()


def has_copy(data: TrainSet, target: Store, path: str) -> bool:
    """Whether `target` has the shard at `path`, undamaged and of the same size. Reads the whole shard."""
    with as_damage(data.store.path(path), "it can't be copied"):
        size = data.store.size(path)
    return target.exists(path) and target.size(path) == size and not shard_io.verify(target, path)


def copy_shard(data: TrainSet, target: Store, path: str) -> int:
    """Copy a shard, verify the copy and return its size in bytes. Raises DamageError if the shard is damaged."""
    if path.endswith(TAR_SUFFIX):  # the tar marks the shard as finished, so its sidecar is copied first
        _copy(data.store, target, path.removesuffix(TAR_SUFFIX) + SIDECAR_SUFFIX)
    _copy(data.store, target, path)
    if damages := shard_io.verify(target, path):
        target.remove(path)
        raise (shard_io.verify(data.store, path) or damages)[0]
    return target.size(path)


def publish_copy(data: TrainSet, target: Store) -> None:
    """Copy the caches' provenance and the set's tables, then set.json, whose existence makes the set visible."""
    for folder in sorted({path.rpartition("/")[0] for path in shard_paths(data)}):
        if data.store.exists(f"{folder}/provenance.json"):
            _copy(data.store, target, f"{folder}/provenance.json")
    for name in (*SET_FILES, "set.json"):
        _copy(data.store, target, f"sets/{data.id}/{name}")
    update_pointers(target, data.meta)


def _copy(source: Store, target: Store, path: str) -> None:
    with as_damage(source.path(path), "it can't be copied"):
        read = source.open_whole(path)
    with read, target.create(path) as copy:
        shutil.copyfileobj(read, copy, COPY_BYTES)


class TarPart(NamedTuple):
    """One tar of a WebDataset export: rows start..stop-1 of the index, all of one role and bucket."""

    unit: str
    bucket: str
    start: int
    stop: int


class ExportOptions(Foreign):
    limit_bytes: float
    captions: bool


class WebDatasetRecord(Stored):
    """set.json of an export as WebDataset."""

    id: Name
    family: Name
    flavour: EmptyName = ""
    task: Name
    template: EmptyName = ""
    provenance: dict[str, Provenance] = Field(default_factory=dict)
    validation: list[SetPrompt]
    export: ExportOptions


class WebDatasetExport:
    """Writes a set to `target` as tars of about `limit_bytes`. captions: whether rows have the text of the captions."""

    def __init__(self, data: TrainSet, target: Store, limit_bytes: float, captions: bool) -> None:
        self.data, self.target = data, target
        self.folder = f"webdataset/{data.id}"
        stated = data.meta.values()
        stated["export"] = {"limit_bytes": limit_bytes, "captions": captions}
        self.record = WebDatasetRecord.model_validate(stated)
        self._texts = _read_texts(data) if captions else None
        self.parts = list(self._divide(limit_bytes))

    def _divide(self, limit_bytes: float) -> Iterator[TarPart]:
        """Divide each run of rows with one role and bucket by the size of its first row, because latents of a bucket
        have the same size."""
        number = 0
        for (_, bucket), first, last in find_runs(self.data.tables["index"], ("role", "bucket")):
            row_bytes = sum(array.nbytes for array in self._row(first).tensors.values())
            count = max(1, int(limit_bytes // max(1, row_bytes)))
            for start in range(first, last, count):
                yield TarPart(f"{number:06d}", bucket, start, min(start + count, last))
                number += 1

    def check_target(self) -> None:
        """Raise TargetError if the target has this set, exported with other options."""
        path = f"{self.folder}/set.json"
        if self.target.exists(path) and self.target.read_record(path, WebDatasetRecord) != self.record:
            problem = f"{self.target.path(self.folder)} has this set, exported with other options"
            raise TargetError(problem, "choose another folder with --to, or remove this folder")

    def done_units(self) -> set[str]:
        return set(find_done_units(self.target, self.folder))

    def write(self, part: TarPart) -> int:
        """Publish a tar and return the size of its tensors in bytes. Raises DamageError if a row of the set is
        damaged."""
        rows = range(part.start, part.stop)
        meta = ShardMeta("samples", self.data.id, part.unit, part.bucket, [self._key(row) for row in rows])
        columns, size = dict[str, str](), 0
        with shard_io.open_writer(self.target, f"{self.folder}/{part.unit}", meta, columns, "webdataset") as writer:
            for number in rows:
                row = self._row(number)
                writer.columns |= {name: array.dtype for name, array in row.tensors.items()}
                writer.add(row)
                size += sum(array.nbytes for array in row.tensors.values())
            writer.finish()
        return size

    def publish(self) -> None:
        """Publish set.json, which describes all tars."""
        self.target.publish_record(f"{self.folder}/set.json", self.record)

    def _key(self, row: int) -> str:
        """The row's number and the sample's id: two files with the same bytes are two rows of one sample."""
        return f"{row:08d}-{self.data.tables['index'].column('sample_id')[row].as_py()}"

    def _row(self, number: int) -> ShardRow:
        """Return all tensors of a sample. The names of tensors of further parts begin with the part's name."""
        parts, index = self.data.part_rows(number), self.data.tables["index"]
        tensors = {
            name if part == SAMPLE else f"{part}.{name}": array
            for part, row in parts.items()
            for name, array in row.tensors.items()
        }
        info = {key: index.column(key)[number].as_py() for key in ROW_FACTS}
        info |= {key: getattr(self.data.meta, key) for key in SET_FACTS}
        info["parts"] = {part: {"id": row.id, "info": row.info} for part, row in parts.items()}
        if self._texts is not None:
            texts = index.column("texts")[number].as_py()
            info["captions"] = [self._texts[self.data.text_id(text)]["text"] for text in texts]
        return ShardRow(self._key(number), tensors, info)


def _read_texts(data: TrainSet) -> Mapping[str, Mapping[str, Any]]:
    """Text id -> the text's row in the plan that the set was made of."""
    name = data.meta.generation
    if name not in plans.list_plans(data.store):
        raise LatentpressError(
            f"the captions are in plan {name}, which is not in {data.store.path('plans')}",
            "export without --with-captions, or export from the root in which the set was made",
        )
    return plans.load_plan(data.store, name).texts
