"""Cost of training methods at Video Lite's true size: steps with each method compared with steps without a method."""

from dataclasses import replace

from benchmarks.gpu import video_lite
from benchmarks.gpu.parts import PartOptions
from benchmarks.gpu.training import Case, measure_cases

LORA = {"adapter": {"rank": 32}}
ROUTE = {"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -3}
CASES = (
    Case("no method", LORA),
    Case("tread, half of the tokens", {**LORA, "methods": {"tread": {"routes": [ROUTE]}}}),
    Case("crepa, dinov2_vits14", {**LORA, "methods": {"crepa": {"block_index": 8}}}),
    Case(
        "rollout of one step",
        {**LORA, "methods": {"scheduled_sampling": {"probability": 1.0, "max_step_offset": 1}}},
    ),
    Case("regularization data", {**LORA, "methods": {"regularization": {}}}),
    Case("input perturbation", {**LORA, "methods": {"input_perturbation": {}}}),
)
TINY_ROUTE, TINY_BLOCK = {"selection_ratio": 0.5, "start_layer_idx": 0, "end_layer_idx": 1}, {"block_index": 0}
TINY = {"tread": {"routes": [TINY_ROUTE]}, "crepa": TINY_BLOCK}  # for a transformer of two blocks


def shrink(case: Case) -> Case:
    methods = {name: TINY.get(name, settings) for name, settings in case.settings.get("methods", {}).items()}
    return replace(case, settings={**case.settings, "methods": methods})


def run(options: PartOptions) -> None:
    model = video_lite.model(options.tiny)
    if not options.tiny:
        model = replace(model, bucket="768x512@29")
    measure_cases(options, model, [shrink(case) for case in CASES] if options.tiny else CASES)
