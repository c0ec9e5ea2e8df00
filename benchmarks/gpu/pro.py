"""Video Pro, whose 19 billion weights take 38 GB in bfloat16: a LoRA with offload, and with a quantized base.

Most cases have 13 frames, because a step with 61 frames takes ten seconds or more.
"""

from benchmarks.gpu.parts import PartOptions
from benchmarks.gpu.training import Case, Model, measure_cases
from stages.rehearsing.tiny_shapes import SHAPES

LORA = {"adapter": {"rank": 32}}
STREAMS = {"offload": {"blocks": True, "streams": True}}
STREAMS_AND_ACTIVATIONS = {"offload": {"blocks": True, "streams": True, "activations": True}}
CASES = (
    Case("block offload with streams", {**LORA, **STREAMS}),
    Case("LoRA, all on the card", LORA),
    Case("block and activation offload", {**LORA, **STREAMS_AND_ACTIVATIONS}, "768x512@61"),
    Case("base nf4-bnb", {**LORA, "base_precision": "nf4-bnb"}),
    Case("checkpointing interval 2", {**LORA, "gradient_checkpointing_interval": 2}),
    Case("block offload without streams", {**LORA, "offload": {"blocks": True}}),
    Case("compiled blocks", {**LORA, "compile": "blocks"}),
)


def model(tiny: bool) -> Model:
    if not tiny:
        return Model("kandinsky5-video", "t2v-pro-sft-5s-hd", SHAPES["pro"]["video"], "768x512@13")
    return Model("kandinsky5-video", "t2v-pro-sft-5s-hd", SHAPES["tiny"]["video"], "128x128@5", tokens=8)


def run(options: PartOptions) -> None:
    cases = CASES
    if options.tiny:
        cases = tuple(Case(case.name, case.settings, case.bucket and "128x128@9") for case in CASES)
    measure_cases(options, model(options.tiny), cases)
