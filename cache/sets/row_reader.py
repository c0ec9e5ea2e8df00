"""Where the bytes of a micro-batch's rows are, ready to be copied, and whether the copies are what was written.

The careful way is `TrainSet.sample`; this one gives the same bytes in a twentieth of its time, as it makes no object
for a value that only has to be copied. What it does not know it reads the careful way, which names what is damaged.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from cache.order.schedule import Ints
from cache.order.set_columns import BoolColumn, IntColumn, ListColumn, TextColumn
from cache.sets.trainset import Location, TrainSet, check_distinct_names, missing_null_prompt, packed_row_id
from cache.shards.mapped_shards import MappedShard, MappedShards
from cache.shards.row_layouts import RowLayout, part_layout, view_layout
from cache.shards.shard import ShardRow
from cache.shards.tensor_checks import SAMPLE, find_shape_problems
from schemas.config.training import VerifyRows

MAX_SOUND = 1 << 16  # layouts that are known to be sound
TEXT = "text"
NO_LAYOUT = RowLayout(())


class Places:
    """Where the rows of one part are: columns of the index, or of the table of texts."""

    def __init__(self, table: pa.Table, prefix: str, ids: TextColumn) -> None:
        self.shard, self.row = (IntColumn(table[f"{prefix}{name}"]).number for name in ("shard", "row"))
        self.ids = ids


@dataclass(slots=True)
class FoundRow:
    """Row `row` of shard `number`. Its tensors stand `layout.tensors[i].start` bytes after address `base`.

    ids, entry: where the set says which id it has. verified: whether the bytes are known to be what was written. codes:
    of its shard, as they were when it was found. held: what keeps the memory at `base`, where that is not the shard.
    """

    part: str
    number: int
    row: int
    ids: TextColumn
    entry: int
    base: int = 0
    layout: RowLayout = NO_LAYOUT
    verified: bool = True
    shard: MappedShard | None = None
    codes: Any = None
    held: object = None

    @property
    def location(self) -> Location:
        return Location(self.number, self.row, self.ids.get(self.entry).decode())


class PackedIds(TextColumn):
    """Ids of an export's rows."""

    def get(self, row: int) -> bytes:
        return packed_row_id(row, super().get(row).decode()).encode()


class RowCheck(NamedTuple):
    """A row of which the copy is compared with its checksum.

    state: of the hash, to be updated with the bytes of its tensors in the order of its layout, each but the first after
    its head.
    """

    found: FoundRow
    id: bytes
    checksum: bytes
    state: xxhash.xxh3_128


@dataclass(slots=True)
class FoundSample:
    """parts: its row of latents, of each further kind of shards, and of one text, last."""

    id: str
    regularisation: bool
    parts: list[FoundRow]


