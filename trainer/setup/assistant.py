"""An assistant: a frozen LoRA with which a checkpoint that was distilled to few steps is trained (`model.assistant`).

It takes back the distillation. Training steps and the eval loss compute with it, so that what is trained need not do
that; samples are made without it, as what was trained is used later, and no file of the run has it. Ostris' training
adapters of distilled models are such files.
"""

from typing import Any

import torch
import torch.nn.functional as F

from trainer.adapters.files import check_finite, load_layers
from trainer.adapters.header import AdapterFile, check_fits
from trainer.adapters.layers import DOWN, UP
from trainer.adapters.names import resolve_names
from trainer.setup.attach import module_size, name_modules

BUFFERS = ("assistant_down", "assistant_up")


class Assistant:
    """A hook that adds the LoRA of a module to its output, while it is active; one for all modules of a model."""

    def __init__(self) -> None:
        self.active = True

    def __call__(self, module: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        if not self.active:
            return output
        down, up = module.assistant_down, module.assistant_up
        return output + F.linear(F.linear(inputs[0].to(down.dtype), down), up).to(output.dtype)


def add_assistant(model: Any, file: AdapterFile, dtype: torch.dtype) -> None:
    """Add the LoRA to a model, quantized or not, before what is trained is added. AdapterError where it does not fit.

    Its matrices are buffers in `dtype`, which are in no state_dict.
    """
    file, modules = match_modules(model, file)
    assistant = Assistant()
    for name, layer in load_layers(file).items():
        part = modules[name]
        matrices = {DOWN: layer.tensors[DOWN], UP: layer.scale * layer.tensors[UP].double()}
        for buffer, (end, matrix) in zip(BUFFERS, matrices.items(), strict=True):
            check_finite(matrix, dtype, f"model.assistant: {file.path}: {layer.keys[end]}")
            part.register_buffer(buffer, matrix.to(part.weight.device, dtype), persistent=False)
        part.register_forward_hook(assistant)
    model.assistant = assistant


def match_modules(model: Any, file: AdapterFile) -> tuple[AdapterFile, dict[str, Any]]:
    """The file with module paths for names, and the model's linear layers by them. AdapterError where the file adapts
    another module or one of another size. model: on any device, quantized or not."""
    parts = {name: model.get_submodule(path) for name, path in name_modules(model, [".*"]).items()}
    linear = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Linear)}
    file = resolve_names(file, linear, "the transformer")
    check_fits(file, {name: module_size(part) for name, part in linear.items()}, "the transformer")
    return file, linear


def assistant_bytes(model: Any) -> int:
    buffers = ((name.rpartition(".")[2], buffer) for name, buffer in model.named_buffers())
    return sum(buffer.numel() * buffer.element_size() for name, buffer in buffers if name in BUFFERS)
