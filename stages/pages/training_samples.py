"""The training samples whose captions are a run's validation prompts, as files to compare with the run's own samples.

A prompt names a training sample if it is the sample's caption (i2i: with the same source image). For each such prompt,
<output>/<run>/samples/training/<prompt>/ contains `original.png|mp4`, the pixels that were encoded,
`reconstruction.png|mp4`, decoded from the cached latents, and `sample.json`, which identifies the sample. The original
is left out if its file is not on this machine.
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
from cache.store.files import replacing
from cache.store.store import Store
from schemas.cli.console import Console
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.json_records import Record
from stages.media.files import MediaError
from stages.pages.pictures import output_suffix, write_output
from stages.pages.plan_samples import EncodedPlan, PlanTable, read_samples

FOLDER = "samples/training"
ORIGINAL, RECONSTRUCTION, DESCRIPTION = "original", "reconstruction", "sample.json"


class TrainingSample(Record):
    """The content of sample.json. latents: folder of the latents' shards in the root."""

    sample_id: str
    dataset: str
    path: str
    bucket: str
    latents: str


def write_training_samples(
    config: Config, run_folder: Path, load: Callable[[], tuple[Any, Any]], workers: int, console: Console
) -> None:
    """Write the training samples that are missing in the run's folder, and remove the samples that no prompt names.
    load: function that returns (autoencoder, device)."""
    try:
        table = PlanTable(store := Store(config.root), config, current_plan(store, config))
        encoded = EncodedPlan(table)
    except LatentpressError:  # the set was made on another machine: the plan or the checkpoint is not on this one
        return
    folder, rows, abouts = run_folder / FOLDER, find_training_samples(encoded), dict[str, TrainingSample]()
    for stale in folder.glob("*"):
        if stale.name not in rows and not stale.name.startswith("."):  # another process may be writing a hidden folder
            shutil.rmtree(stale)
    for prompt, row in rows.items():
        sample = table.active.select(["sample_id", "dataset", "path", "bucket"]).slice(row, 1).to_pylist()[0]
        about = TrainingSample(**sample, latents=encoded.folder)
        if TrainingSample.try_read(folder / prompt / DESCRIPTION) != about:
            abouts[prompt] = about
    if not abouts:
        return
    autoencoder, _ = load()
    from stages.encoding.vae.base import decode_tensor

    suffix, family = output_suffix(config), config.model.family_spec
    with closing(read_samples(table, [rows[prompt] for prompt in abouts], workers)) as originals:
        for (prompt, about), (item, original) in zip(abouts.items(), originals, strict=True):
            try:
                path, shard_row = encoded.latents.read(about.sample_id)
                frames = decode_tensor(family, autoencoder, path, shard_row, "latent", item.bucket)
            except LatentpressError as error:
                console.warn(f"the training sample of prompt {prompt} can't be decoded: {error.message}")
                continue
            with replacing(folder / prompt) as temporary:
                if not isinstance(original, MediaError):
                    write_output(temporary / f"{ORIGINAL}{suffix}", original.frames, config.clip_rate)
                write_output(temporary / f"{RECONSTRUCTION}{suffix}", frames, config.clip_rate)
                about.write(temporary / DESCRIPTION)


def find_training_samples(encoded: EncodedPlan) -> dict[str, int]:
    """Find prompt -> row number of `encoded.table.active`: the first encoded training sample with the prompt as a
    caption."""
    table = encoded.table
    texts = {prompt.name: prompt.text for prompt in table.plan.info.validation}
    trained = pc.equal(table.active.column("role"), "train").to_numpy() & encoded.is_encoded
    column = table.active.column("texts").combine_chunks()
    rows, ids = pc.list_parent_indices(column).to_numpy(), pc.list_flatten(column)
    rows_by_text = dict[str, int]()
    is_named = pc.is_in(ids, value_set=pa.array(texts.values(), ids.type)).to_numpy(zero_copy_only=False)
    for index in np.flatnonzero(is_named & trained[rows]):
        rows_by_text.setdefault(ids[int(index)].as_py(), int(rows[index]))
    return {name: rows_by_text[text] for name, text in texts.items() if text in rows_by_text}
