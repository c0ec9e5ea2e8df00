"""Video Lite: a LoRA at 512x768 with 61 frames, with each memory option."""

from benchmarks.gpu.parts import PartOptions
from benchmarks.gpu.training import Case, Model, measure_cases
from stages.rehearsing.tiny_shapes import SHAPES

LORA = {"adapter": {"rank": 32}}
CASES = (
    Case("LoRA", LORA),
    Case("compiled blocks", {**LORA, "compile": "blocks"}),
    Case("block offload with streams", {**LORA, "offload": {"blocks": True, "streams": True}}),
    Case("base fp8-torchao", {**LORA, "base_precision": "fp8-torchao"}),
    Case("base nf4-bnb", {**LORA, "base_precision": "nf4-bnb"}),
    Case("checkpointing interval 2", {**LORA, "gradient_checkpointing_interval": 2}),
    Case("no checkpointing", {**LORA, "gradient_checkpointing": False}),
    Case("base int8-torchao", {**LORA, "base_precision": "int8-torchao"}),
    Case("base int8-quanto", {**LORA, "base_precision": "int8-quanto"}),
    Case("block offload without streams", {**LORA, "offload": {"blocks": True}}),
    Case("activation offload", {**LORA, "offload": {"activations": True}}),
    Case("block and activation offload", {**LORA, "offload": {"blocks": True, "streams": True, "activations": True}}),
)


def model(tiny: bool) -> Model:
    if not tiny:
        return Model("kandinsky5-video", "t2v-lite-sft-5s", SHAPES["true"]["video"], "768x512@61")
    shape = SHAPES["tiny"]["video"] | {"model_dim": 128, "num_visual_blocks": 2}  # nf4 needs multiples of 64
    return Model("kandinsky5-video", "t2v-lite-sft-5s", shape, "96x64@5", tokens=8)


def run(options: PartOptions) -> None:
    measure_cases(options, model(options.tiny), CASES)
