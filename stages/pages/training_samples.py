"""The training samples that a run's validation prompts name, as files to compare the run's own samples with.

A prompt names a training sample where it is its caption (i2i: with the same source image). For each such prompt
<output>/<run>/samples/training/<prompt>/ has `original.png|mp4`, the pixels that were encoded,
`reconstruction.png|mp4`, their cached latents decoded again, and `sample.json`, which says what sample it is. The
original is left out where its file is not on this machine.
"""

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache.sets.set_lookup import current_plan
from cache.store.files import make_folders, replacing
from cache.store.store import Store
from schemas import json_records
from schemas.cli.console import Console
from schemas.config.encoding import StageWorkers
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.geometry import Bucket
from stages.media.files import MediaError
from stages.pages.plan_table import EncodedPlan, PlanTable
from stages.pages.sample_preview import SamplePixels, make_original_reader, read_samples

FOLDER = "samples/training"
ORIGINAL, RECONSTRUCTION, DESCRIPTION = "original", "reconstruction", "sample.json"
#: (path without suffix, uint8 frames_THWC): writes a picture or clip.
WriteFrames = Callable[[Path, np.ndarray], None]
#: -> (autoencoder, its device)
LoadAutoencoder = Callable[[], tuple[Any, Any]]


def write_training_samples(
    config: Config, folder: Path, load: LoadAutoencoder, resources: StageWorkers, write: WriteFrames, console: Console
) -> None:
    """Write those that are not there yet, and remove those that no prompt names. folder: of the run."""
    try:
        table = PlanTable(store := Store(config.root), config, current_plan(store, config))
        encoded = EncodedPlan(table)
    except LatentpressError:  # trained on a set that was made elsewhere: there is no plan, or not its checkpoint
        return
    todo, sampled = dict[str, int](), find_training_samples(encoded)
    for stale in (folder / FOLDER).glob("*"):
        if stale.name not in sampled:
            shutil.rmtree(stale)
    for prompt, row in sampled.items():
        if _read_id(folder / FOLDER / prompt) != (table.active.column("sample_id")[row].as_py(), encoded.folder):
            todo[prompt] = row
    if not todo:
        return
    autoencoder, _ = load()
    with closing(read_samples(table, todo.values(), make_original_reader, resources.workers)) as originals:
        for prompt, (item, original) in zip(todo, originals, strict=True):
            sample = {"sample_id": item.sample["sample_id"], "dataset": item.active_row["dataset"]}
            about = sample | {"path": item.path, "bucket": str(item.bucket), "latents": encoded.folder}
            try:
                frames = _decode(encoded, autoencoder, item.sample["sample_id"], str(item.bucket))
            except LatentpressError as error:
                console.warn(f"the training sample of prompt {prompt} can't be decoded: {error.message}")
                continue
            _write_files(folder / FOLDER / prompt, about, original, frames, write)


def find_training_samples(encoded: EncodedPlan) -> dict[str, int]:
    """prompt -> row of `encoded.table.active`: the first encoded training sample that the prompt is a caption of."""
    table = encoded.table
    texts = {row["name"]: row["text"] for row in table.plan.info["validation"]}
    trained = pc.equal(table.active.column("role"), "train").to_numpy() & encoded.encoded
    column = table.active.column("texts").combine_chunks()
    rows, ids = pc.list_parent_indices(column).to_numpy(), pc.list_flatten(column)
    rows_by_text = dict[str, int]()
    is_named = pc.is_in(ids, value_set=pa.array(texts.values(), ids.type)).to_numpy(zero_copy_only=False)
    for index in np.flatnonzero(is_named & trained[rows]):
        rows_by_text.setdefault(ids[int(index)].as_py(), int(rows[index]))
    return {name: rows_by_text[text] for name, text in texts.items() if text in rows_by_text}


def _read_id(folder: Path) -> tuple[str, str] | None:
    """(sample id, folder of its latents) of what is there."""
    try:
        about = json_records.read_record(folder / DESCRIPTION)
        return about["sample_id"], about["latents"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _decode(encoded: EncodedPlan, autoencoder: Any, sample_id: str, bucket: str) -> np.ndarray:
    from stages.encoding.vae.base import decode_tensor

    [stored] = encoded.latents.read([sample_id]).values()
    if isinstance(stored, LatentpressError):
        raise stored
    path, row = stored
    family = encoded.table.config.model.family_spec
    return decode_tensor(family, autoencoder, path, row, "latent", Bucket.parse(bucket))


def _write_files(
    folder: Path, about: dict[str, str], original: SamplePixels | MediaError, frames: np.ndarray, write: WriteFrames
) -> None:
    make_folders(folder)
    (folder / DESCRIPTION).unlink(missing_ok=True)  # until the files are those that it describes
    for file in folder.glob(f"{ORIGINAL}.*"):  # of another sample
        file.unlink()
    if not isinstance(original, MediaError):
        write(folder / ORIGINAL, original.frames)
    write(folder / RECONSTRUCTION, frames)
    with replacing(folder / DESCRIPTION) as temporary:
        temporary.write_bytes(json_records.format_record(about))
