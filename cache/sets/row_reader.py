"""Finds the bytes of a micro-batch's rows, ready to be copied, and whether the copies are what was written.

No object is made for a value that only has to be copied. Rows of files that can't be mapped, and rows that are not as
expected, are read by `TrainSet.read_row`, which names what is damaged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from cache.order.schedule import Ints
from cache.order.set_columns import BoolColumn, IntColumn, TextColumn
from cache.sets.draws import NO_TEXT
from cache.sets.samples import Location
from cache.sets.trainset import TrainSet, check_distinct_names, missing_null_prompt
from cache.shards.row_layouts import RowLayout, view_layout
from cache.shards.shard import ShardRow
from cache.shards.shard_supply import MappedShard, MappedShards
from cache.shards.tensor_checks import SAMPLE, find_shape_problems, own_name
from schemas.config.training import VerifyRows

TEXT = "text"
NO_LAYOUT = RowLayout(())


@dataclass(slots=True)
class StoredRow:
    """Row `row` of shard `number`. Its tensors stand `layout.tensors[i].start` bytes after address `base`.

    id: which row the set expects. stored_row: its number in the file. codes: of its shard, as they were when it was
    found. held: what keeps the memory at `base`, where that is not the shard. hash: of a row that is compared with
    `checksum` once it is copied: to be updated with the head and the bytes of each tensor.
    """

    part: str
    number: int
    row: int
    id: str
    stored_row: int = 0
    base: int = 0
    layout: RowLayout = NO_LAYOUT
    shard: MappedShard | None = None
    codes: Any = None
    held: object = None
    hash: xxhash.xxh3_128 | None = None
    checksum: bytes = b""

    @property
    def location(self) -> Location:
        return Location(self.number, self.row, self.id)


class RowReader:
    """Finds rows of a set. verify: "always" compares each row that is read with its checksum; "first" only when this
    process reads it for the first time, or its file was written to since. Threads may share it."""

    def __init__(self, data: TrainSet, verify: VerifyRows = "always", limit: int | None = None) -> None:
        self.data, self.always = data, verify == "always"
        self.shards = MappedShards(data.supply, limit)
        index, texts = data.tables["index"], data.tables["texts"]
        self._ids, self._regularization = TextColumn(index["sample_id"]), BoolColumn(index["regularisation"])
        prefixes = {SAMPLE: "", **{kind: f"{kind}_" for kind in data.kinds}}
        tables = {part: (index, prefix, self._ids) for part, prefix in prefixes.items()}
        for part in data.references:
            tables[part] = index, f"{part}_", TextColumn(index[f"{part}_id"])
        tables[TEXT] = texts, "", TextColumn(texts["text_id"])
        self._columns = {
            part: (IntColumn(table[f"{prefix}shard"]), IntColumn(table[f"{prefix}row"]), ids)
            for part, (table, prefix, ids) in tables.items()
        }

    def sample_ids(self, rows: Ints) -> list[str]:
        return [self._ids.get(row).decode() for row in rows.tolist()]

    def regularization_marks(self, rows: Ints) -> list[bool]:
        """Whether each row is regularization data."""
        return [self._regularization.get(row) for row in rows.tolist()]

    def find(self, rows: Ints, texts: Ints, bucket: str) -> list[list[StoredRow]]:
        """The rows of a micro-batch's samples, part by part: of latents, of each further kind of shards and, last, of
        texts. Their files are as long as they were: to be copied at once.

        texts: (B,) as of `cache.sets.draws.RowTexts.draw`. DamageError, SetError, StoreError as of `TrainSet.sample`,
        but numbers that are not finite are not looked for.
        """
        samples = [self._find_parts(*draw, bucket) for draw in zip(rows.tolist(), texts.tolist(), strict=True)]
        return [list(part) for part in zip(*samples, strict=True)]

    def _find_parts(self, row: int, text: int, bucket: str) -> list[StoredRow]:
        id = self._ids.get(row).decode()
        if text == NO_TEXT:
            raise missing_null_prompt(self.data.id, id)
        parts = []
        for part in (*self.data.sample_parts(bucket), TEXT):
            shards, numbers, ids = self._columns[part]
            entry = text if part == TEXT else row
            stored = StoredRow(part, shards.get(entry), numbers.get(entry), ids.get(entry).decode())
            parts.append(self._locate(stored, bucket))
        if len(parts) > 2:
            names = {row.part: [own_name(row.part, span.name) for span in row.layout.tensors] for row in parts[:-1]}
            check_distinct_names(names, id)
        return parts

    def _locate(self, stored: StoredRow, bucket: str) -> StoredRow:
        """Complete a row."""
        stored.stored_row = position = self.data.stored_row(stored.number, stored.row)
        shard = self.shards.find(stored.number) or self.shards.open(stored.number)
        if shard is None or position >= len(shard.starts):
            return self._read_carefully(stored, bucket)
        shard.check()
        start = shard.starts[position]
        stored.shard, stored.codes, stored.base = shard, shard.codes, shard.address + start
        code = stored.codes[position]
        if shard.layouts is None and (self.always or not code):
            return self._read_tar(stored, shard, bucket)
        layout = self.shards.layout(code) if code else self._learn_layout(stored, shard, start, bucket)
        if layout is None:
            return stored
        stored.layout, stored.base, stored.held = layout, shard.address + start, None
        if start + layout.end > shard.size:
            return self._read_carefully(stored, bucket)
        if self.always or not code:
            id, info, stored.checksum = (
                shard.view[start + first : start + end].tobytes()
                for first, end in (layout.id, layout.info, layout.checksum)
            )
            if id != stored.id.encode():
                return self._read_carefully(stored, bucket)
            stored.hash = layout.start_hash(id, info)
        self._check_shapes(stored, bucket)
        return stored

    def _learn_layout(self, stored: StoredRow, shard: MappedShard, start: int, bucket: str) -> RowLayout | None:
        """The layout of a row of an Arrow shard, or None, and the row complete as it was read."""
        assert shard.layouts is not None
        layout = shard.layouts.find(shard.view, start)
        if layout is None:  # Arrow's reader learns it, or says what is wrong
            self._read_carefully(stored, bucket)
            layout = shard.layouts.find(shard.view, start)
        return layout

    def _read_tar(self, stored: StoredRow, shard: MappedShard, bucket: str) -> StoredRow:
        """A row of a tar, verified in its place, of which the layout is kept."""
        assert shard.reader is not None
        with shard.lock:
            row = shard.reader.read(stored.stored_row)
        self.data.check_id(row, stored.location)
        stored.layout = self.shards.same_layout(view_layout(row.tensors, stored.base))
        stored.held = row
        self._check_shapes(stored, bucket)
        stored.codes[stored.stored_row] = self.shards.code(stored.layout)
        return stored

    def _read_carefully(self, stored: StoredRow, bucket: str) -> StoredRow:
        return self._take(stored, self.data.read_row(stored.location), bucket)

    def _take(self, stored: StoredRow, row: ShardRow, bucket: str) -> StoredRow:
        """Complete a row that was read and verified."""
        stored.base, stored.layout, stored.held, stored.hash = 0, view_layout(row.tensors, 0), row, None
        self._check_shapes(stored, bucket)
        return stored

    def _check_shapes(self, stored: StoredRow, bucket: str) -> None:
        """DamageError where tensors of these shapes can't be trained on, once `text_widths` are set."""
        if self.data.text_widths is None:
            return
        tensors = {span.name: span for span in stored.layout.tensors}
        if problem := find_shape_problems(stored.part, tensors, bucket, self.data.meta, self.data.text_widths):
            raise self.data.damage(stored.location, problem)

    def check_unchanged(self, stored: StoredRow) -> None:
        """Call it before a row is copied: DamageError where its file was cut, or written to since it was found."""
        if stored.shard is not None:
            stored.shard.check()
            if stored.shard.codes is not stored.codes:
                raise self.data.damage(stored.location, "it was written to while it was read")

    def verify(self, stored: StoredRow, tensors: Sequence[memoryview]) -> None:
        """`check_copy` of a row's tensors, in the order of its layout."""
        for head, tensor in zip(stored.layout.heads, tensors, strict=True):
            if stored.hash is not None:
                stored.hash.update(head)
                stored.hash.update(tensor)
        self.check_copy(stored)

    def check_copy(self, stored: StoredRow) -> None:
        """DamageError or SetError where the copied row, of which the hash is complete, is not what was written."""
        if stored.hash is None:
            return
        if stored.hash.hexdigest().encode() != stored.checksum:
            self.data.read_row(stored.location)
            raise self.data.damage(stored.location, "it was written to while it was read")
        if not stored.codes[stored.stored_row]:
            stored.codes[stored.stored_row] = self.shards.code(stored.layout)

    def close(self) -> None:
        self.shards.close()
