"""Quantization and offload: each option loads, runs and stays within its error; unsupported options are errors with a
next step. Also passes of neighboring lengths."""

import shutil
from copy import copy
from functools import cache
from pathlib import Path

import bitsandbytes
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import USAGE
from stages import bucket, discover, encode_text
from stages.encoding.stage_registry import text_fingerprint_inputs as parts
from stages.encoding.text.base import OptionError
from stages.encoding.text.reader import split_by_length
from tests.forms import long

CAPTIONS = ["", "A small grey cat looks at the camera with green eyes.", "words that go on " * 20]


def relative(results, expected) -> float:
    """|difference| / |value| over all embeddings."""
    first, second = (torch.cat([result.embeds.float() for result in batch]) for batch in (results, expected))
    return ((first - second).norm() / second.norm()).item()


@pytest.fixture(scope="module")
def plain(make, encoded):
    return cache(lambda kind: encoded(make(kind), CAPTIONS))


@pytest.mark.parametrize("kind", ["sana", long("kandinsky5-image-i2i"), long("wan2.1-t2v")])
@pytest.mark.parametrize(("quantization", "least", "most"), [("bf16", 1e-3, 0.02), ("int8-quanto", 1e-3, 0.04)])
def test_quantised_weights_stay_within_their_error(
    make, encoded, plain, kind, quantization, least, most, record_property
):
    encoder = make(kind, quantization=quantization)
    results = encoded(encoder, CAPTIONS)
    error = relative(results, plain(kind))
    record_property("relative_error", error)
    print(f"{kind}, {quantization}: {error:.4f}")
    assert {result.embeds.dtype for result in results} == {torch.float32}
    assert least < error < most


def by_unpacking(A, B, out=None, state=None):
    """The result of the CPU kernel for matrices that bitsandbytes packed for AVX512-BF16, on any CPU."""
    # A private function: bitsandbytes has no public function to unpack matrices.
    matrix, as_before = bitsandbytes.functional._convert_weight_packed_for_cpu_inverse(B, copy(state))
    as_before.absmax = state.absmax.T.reshape(-1).float()  # bitsandbytes leaves them transposed
    matrix_whole = bitsandbytes.functional.dequantize_4bit(matrix.reshape(-1, 1), as_before)
    return torch.nn.functional.linear(A, matrix_whole.to(A.dtype))


@pytest.fixture(params=[False, True], ids=["plain", "packed"])
def packing(request, monkeypatch) -> bool:
    """bitsandbytes' own switch: on a CPU with AVX512-BF16, a layer's matrix is packed when it is first used."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: request.param)
    monkeypatch.setattr("bitsandbytes.functional.gemv_4bit", by_unpacking)
    return request.param


@pytest.mark.parametrize("kind", ["sana", long("kandinsky5-image-i2i"), long("wan2.1-t2v")])
def test_nf4_stays_within_its_error_on_cpus_that_pack_and_on_others(
    make, encoded, plain, packing, kind, record_property
):
    error = relative(encoded(make(kind, quantization="nf4-bnb"), CAPTIONS), plain(kind))
    record_property("relative_error", error)
    print(f"{kind}, nf4-bnb, {'packed' if packing else 'plain'}: {error:.4f}")
    assert 0.04 < error < 0.4


@pytest.mark.slow
def test_nf4_of_t5_leaves_what_its_class_keeps_in_float32(make):
    assert make("wan2.1-t2v", quantization="nf4-bnb").unquantized == ["layer.1.DenseReluDense.wo"]


def test_matrices_that_nf4_can_not_pack_stay_as_they_are_and_this_is_said_once(project, packing, tmp_path):
    """A tiny Gemma-2 whose feed-forward matrices have an odd side."""
    home = project("sana")
    checkpoint = Path(home.settings["model"]["path"])
    shutil.copytree(checkpoint, tmp_path / "odd")
    config = transformers.Gemma2Config.from_pretrained(checkpoint / "text_encoder", intermediate_size=120)
    transformers.Gemma2Model(config).save_pretrained(tmp_path / "odd" / "text_encoder")
    home.settings["model"]["path"] = str(tmp_path / "odd")
    for number in range(3):
        home.image(f"{number}.png", caption=f"picture {number}", seed=number)
    for program in (discover, bucket):
        home.run(program.run)
    report = home.run(encode_text.run, "text.quantization=nf4-bnb")
    assert report.exit_code == 0 and report.done == 4
    [remark] = report.details["remarks"]
    assert "nf4-bnb can't pack" in remark["remark"] and (remark["items"], remark["of"]) == (4, 4)
    assert remark["remark"].endswith(": mlp.down_proj, mlp.gate_proj, mlp.up_proj")


@pytest.mark.parametrize("kind", ["sana", long("kandinsky5-image-i2i"), long("wan2.1-t2v")])
def test_offload_by_blocks_gives_the_same_numbers(make, encoded, plain, kind):
    for result, expected in zip(encoded(make(kind, offload="blocks"), CAPTIONS), plain(kind), strict=True):
        assert torch.equal(result.embeds, expected.embeds)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("sana", {"attention": "sdpa"}, "text.attention"),
        ("wan2.1-t2v", {"attention": "flash_attention_2"}, "adds a bias"),
        ("kandinsky5-image-t2i", {"attention": "flash_attention_2"}, "needs a CUDA device"),
        ("kandinsky5-image-t2i", {"quantization": "nf4-bnb", "offload": "blocks"}, "text.offload: blocks"),
    ],
)
def test_what_cannot_be_had_is_refused(make, kind, options, message):
    with pytest.raises(OptionError, match=message) as caught:
        make(kind, **options)
    assert caught.value.exit_code == USAGE and caught.value.next_step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype", "option", "value", "default"),
    [
        long("kandinsky5-image-i2i", "float32", "attention", "sdpa", None),
        ("sana", "float32", "attention", "eager", None),
        long("kandinsky5-image-i2i", "bfloat16", "quantization", "bf16", "no_change"),
        ("sana", "bfloat16", "quantization", "bf16", "no_change"),
    ],
)
def test_what_gives_the_same_numbers_has_the_same_fingerprint(
    make, encoded, project, kind, dtype, option, value, default
):
    """An option whose value equals the default behavior."""
    home = project(kind)
    home.settings["datasets"][0] |= {"conditioning_data": "media"} if kind.endswith("i2i") else {}
    precision = f"text.precision={dtype}"
    assert parts(home.config(precision, f"text.{option}={value}")) == parts(home.config(precision))
    results, expected = (
        encoded(make(kind, getattr(torch, dtype), **{option: option_value}), CAPTIONS)
        for option_value in (value, default)
    )
    for first, second in zip(results, expected, strict=True):
        assert torch.equal(first.embeds, second.embeds)
        assert first.pooled is second.pooled is None or torch.equal(first.pooled, second.pooled)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(0, 300))
def test_a_batch_is_divided_with_the_least_padding(costs, overhead):
    passes = split_by_length(costs, overhead)
    assert sorted(row for rows in passes for row in rows) == list(range(len(costs)))

    def tokens(passes):
        return sum(overhead + len(rows) * max(costs[row] for row in rows) for rows in passes)

    order = sorted(range(len(costs)), key=costs.__getitem__)
    cuts = [[order], [[row] for row in order], *([order[:cut], order[cut:]] for cut in range(1, len(order)))]
    assert all(tokens(passes) <= tokens(other) for other in cuts)
    assert len(split_by_length(costs, 300 * 40)) == 1
