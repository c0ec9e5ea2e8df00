"""Operations beside what is known of the layers."""

import sys

import pytest
import torch

from benchmarks import scale_cost
from benchmarks.memory_table import Case
from examples.tiny_models import make_untrained
from examples.tiny_shapes import SHAPES

pytestmark = pytest.mark.slow
TOKENS = 16


def test_a_step_of_a_small_model() -> None:
    """Two operations for each weight of a linear layer and each token that it sees, once forward; full rank four times.
    Of a LoRA the frozen weights need no gradients; the adapter itself is a quarter more in so small a model."""
    shape = SHAPES["tiny"]["image"] | {"visual_cond": False}
    case = Case("kandinsky5-image", "t2i-lite-sft", shape, "512x512")
    lora, full = scale_cost.count_step(case, TOKENS)
    visual, width, feed, tokens = shape["num_visual_blocks"], shape["model_dim"], shape["ff_dim"], 32 * 32
    linear = 2 * visual * tokens * (4 * width**2 + 2 * width * feed)  # self-attention and feed-forward
    linear += 2 * visual * 2 * (tokens + TOKENS) * width**2  # cross-attention
    attention = 2 * visual * 2 * width * tokens * (tokens + TOKENS)
    assert full / 4 == pytest.approx(linear + attention, rel=0.05)
    assert 1 < lora / (3 * linear + 4 * attention) < 1.25


def test_the_language_model_takes_two_operations_for_each_weight_and_token(monkeypatch) -> None:
    sizes = {part: shape for part, shape in SHAPES["tiny"].items() if part == "qwen"}
    monkeypatch.setitem(SHAPES, "true", SHAPES["true"] | sizes)
    with torch.device("meta"):
        language = make_untrained("qwen").model.language_model
    weights = sum(weight.numel() for name, weight in language.layers.named_parameters() if weight.ndim == 2)
    assert scale_cost.count_text("qwen", TOKENS) == pytest.approx(2 * TOKENS * weights, rel=0.1)


def test_the_table(monkeypatch, capsys) -> None:
    shapes = SHAPES["tiny"]
    monkeypatch.setitem(SHAPES, "true", shapes)
    monkeypatch.setattr(scale_cost, "CASES", {"tiny": Case("sana", "sana-1.6b-1024px", shapes["sana"], "256x256")})
    monkeypatch.setattr(sys, "argv", ["scale_cost", "--peak", "1", "--share", "0.5"])
    scale_cost.main()
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| tiny")]
    (operations, hours) = rows
    assert float(hours[1]) == pytest.approx(float(operations[1]) * 1e6 / 0.5 / 3600, rel=0.02)
