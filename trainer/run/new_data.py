"""Going on with a run on another training set (`train.on_new_data: continue`).

Weights, optimizer and moving average stay, steps and the rate's schedule count on, and the order of the samples begins
anew. state.json has the changes, oldest first, and the `held_out_digest` that was compared with the sets before.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache.sets import plans
from cache.sets.trainset import TrainSet
from cache.store.damage import DamageError
from cache.store.files import StoreError
from schemas.identity import hash_bytes
from schemas.text_format import escape_unprintable, shorten
from trainer.run.resume import NEW_RUN_HINT, Checkpoint, DataChange, ResumeError

MOST_NAMED = 3  # samples


def list_changes(checkpoint: Checkpoint, digest: str) -> list[DataChange]:
    """The changes of data before the next step. digest: of the data that it is going to be trained on."""
    changes, data = list(checkpoint.state.data_changes), checkpoint.state.terms.get("data")
    if data is not None and data["digest"] != digest:
        changes.append(DataChange(step=checkpoint.step, set=data["set"]))
    return changes


def first_step(changes: Sequence[DataChange]) -> int:
    """The step with which the order of the present data begins."""
    return changes[-1].step if changes else 0


def held_out_digest(data: TrainSet) -> str:
    return hash_bytes(*(name.encode() for name in _held_out(data).to_pylist()))


def _held_out(data: TrainSet) -> pa.Array:
    return data.tables["index"].column("sample_id").slice(len(data)).combine_chunks()


def check_new_data(checkpoint: Checkpoint, data: TrainSet, changes: Sequence[DataChange]) -> None:
    """ResumeError where the data were made by other encoders than those before, or where they hold out what the run was
    trained on, also at another resolution; and where a set before is not there, so that this is not known."""
    compared = checkpoint.state.held_out_compared == held_out_digest(data)
    if not changes or (compared and changes == checkpoint.state.data_changes):
        return
    trained = []
    for change in changes:
        before = _open(data, str(change.set))
        if before is None:
            raise ResumeError(
                f"{checkpoint.path} was trained on set {change.set}, which is not there, so whether set {data.id} "
                "was made by the same encoders and holds out other samples is not known",
                f"Bring {data.store.path('sets')}/{change.set} back. {NEW_RUN_HINT}",
            )
        made, now = before.fingerprints, data.fingerprints
        if different := sorted(kind for kind in made.keys() & now.keys() if made[kind] != now[kind]):
            raise ResumeError(
                f"{checkpoint.path} can't be continued on set {data.id}: its shards of {' and '.join(different)} were "
                f"made by other models, or with other settings, than those of set {before.id}",
                f"Set the model and the sections text and latents back. {NEW_RUN_HINT}",
            )
        trained.append(before.tables["index"].column("sample_id").slice(0, len(before)).combine_chunks())
    held_out = _held_out(data)
    if not len(held_out):
        return
    samples = [plans.read_plan_table(data.store, name, "samples") for name in plans.list_plans(data.store)]
    known = pa.concat_tables([table.select(["sample_id", "media_id"]) for table in samples]) if samples else None
    ids = pa.concat_arrays(trained)
    both = held_out.filter(pc.is_in(_media_of(held_out, known), value_set=_media_of(ids, known)))
    if len(both):
        names = ", ".join(_name_samples(data, both.slice(0, MOST_NAMED).to_pylist()))
        raise ResumeError(
            f"set {data.id} holds out {len(both)} samples that this run was trained on: {names}"
            + (" ..." if len(both) > MOST_NAMED else ""),
            "Set `eval` and `eval_fraction` of the datasets back and run `latentpress run`, so that its losses stay "
            f"those of samples that it never saw. {NEW_RUN_HINT}",
        )


def describe_changes(data: TrainSet, id: str) -> list[str]:
    """How the samples of a training set and their captions differ from those of the set `id`: counts, and MOST_NAMED
    names of each. Empty where that set can't be read."""
    try:
        before = _open(data, id)
        return [] if before is None else [*_list_differences(before, data)]
    except (DamageError, StoreError):
        return []


