"""Sana 1.6B: full rank at 1024x1024."""

from typing import Any

from benchmarks.gpu.parts import PartOptions
from benchmarks.gpu.training import Case, Model, measure_cases
from stages.rehearsing.tiny_shapes import SHAPES


def full(optimizer: str, **settings: Any) -> dict[str, Any]:
    return {"adapter": {"type": "full"}, "optimizer": {"name": optimizer, "lr": 1e-5, "warmup": 1}, **settings}


PURE = {"weight_precision": "bfloat16"}
CASES = (
    Case("bfloat16 weights, optimi-adamw", full("optimi-adamw", **PURE)),
    Case("float32 masters, adamw-fused", full("adamw-fused")),
    Case("float32 masters, bnb-adamw8bit", full("bnb-adamw8bit")),
    Case("float32 masters, bnb-adamw8bit-paged", full("bnb-adamw8bit-paged")),
    Case("bfloat16 weights, optimi-lion", full("optimi-lion", **PURE)),
    Case("bfloat16 weights, no checkpointing", full("optimi-adamw", **PURE, gradient_checkpointing=False)),
    Case("bfloat16 weights, checkpointing interval 2", full("optimi-adamw", **PURE, gradient_checkpointing_interval=2)),
    Case("bfloat16 weights, activation offload", full("optimi-adamw", **PURE, offload={"activations": True})),
    Case("bfloat16 weights, batch 4", full("optimi-adamw", **PURE, batch_size=4)),
    Case("bfloat16 weights, compiled blocks", full("optimi-adamw", **PURE, compile="blocks")),
    Case("LoRA", {"adapter": {"rank": 32}}),
)


def model(tiny: bool) -> Model:
    shape, bucket = SHAPES["tiny" if tiny else "true"]["sana"], "128x128" if tiny else "1024x1024"
    return Model("sana", "sana-1.6b-1024px", shape, bucket, 8 if tiny else 300)


def run(options: PartOptions) -> None:
    measure_cases(options, model(options.tiny), CASES)
