"""Image Lite: a LoRA at 1024x1024."""

from benchmarks.gpu.parts import PartOptions
from benchmarks.gpu.training import Case, Model, measure_cases
from stages.rehearsing.tiny_shapes import SHAPES

LORA = {"adapter": {"rank": 32}}
CASES = (
    Case("LoRA", LORA),
    Case("base int8-torchao", {**LORA, "base_precision": "int8-torchao"}),
    Case("base nf4-bnb", {**LORA, "base_precision": "nf4-bnb"}),
    Case("block offload with streams", {**LORA, "offload": {"blocks": True, "streams": True}}),
    Case("checkpointing interval 2", {**LORA, "gradient_checkpointing_interval": 2}),
    Case("no checkpointing", {**LORA, "gradient_checkpointing": False}),
    Case("compiled blocks", {**LORA, "compile": "blocks"}),
)


def model(tiny: bool) -> Model:
    shape = {"visual_cond": False} | ({"model_dim": 128} if tiny else {})
    shape = SHAPES["tiny" if tiny else "true"]["image"] | shape
    return Model("kandinsky5-image", "t2i-lite-sft", shape, "64x64" if tiny else "1024x1024", 8 if tiny else 256)


def run(options: PartOptions) -> None:
    measure_cases(options, model(options.tiny), CASES)