def _list_differences(before: TrainSet, data: TrainSet) -> Iterator[str]:
    (old_ids, old_texts), (ids, texts) = _texts_by_sample(before), _texts_by_sample(data)
    rows = pc.index_in(ids, value_set=old_ids)
    changed = pc.fill_null(pc.not_equal(old_texts.take(rows), texts), False)
    captions = [
        f"{_caption_of(data, first)}, now {_caption_of(data, second)}"
        for first, second in zip(
            old_texts.take(rows.filter(changed)[:MOST_NAMED]).to_pylist(),
            texts.filter(changed)[:MOST_NAMED].to_pylist(),
            strict=True,
        )
    ]
    gone = old_ids.filter(pc.invert(pc.is_in(old_ids, value_set=ids)))
    groups = ((data, ids.filter(changed), "with other captions"), (data, ids.filter(pc.is_null(rows)), "new"))
    lines = 0
    for of, samples, what in (*groups, (before, gone, "no longer in it")):
        if len(samples):
            named = _name_samples(of, samples[:MOST_NAMED].to_pylist())
            if what == "with other captions":
                named = [f"{name} ({words})" for name, words in zip(named, captions, strict=True)]
            more = ", ..." if len(samples) > MOST_NAMED else ""
            yield f"{len(samples)} sample{'s' * (len(samples) > 1)} {what}: {', '.join(named)}{more}"
            lines += 1
    if not lines:
        yield "the samples and captions are the same; their repeats, weights or encoders are not"


def _texts_by_sample(data: TrainSet) -> tuple[pa.Array, pa.Array]:
    """The ids of the samples that are trained on, and of each the ids of its texts, joined by commas."""
    rows = data.tables["index"].slice(0, len(data))
    ids, lists = rows.column("sample_id").combine_chunks(), rows.column("texts").combine_chunks()
    texts = data.tables["texts"].column("text_id").take(lists.flatten()).combine_chunks()
    ends = np.cumsum(np.asarray(pc.list_value_length(lists)))
    joined = pc.binary_join(pa.ListArray.from_arrays(pa.array([0, *ends.tolist()], pa.int32()), texts), ",")
    return ids, joined


def _caption_of(data: TrainSet, texts: str) -> str:
    """The first of these texts as planned, in quotation marks; else its id."""
    id = texts.partition(",")[0]
    for name in reversed(plans.list_plans(data.store)):
        table = plans.read_plan_table(data.store, name, "texts")
        for text in table.filter(pc.equal(table["text_id"], id))["text"].to_pylist():
            return f'"{escape_unprintable(shorten(text))}"'
    return f"text {id}"


def _open(data: TrainSet, id: str) -> TrainSet | None:
    try:
        return TrainSet(data.store, id, data.store.read_json(f"sets/{id}/set.json"))
    except FileNotFoundError:
        return None


def _media_of(ids: pa.Array, known: pa.Table | None) -> pa.Array:
    """(n,) the media of samples; where no plan has a sample its own id."""
    if known is None:
        return ids
    rows = pc.index_in(ids, value_set=known.column("sample_id").combine_chunks())
    return pc.coalesce(known.column("media_id").combine_chunks().take(rows), ids)


def _name_samples(data: TrainSet, ids: list[str]) -> list[str]:
    """ "dataset/path" as planned, else the id."""
    try:
        active = plans.read_plan_table(data.store, data.meta["generation"], "active")
    except (DamageError, KeyError):
        return ids
    rows = active.filter(pc.is_in(active.column("sample_id"), value_set=pa.array(ids))).to_pylist()
    paths = {row["sample_id"]: f"{row['dataset']}/{row['path']}" for row in rows}
    return [paths.get(name, name) for name in ids]
