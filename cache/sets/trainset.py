"""A training set as the trainer reads it: an index that joins rows of text shards, latent shards and further shards.

Tables are memory-mapped, and a limited number of shards is open at a time, so memory does not grow with the number
of samples. Every row read is compared with its checksum and with the id that the index expects.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache.order.schedule import BatchSchedule, Ints, Span
from cache.order.section_order import order_by_sections
from cache.order.set_columns import IntColumn, ListColumn, find_runs
from cache.sets import plans
from cache.sets.table_checks import SET_ROLES, SetRecord, check_set_record, check_set_references, read_set_table
from cache.shards.shard import ShardRow
from cache.shards.shard_io import ReaderPool, ShardSupply, open_limit
from cache.shards.tensor_checks import SAMPLE, find_shape_problems, find_tensor_problem, own_name
from cache.shards.tensors import Array
from cache.store.damage import DamageError, as_damage
from cache.store.store import Store
from schemas.catalog import FAMILIES
from schemas.config.training import Train
from schemas.errors import INCOMPLETE, USAGE, LatentpressError
from schemas.family import REFERENCE_PARTS, Family, Task
from schemas.geometry import Bucket
from schemas.identity import derive_seed, mix_bits, to_unit_interval
from schemas.tables import further_kinds, reference_parts

COMPARED_ROWS = 1 << 17  # number of ids that are compared at a time
TEXT = "text"  # the part of a draw that is a caption or the null prompt
NULL = "null"  # the part of a row, or of a draw in addition to its text, that is the null prompt


NO_TEXT = -1  # in place of a text's number: a null prompt that the set does not have


class RowTexts:
    """The texts of a set's rows, as row numbers of the set's table "texts".

    index: the set's table "index". null_text: number of the null prompt for rows without a separate null prompt;
    None if the set has no such null prompt.
    """

    def __init__(self, index: pa.Table, null_text: int | None) -> None:
        self._captions, self._null_texts = ListColumn(index["texts"]), IntColumn(index["null_text"])
        self._null_text = NO_TEXT if null_text is None else null_text

    def parts(self, row: int) -> dict[str, int]:
        """Return part -> number of its text: "text0", "text1", ... for the row's captions, and "null" if the row has a
        null prompt."""
        parts = {f"text{number}": text for number, text in enumerate(self._captions.get(row))}
        null = int(self.null(np.array([row]))[0])
        return parts if null == NO_TEXT else parts | {NULL: null}

    def part(self, row: int, text: int) -> str:
        """Return the first part of a row that has this text; "null" for NO_TEXT."""
        return next((part for part, number in self.parts(row).items() if number == text), NULL)

    def choose(self, rows: Ints, captions: Ints, dropped: NDArray[np.bool_]) -> Ints:
        """Return (n,) texts, one for each row: the caption with the number in `captions` or, if `dropped` is true, the
        null prompt, which may be NO_TEXT. Arguments are (n,)."""
        texts = self._captions.take(rows, captions)
        texts[dropped] = self.null(rows[dropped])
        return texts

    def first(self, rows: Ints) -> Ints:
        """Return (n,) the number of the first caption of each row."""
        return self._captions.take(rows, np.zeros_like(rows))

    def null(self, rows: Ints) -> Ints:
        """Return (n,) the null prompt of each row, which may be NO_TEXT."""
        return self._null_texts.take(rows, self._null_text)

    def draw(self, seed: int, dropout: float, steps: int | Ints, positions: Ints, rows: Ints, passes: Ints) -> Ints:
        """Return (..., B) the text of each draw. steps: the step of all draws, or (M,) the step of each micro-batch.
        positions, rows, passes: (..., B) fields of `cache.order.schedule.MicroBatchRows`. dropout: share of captions
        that the null prompt replaces, 0 to 1."""
        flat = rows.ravel()
        captions = choose_captions(seed, flat, passes.ravel(), self._captions.lengths(flat))
        dropped = draw_caption_dropout(seed, steps, positions, dropout)
        return self.choose(flat, captions, dropped.ravel()).reshape(rows.shape)


def choose_captions(seed: int, rows: Ints, passes: Ints, alternatives: Ints) -> Ints:
    """Return the number of the caption that each row uses in a pass: captions take turns, from a random start.

    Arrays are (n,). alternatives: number of captions of each row. Over `alternatives[i]` consecutive passes, row i uses
    each of its captions once.
    """
    offset = mix_bits(rows.astype(np.uint64) ^ np.uint64(derive_seed(str(seed), "captions")))
    return ((offset % alternatives.astype(np.uint64)).astype(np.int64) + passes) % alternatives


def draw_caption_dropout(seed: int, steps: int | Ints, positions: Ints, share: float) -> NDArray[np.bool_]:
    """Return (..., B) whether the null prompt replaces the caption at each position of a step's global batch. steps:
    the step of all positions, or (M,) the step of each micro-batch."""
    keys = np.array([derive_seed(f"{seed}/{step}", "dropout") for step in np.atleast_1d(steps).tolist()], np.uint64)
    is_dropped = to_unit_interval(mix_bits(positions.astype(np.uint64) ^ keys[:, None])) < share
    return is_dropped.reshape(positions.shape)


class SetError(LatentpressError):
    """The training set does not exist, or has a different family, task or format."""

    exit_code = USAGE


class SetNotFound(SetError):
    """The set does not exist yet."""

    exit_code = INCOMPLETE


@dataclass(frozen=True)
class Sample:
    """One sample. tensors: the sample's tensors, such as "latent" and "condition" (C, T, h, w). text: the tensors of
    one caption, "embeds" (L, D) and "pooled" (D2,). Both hold all tensors that the encoding stages write, under the
    names used by the stages."""

    id: str
    tensors: dict[str, Array]
    text: dict[str, Array]
    regularization: bool = False  # whether the sample preserves the model's abilities instead of training new ones


@dataclass(frozen=True)
class ValidationPrompt:
    """A prompt to sample while training. bucket: "WxH@F" of the result. condition: latent (C, T, h, w) or None.
    references: latents (C, 1, h, w) in order; their sizes may differ."""

    name: str
    prompt: str
    negative_prompt: str
    bucket: str
    text: dict[str, Array]
    negative: dict[str, Array]
    condition: Array | None
    references: tuple[Array, ...] = ()


class Location(NamedTuple):
    """A row of a shard: number of the shard, number of the row in the shard, and the row's id, or None if the set has
    no id for the row."""

    shard: int
    row: int
    id: str | None


class TrainSet:
    """The training set sets/<id> of a store. `meta` is set.json. Rows below `len` are for training, `eval_rows` are
    held out.

    Reading a damaged row or a missing shard raises DamageError, which names the shard, the row and the command that
    rebuilds the shard. Threads that read the same shard wait for each other.
    """

    def __init__(self, store: Store, set_id: str, meta: SetRecord):
        self.store, self.id, self.meta = store, set_id, meta
        self.recipe_differences: list[str] = []  # differences from the set that the configuration would make
        #: Widths of the text tensors that the transformer reads. Once the widths are set, `sample` and `validation`
        #: check that their tensors can be trained on.
        self.text_widths: dict[str, int] | None = None
        #: The tables index, texts and shards of schemas.tables.
        with ThreadPoolExecutor(1) as pool:  # for ten million samples, the texts take a third of the time
            further = {name: pool.submit(read_set_table, store, set_id, name) for name in ("texts", "shards")}
            self.tables = {"index": read_set_table(store, set_id, "index")}
            self.tables |= {name: table.result() for name, table in further.items()}
        self._index, self._texts, self._shards = self.tables.values()
        self._check_file("index.arrow", check_set_references, self._index, self._texts, self._shards)
        self._check_file("set.json", check_set_record, meta, self._texts.num_rows, self._shards.num_rows)
        self.row_texts = RowTexts(self._index, meta.null_text)
        self._readers = ReaderPool(store, open_limit())  # each holds a file handle, a memory map and its list of ids
        self.supply = ShardSupply(store, self.shard_path)

    def _check_file(self, file: str, check: Callable[..., object], *values: Any) -> None:
        """Call `check`; raises DamageError about a file of the set if the check fails."""
        with as_damage(self.store.path(f"sets/{self.id}/{file}"), "it has invalid values"):
            check(*values)

    @property
    def _task(self) -> tuple[Family, Task]:
        return FAMILIES[self.meta.family], self.meta.task

    def __len__(self) -> int:
        """The number of samples to train on."""
        return sum(span.count for span in self.spans)

    @cached_property
    def spans(self) -> list[Span]:
        """The rows to train on, for `BatchSchedule`: runs of one bucket, dataset, repeats and weight."""
        keys = ("role", "bucket", "dataset", "repeats", "weight")
        runs = find_runs(self._index, keys)
        order = [(SET_ROLES.index(role), *values) for (role, *values), _, _ in runs]
        if any(later <= earlier for earlier, later in pairwise(order)):
            raise SetError(f"the index of set {self.id} is not sorted by {', '.join(keys)}", "Run `latentpress index`.")
        train = [run for run in runs if run[0][0] == "train"]
        return [Span(bucket, start, stop - start, *values) for (_, bucket, _, *values), start, stop in train]

    def make_schedule(self, settings: Train, world: int = 1) -> BatchSchedule:
        """Return the order in which a run with `world` processes trains on the set."""
        order = None
        if settings.shuffle_shards is not None:
            order = order_by_sections(IntColumn(self._index["shard"]), settings.shuffle_shards)
        global_batch = settings.batch_size * settings.accumulate * world
        return BatchSchedule(self.spans, settings.seed, settings.batch_size, global_batch, order)

    @property
    def eval_rows(self) -> range:
        """The rows that are held out for evaluation."""
        return range(len(self), self._index.num_rows)

    @property
    def regularization(self) -> int:
        """The number of samples to train on that are regularization data."""
        return pc.sum(self._index.column("regularization").slice(0, len(self))).as_py() or 0

    def choose_eval_rows(self, count: int) -> tuple[list[int], str]:
        """Choose at most `count` rows to measure a loss on, always the same rows. Returns (rows, "held-out samples")
        or, if the set has no held-out samples, (rows, "training samples"). Held-out rows are distinct samples; training
        rows are spread evenly over the index.

        Held-out samples with the smallest ids are chosen. Ids are hashes, so the choice is even, and added data
        replaces few chosen samples.
        """
        if not self.eval_rows:
            count = min(count, len(self))
            return [(2 * number + 1) * len(self) // (2 * count) for number in range(count)], "training samples"
        held_out = self._index.column("sample_id").slice(len(self))
        parts = [(first, held_out.slice(first, COMPARED_ROWS)) for first in range(0, len(held_out), COMPARED_ROWS)]
        smallest = pa.array([], pa.string())
        for _, part in parts:  # for all ids at once, Arrow's hash table would take a hundred bytes an id
            ids = pc.unique(pa.chunked_array([smallest, *part.chunks]))
            smallest = ids.take(pc.select_k_unstable(ids, min(count, len(ids)), [("", "ascending")]))
        rows: dict[int, int] = {}  # number in `smallest` -> its first row
        for first, part in parts:
            numbers = pc.index_in(part, value_set=smallest)
            for row in np.flatnonzero(np.asarray(pc.is_valid(numbers))).tolist():
                rows.setdefault(numbers[row].as_py(), len(self) + first + row)
        return sorted(rows.values()), "held-out samples"

    def bucket(self, row: int) -> str:
        """Return the bucket, "WxH@F", of row `row`."""
        return self._index.column("bucket")[row].as_py()

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Kind of shard -> fingerprint of the cache that the set's rows come from."""
        paths, kinds = (self._shards.column(name).to_pylist() for name in ("path", "kind"))
        return {kind: path.split("/")[-2] for path, kind in zip(paths, kinds, strict=True)}

    @cached_property
    def kinds(self) -> list[str]:
        """Kinds of shards, in addition to latents, that have a row for each sample, such as "vision"."""
        return further_kinds(self._index.column_names)

    @cached_property
    def references(self) -> list[str]:
        """The parts that are references. The number of a sample's references is given by its bucket."""
        return reference_parts(self._index.column_names)

    def sample_parts(self, bucket: str) -> tuple[str, ...]:
        """Return the parts, except the text, of a sample in this bucket."""
        return (SAMPLE, *self.kinds, *self.references[: len(Bucket.parse(bucket).references)])

    @cached_property
    def _columns(self) -> dict[str, tuple[IntColumn, IntColumn, pa.ChunkedArray]]:
        """Part of a draw -> columns with the shard number, the row number and the id of each of the part's rows."""
        ids = self._index["sample_id"]
        tables = {SAMPLE: (self._index, "", ids), TEXT: (self._texts, "", self._texts["text_id"])}
        tables |= {kind: (self._index, f"{kind}_", ids) for kind in self.kinds}
        tables |= {part: (self._index, f"{part}_", self._index[f"{part}_id"]) for part in self.references}
        return {
            part: (IntColumn(table[f"{prefix}shard"]), IntColumn(table[f"{prefix}row"]), names)
            for part, (table, prefix, names) in tables.items()
        }

    def _locate(self, part: str, number: int) -> Location:
        """Return the location of a part of row `number` or, for the part TEXT, of text `number`."""
        shards, rows, ids = self._columns[part]
        return Location(shards.get(number), rows.get(number), ids[number].as_py())

    def draw_locations(self, row: int, text: int, bucket: str, null: int | None = None) -> dict[str, Location]:
        """Return part -> location for each row that a draw reads: all parts of a sample in this bucket, "text" and, if
        `null` is the number of a text, "null". Raises SetError if a text is NO_TEXT."""
        if NO_TEXT in (text, null):
            sample_id = self._columns[SAMPLE][2][row].as_py()
            raise SetError(f"set {self.id} has no null prompt for {sample_id}", "Run `latentpress index`.")
        locations = {part: self._locate(part, row) for part in self.sample_parts(bucket)}
        texts = {TEXT: text} if null is None else {TEXT: text, NULL: null}
        return locations | {part: self._locate(TEXT, number) for part, number in texts.items()}

    def read_draw(self, row: int, text: int, bucket: str, null: int | None = None) -> dict[str, ShardRow]:
        """Read the rows of `draw_locations`. Checks checksums, ids and, once `text_widths` are set, shapes and dtypes;
        does not check that numbers are finite. text: number of a text, from `RowTexts.draw`. null: number of the null
        prompt, from `RowTexts.null`, to read it in addition.

        Raises DamageError, SetError and StoreError, which name the row.
        """
        locations = self.draw_locations(row, text, bucket, null)
        draw = {part: self.read_row(location) for part, location in locations.items()}
        for part, part_row in draw.items() if self.text_widths is not None else ():
            if problem := find_shape_problems(part, part_row.tensors, bucket, self._task, self.text_widths or {}):
                raise self.damage(locations[part], problem)
        if len(draw) > 2:
            names = {part: [own_name(part, name) for name in part_row.tensors] for part, part_row in draw.items()}
            check_distinct_names({part: names[part] for part in draw if part not in (TEXT, NULL)}, draw[SAMPLE].id)
        return draw

    def regularization_marks(self, rows: Ints) -> list[bool]:
        """Return for each row whether the row is regularization data."""
        return self._index["regularization"].take(pa.array(rows)).to_pylist()

    def sample(self, row: int, text: str = "text0") -> Sample:
        """Return row `row` with one of its texts: "text0", "text1", ... or "null", the null prompt. Once `text_widths`
        are set, all tensors are checked, including that their numbers are finite."""
        number, bucket = self.row_texts.parts(row).get(text, NO_TEXT), self.bucket(row)
        draw = self.read_draw(row, number, bucket)
        self._check_parts(draw, bucket, self.draw_locations(row, number, bucket))
        tensors = {
            own_name(part, name): array
            for part, part_row in draw.items()
            if part != TEXT
            for name, array in part_row.tensors.items()
        }
        regularization = self._index.column("regularization")[row].as_py()
        return Sample(draw[SAMPLE].id, tensors, draw[TEXT].tensors, regularization)

    def has_tensor(self, name: str) -> bool:
        """Whether samples to train on have the tensor `name`. Only the first sample of each span is read, because the
        samples of a dataset have the same tensors. "regularization", a mark, and "null_text", the null prompt of
        each sample, count as tensors."""
        if name == "regularization":
            return self.regularization > 0
        if name == "null_text":
            own = self._index.column("null_text").slice(0, len(self))
            return self.meta.null_text is not None or own.null_count == 0
        rows = (self.part_rows(span.start, self.sample_parts(span.bucket)) for span in self.spans)
        return any(
            name in (own_name(part, tensor) for tensor in row.tensors) for parts in rows for part, row in parts.items()
        )

    def _check_parts(self, parts: Mapping[str, ShardRow], bucket: str, locations: Mapping[str, Location]) -> None:
        """Raise DamageError if a part can't be trained on. Does nothing before `text_widths` are set."""
        for name, part in parts.items() if self.text_widths is not None else ():
            if problem := find_tensor_problem(name, part, bucket, self._task, self.text_widths or {}):
                raise self.damage(locations[name]._replace(id=part.id), problem)

    @property
    def validation(self) -> list[ValidationPrompt]:
        """The validation prompts of the configuration that made the set, with their tensors, read and checked."""
        prompts = []
        for number, entry in enumerate(self.meta.validation):
            parts = self.prompt_rows(number)
            references = [parts[part].tensors["latent"] for part in REFERENCE_PARTS if part in parts]
            self._check_parts(parts, self._prompt_bucket(entry.bucket, references), self.prompt_locations(number))
            condition = parts["condition"].tensors["latent"] if "condition" in parts else None
            values = (entry.name, entry.prompt, entry.negative_prompt, entry.bucket)
            texts = parts["text"].tensors, parts["negative"].tensors
            prompts.append(ValidationPrompt(*values, *texts, condition, tuple(references)))
        return prompts

    def _prompt_bucket(self, bucket: str, references: Sequence[Array]) -> str:
        """Return a prompt's bucket followed by the sizes of its references, which are computed from their latents."""
        stride = self._task[0].spatial_stride
        sides = [[side * stride for side in array.shape[-2:]] for array in references]
        return bucket + "".join(f"+{width}x{height}" for height, width in sides)

    def part_locations(self, row: int) -> dict[str, Location]:
        """Return part -> location for all parts of row `row`: "sample", further kinds, references, "text0", "text1",
        ... and, if the row has a null prompt, "null"."""
        locations = {part: self._locate(part, row) for part in self.sample_parts(self.bucket(row))}
        return locations | {part: self._locate(TEXT, text) for part, text in self.row_texts.parts(row).items()}

    def prompt_locations(self, number: int) -> dict[str, Location]:
        """Return part -> location for the parts of validation prompt `number`: "text", "negative", and "condition" or
        the references, if the prompt has them."""
        entry = self.meta.validation[number]
        locations = {"text": self._locate(TEXT, entry.text), "negative": self._locate(TEXT, entry.negative)}
        images = dict(zip(REFERENCE_PARTS, entry.references, strict=False))
        images |= {"condition": entry.condition} if entry.condition else {}
        return locations | {part: Location(image.shard, image.row, image.id) for part, image in images.items()}

    def part_rows(self, row: int, names: Collection[str] | None = None) -> dict[str, ShardRow]:
        """Read the parts `names` of row `row`, by default all parts. Returns part -> row of a shard, with its checksum
        verified."""
        locations = self.part_locations(row)
        return {name: self.read_row(locations[name]) for name in (locations if names is None else names)}

    def prompt_rows(self, number: int) -> dict[str, ShardRow]:
        """Read all parts of validation prompt `number`. Returns part -> row of a shard, with its checksum verified."""
        return {name: self.read_row(location) for name, location in self.prompt_locations(number).items()}

    def find_newer_plan(self) -> str | None:
        """Return the newest plan with the same settings as the set's plan, or None if the set's plan is the newest or
        is not in the store."""
        generation = self.meta.generation
        if generation not in plans.list_plans(self.store):
            return None  # the set was copied here without its plans
        newest = plans.newest_plan(self.store, plans.load_plan(self.store, generation).info.key)
        return newest.name if newest is not None and newest.name > generation else None

    def use_supply(self, supply: ShardSupply) -> None:
        """Read shards through `supply` from now on; `close` also closes the supply."""
        self._readers.close()
        self.supply = supply
        supply.forget = lambda number: self._readers.forget(self.shard_path(number))

    def close(self) -> None:
        self._readers.close()
        self.supply.close()

    def text_id(self, number: int) -> str:
        return self._texts.column("text_id")[number].as_py()

    def shard_path(self, number: int) -> str:
        """Return the path of shard `number` in the store."""
        return self._shards.column("path")[number].as_py()

    def read_row(self, location: Location) -> ShardRow:
        """Read the row at a location and verify its checksum. A damaged row is read once more if the supply can replace
        the shard's bytes. Raises SetError if the row's id differs from the id in the set."""
        path, open = self.shard_path(location.shard), partial(self.supply.open, location.shard)
        try:
            row = self._readers.read(path, location.row, open=open)
        except DamageError:
            if not self.supply.damaged(location.shard):
                raise
            row = self._readers.read(path, location.row, open=open)
        self.check_id(row, location)
        return row

    def check_id(self, row: ShardRow, location: Location) -> None:
        """Raise SetError if a row's id differs from the id that the set has for this location."""
        if location.id is not None and row.id != location.id:
            problem = f"row {location.row} of {self.store.path(self.shard_path(location.shard))} is {row.id}"
            step = "The shard was replaced after the set was made: run `latentpress index`."
            raise SetError(f"{problem}; set {self.id} expects {location.id}", step)

    def damage(self, location: Location, reason: str) -> DamageError:
        """Return the error about the row at a location."""
        return DamageError(self.store.path(self.shard_path(location.shard)), reason, location.row, location.id)


def check_distinct_names(parts: Mapping[str, Collection[str]], sample_id: str) -> None:
    """Raise SetError if two kinds of shards have a tensor of the same name. parts: kind -> names of the kind's tensors.
    sample_id: id of the sample, for the message."""
    used_names: set[str] = set()
    for kind, names in parts.items():
        if repeated := used_names.intersection(names):
            problem = f"{', '.join(sorted(repeated))} of {sample_id} is in several kinds of shards, the last is {kind}"
            raise SetError(problem, "Name the tensors of each encoding stage differently, and encode again.")
        used_names.update(names)