class RowReader:
    """Finds rows of a set. verify: "always" compares each row that is read with its checksum; "first" only when this
    process reads it for the first time, or its file was written to since. Threads may share it."""

    def __init__(self, data: TrainSet, verify: VerifyRows = "always", limit: int | None = None) -> None:
        self.data, self.always = data, verify == "always"
        self.shards = MappedShards(data.supply, limit)
        index, texts = data.tables["index"], data.tables["texts"]
        self._ids, self._regularisation = TextColumn(index["sample_id"]), BoolColumn(index["regularisation"])
        self._texts, self._null_texts = ListColumn(index["texts"]), IntColumn(index["null_text"])
        self._packed_ids = PackedIds(index["sample_id"])
        prefixes = {SAMPLE: "", **{kind: f"{kind}_" for kind in data.kinds if not data.packed}}
        self._places = {part: Places(index, prefix, self._ids) for part, prefix in prefixes.items()}
        self._text_places = Places(texts, "", TextColumn(texts["text_id"]))
        self._sound: set[tuple[str, str, RowLayout]] = set()

    def find(self, rows: Ints, captions: Ints, dropped: NDArray[np.bool_], bucket: str) -> list[FoundSample]:
        """The samples of a micro-batch, of which the files are as long as they were; to be copied at once.

        captions, dropped: as of `TrainSet.sample`. DamageError, SetError, StoreError as there, but numbers that are not
        finite are not looked for.
        """
        found = list[FoundSample]()
        of = self._text_places
        for row, caption, drop in zip(rows.tolist(), captions.tolist(), dropped.tolist(), strict=True):
            if self.data.packed:
                parts = self._unpack(row, "null" if drop else f"{TEXT}{caption}", bucket)
            else:
                text = self._null_text(row) if drop else self._texts.get(row, caption)
                parts = [
                    self._locate(FoundRow(part, of.shard(row), of.row(row), of.ids, row), bucket)
                    for part, of in self._places.items()
                ]
                parts.append(self._locate(FoundRow(TEXT, of.shard(text), of.row(text), of.ids, text), bucket))
            id = self._ids.get(row).decode()
            if len(parts) > 2:
                check_distinct_names({one.part: [each.name for each in one.layout.tensors] for one in parts[:-1]}, id)
            found.append(FoundSample(id, self._regularisation.get(row), parts))
        return found

    def _null_text(self, row: int) -> int:
        """The null prompt's row in the table of texts."""
        own = self._null_texts.get(row)
        null = self.data.meta["null_text"] if own is None else own
        if null is None:
            raise missing_null_prompt(self.data.id, self._ids.get(row).decode())
        return null

    def _unpack(self, row: int, text: str, bucket: str) -> list[FoundRow]:
        """The parts of an export's row, in which they are all, verified in its place."""
        places = self._places[SAMPLE]
        whole = FoundRow(SAMPLE, places.shard(row), places.row(row), self._packed_ids, row)
        names = (SAMPLE, *self.data.kinds, text)
        if not self.data.supply.local:  # its files can't be mapped
            stored = self.data.part_rows(row, names)
            parts = [replace(whole, part=TEXT if name == text else name) for name in names]
            for found, name in zip(parts, names, strict=True):
                self._take(found, stored[name], bucket)
            return parts
        self._locate(whole, bucket)
        if whole.codes is None or not whole.codes[whole.row]:
            self.data.part_rows(row)  # a row's first reading: whether its parts are those of the set, too
        if not whole.verified and whole.shard is not None:
            start, view = whole.base - whole.shard.address, whole.shard.view
            spans = ((start + one.start, start + one.start + one.size) for one in whole.layout.tensors)
            self.verify(whole, [view[first:end] for first, end in spans])
        parts = []
        for name in names:
            part = TEXT if name == text else name
            found = replace(whole, part=part, layout=part_layout(whole.layout, name), verified=True)
            self._check_layout(found, bucket)
            parts.append(found)
        return parts

    def _locate(self, found: FoundRow, bucket: str) -> FoundRow:
        """Complete a row."""
        number, row = found.number, found.row
        shard = self.shards.find(number) or self.shards.open(number)
        if shard is None or row >= len(shard.starts):
            return self._read_carefully(found, bucket)
        shard.check()
        codes, start = shard.codes, shard.starts[row]
        code = codes[row]
        found.shard, found.codes, found.base = shard, codes, shard.address + start
        if code and not (self.always and shard.reader is not None):
            found.layout = self.shards.layout(code)
            found.verified = not self.always
        elif shard.layouts is None:
            return self._read_tar(found, bucket)
        else:
            layout = shard.layouts.find(shard.view, start)
            if layout is None:  # the careful way learns it, or says what is wrong
                self._read_carefully(found, bucket)
                layout = shard.layouts.find(shard.view, start)
                if layout is None:
                    return found
                found.base, found.held = shard.address + start, None
            found.layout, found.verified = layout, False
        if start + found.layout.end > shard.size:
            return self._read_carefully(found, bucket)
        self._check_layout(found, bucket)
        return found

    def _read_tar(self, found: FoundRow, bucket: str) -> FoundRow:
        """A row of a tar, verified in its place, of which the layout is kept."""
        shard = found.shard
        assert shard is not None and shard.reader is not None
        with shard.lock:
            stored = shard.reader.read(found.row)
        self.data.check_id(stored, found.location)
        found.layout = self.shards.same_layout(view_layout(stored.tensors, found.base))
        found.held = stored
        self._check_layout(found, bucket)
        found.codes[found.row] = self.shards.code(found.layout)
        return found

    def _read_carefully(self, found: FoundRow, bucket: str) -> FoundRow:
        return self._take(found, self.data.read_row(found.location), bucket)

    def _take(self, found: FoundRow, stored: ShardRow, bucket: str) -> FoundRow:
        """Complete a row that was read and verified."""
        found.base, found.layout, found.verified, found.held = 0, view_layout(stored.tensors, 0), True, stored
        self._check_shapes(found, bucket)
        return found

    def _check_layout(self, found: FoundRow, bucket: str) -> None:
        """`_check_shapes`, of each layout once."""
        key = found.part, bucket, found.layout
        if self.data.text_widths is None or key in self._sound:
            return
        self._check_shapes(found, bucket)
        if len(self._sound) >= MAX_SOUND:
            self._sound.clear()
        self._sound.add(key)

    def _check_shapes(self, found: FoundRow, bucket: str) -> None:
        """DamageError where tensors of these shapes can't be trained on, once `text_widths` are set."""
        widths = self.data.text_widths
        if widths is None:
            return
        tensors = {one.name: one for one in found.layout.tensors}
        if problem := find_shape_problems(found.part, tensors, bucket, self.data.meta, widths):
            raise self.data.damage(found.location, problem)

    def verify(self, found: FoundRow, tensors: Sequence[memoryview]) -> None:
        """`start_check` and `finish_check` of a row's tensors, in the order of its layout."""
        check = self.start_check(found)
        for head, tensor in zip(found.layout.next_heads, tensors, strict=True):
            check.state.update(head)
            check.state.update(tensor)
        self.finish_check(check)

    def start_check(self, found: FoundRow) -> "RowCheck":
        """To be finished once the row is copied, unless it is verified already."""
        shard, layout = found.shard, found.layout
        assert shard is not None
        start, view = found.base - shard.address, shard.view
        id, info, checksum = (
            view[start + first : start + end].tobytes() for first, end in (layout.id, layout.info, layout.checksum)
        )
        return RowCheck(found, id, checksum, layout.start_hash(id, info))

    def finish_check(self, check: "RowCheck") -> None:
        """DamageError or SetError where the copied row is not what was written, or is another than the set's."""
        found = check.found
        if check.id != found.ids.get(found.entry) or check.state.hexdigest().encode() != check.checksum:
            location = found.location
            self.data.read_row(location)
            raise self.data.damage(location, "it was written to while it was read")
        if not found.codes[found.row]:
            found.codes[found.row] = self.shards.code(found.layout)

    def caption_counts(self, rows: Ints) -> Ints:
        """(n,) the number of captions of each of `rows`."""
        return np.array([self._texts.length(row) for row in rows.tolist()], dtype=np.int64)

    def close(self) -> None:
        self.shards.close()
