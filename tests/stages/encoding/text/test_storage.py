"""Embeddings in 8 bits: their error, the reported error, and scales that always exist."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cache.shards.shard import ShardMeta, ShardRow
from cache.shards.shard_io import open_reader, open_writer
from cache.shards.tensors import Array
from cache.store.damage import DamageError
from cache.store.store import Store
from stages import bucket, discover, encode_latents, encode_text, export, index, verify
from stages.encoding.model_loading import to_array
from stages.encoding.text.worker import LARGEST, quantize_tokens
from tests.forms import long
from tests.trainer.runs import lines, opened, train
from trainer.batch import make_batch
from trainer.data import stack

DTYPES = {"float8": torch.float8_e4m3fn, "int8": torch.int8}
MOST = {"float8": 0.03, "int8": 0.012}  # of the root mean square of the embeddings


NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)
TEXTS = st.lists(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 4), st.just(3)), elements=NUMBERS), min_size=1, max_size=3
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    TEXTS,
    st.sampled_from(sorted(DTYPES)),
    st.sampled_from(["arrow", "webdataset"]),
    st.booleans(),
    st.sampled_from([1, 3]),
)
def test_numbers_come_back_within_half_a_step_of_their_token(tmp_path, embeds, storage, format, half, layers) -> None:
    """Through a shard and a batch, for any numbers; a token may have only zeros. Of several layers, each has steps of
    its own."""
    dtype, precision = DTYPES[storage], torch.bfloat16 if half else torch.float32
    texts = [torch.from_numpy(text).clamp(-1e38, 1e38).to(precision) for text in embeds]
    columns = {"embeds": str(dtype).removeprefix("torch."), "embeds_scale": "float32"}
    with open_writer(Store(tmp_path), "text/f/u", ShardMeta("text", "f", "u", ""), columns, format) as out:
        for number, text in enumerate(texts):
            values, scales, error = quantize_tokens(text, dtype, layers)
            assert scales.shape == ((len(text), layers) if layers > 1 else (len(text),))
            out.add(ShardRow(f"t{number}", {"embeds": to_array(values), "embeds_scale": to_array(scales)}))
            wide = scales.view(len(text), layers).repeat_interleave(3 // layers, 1)
            assert error.largest == (values.float() * wide - text.float()).abs().max()
        path = out.finish()
    samples = []
    with open_reader(Store(tmp_path), path) as shard:
        for row in map(shard.read, range(len(texts))):
            samples.append({f"text.{name}": array for name, array in row.tensors.items()})
            samples[-1]["latent"] = Array.from_numpy(np.zeros(1, np.float32))
    ids = [str(number) for number in range(len(texts))]
    batch = make_batch(ids, "", stack(ids, samples), [len(text) for text in texts])
    assert batch.is_finite()
    restored = batch.to("cpu", torch.float32)
    assert not restored.extras and not restored.text_BLD[~restored.text_mask_BL].any()
    for row, text in enumerate(texts):
        exact = text.float()
        largest = exact.abs() if layers > 1 else exact.abs().amax(1, keepdim=True)
        steps = largest / LARGEST[dtype] / 2 if storage == "int8" else (exact.abs() / 16).maximum(largest / 448 / 1024)
        assert ((restored.text_BLD[row, : len(text)] - exact).abs() <= steps * 1.0001 + 1e-35).all()


def rewrite(home, cache: str, change) -> None:
    """Rewrite the text shards of a cache with correct checksums, after `change(tensors)` of each row."""
    store = Store(home.root)
    for name in [name for name in home.shards("text") if name.startswith(cache)]:
        with open_reader(store, f"text/{name}") as shard:
            meta, rows = shard.meta, [shard.read(row) for row in range(len(shard))]
        columns = {key: array.dtype for row in rows for key, array in row.tensors.items()}
        with open_writer(
            store, f"text/{name}".rpartition(".")[0], meta, columns, home.settings["cache"]["format"]
        ) as out:
            for row in rows:
                change(row.tensors)
                out.add(row)
            out.finish()


def make_nan(tensors: dict) -> None:
    tensors["embeds_scale"] = Array.from_numpy(np.full(tensors["embeds_scale"].shape, np.nan, np.float32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "storage", "format", "more"),
    [
        long("kandinsky5-image-t2i", "float8", "webdataset", ("text.max_length=24",)),
        ("flux2-klein", "int8", "arrow", ("text.positions=real",)),
    ],
)
def test_training_reads_what_is_stored_in_8_bits(project, often, kind, storage, format, more) -> None:
    """After an export and an import, the loss is near the loss with exact texts, and wrong scales are errors."""
    prompts = {"prompts": [{"name": "cat", "prompt": "a cat"}], "size": "64x64", "steps": 1}
    home = project(kind, cache={"format": format, "unit_mib": 1}, validation=prompts)
    home.settings["train"] = {"steps": 1, "batch_size": 2, "device": "cpu", "adapter": {"rank": 2}}
    for number in range(3):
        home.image(f"{number}.png", (64, 64), f"picture number {number} {'of several ' * number}", number)
    losses, errors = {}, {}
    for option in ("exact", storage):
        options = (f"text.storage={option}", f"output={option}", *more)
        for program in (discover, bucket, encode_text, encode_latents, index):
            report = home.run(program.run, *options)
            assert report.exit_code == 0
            errors[program] = report.details.get("storage_error")
        config = home.config(*options)
        train(config)
        losses[option] = torch.tensor(lines(config)[1])
    assert 0 < errors[encode_text]["rms_share"] < MOST[storage] and errors[encode_text]["largest"] > 0
    assert not torch.equal(*losses.values())
    assert (losses[storage] - losses["exact"]).abs().max() < 0.01 * losses["exact"].max()
    data = opened(config)
    texts = [data.sample(row).text for row in range(3)]
    assert len({text["embeds"].shape[0] for text in texts}) == 3, "at their true lengths"
    assert {text["embeds"].dtype for text in texts} == {str(DTYPES[storage]).removeprefix("torch.")}
    assert home.run(verify.run, *options).exit_code == 0

    root = str(home.folder / "there")
    assert home.run(export.run, *options, to=root).exit_code == 0
    restored = opened(home.config(*options, f"root={root}"))
    assert [restored.sample(row) for row in range(3)] == [data.sample(row) for row in range(3)]
    assert home.run(verify.run, *options, f"root={root}").exit_code == 0

    broken, cache = home.config(*options, "output=broken"), encode_text.STAGE.fingerprint(config)
    changes = [
        (make_nan, "embeds_scale has numbers that are NaN or infinite"),
        (lambda tensors: tensors.pop("embeds_scale"), "embeds_scale"),
    ]
    for change, message in changes[: often(1, 2)]:
        rewrite(home, cache, change)
        with pytest.raises(DamageError, match=message) as caught:
            train(broken)
        assert caught.value.row is not None and caught.value.id
        assert message in str(home.run(verify.run, *options).damage)
