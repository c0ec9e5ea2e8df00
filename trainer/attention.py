"""The attention backend: which kernels compute the self-attention of the visual tokens, by diffusers' names.

The cost of this attention grows with the square of the number of tokens, and it has no mask. Attention with keys of
texts, which have masks, always uses torch's own choice ("native"). A backend is tried on small tensors before a model
is loaded, so that a backend with a missing package, an unsupported card, dtype, head size or backward pass, or wrong
results is rejected.
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend, dispatch_attention_fn

from cache.models.weights import config_errors, read_component_config
from cache.runs.training_run import RunError
from cache.sets.training_checks import train_precision
from schemas.config.pipeline import Config
from trainer.families.base import ModelFamily

NATIVE = "native"
TRIAL_BATCH, TRIAL_TOKENS, TRIAL_HEADS = 2, 200, 2  # tokens: not a multiple of the tile sizes of kernels
#: Largest relative error of output and gradients, by the norm. TF32 reaches 1e-3 and bfloat16 3e-3; SageAttention's
#: products have 8 bits.
TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 3e-2}
TOLERANCE_8_BITS = 0.15


def check_attention(config: Config, family: ModelFamily, device: torch.device) -> None:
    """Raise RunError if train.attention_backend or the backend of the validation prompts can't compute this model's
    attention on the device."""
    for _, _, error in try_backends(config, family, device):
        if error is not None:
            raise error


def try_backends(
    config: Config, family: ModelFamily, device: torch.device
) -> Iterator[tuple[str, str, RunError | None]]:
    """Yields each option in use, the backend that it names, and an error if the backend can't compute this model's
    attention."""
    backends: dict[str, str] = {"train.attention_backend": config.train.attention_backend}
    if config.validation.attention_backend and config.validation.prompts:
        backends["validation.attention_backend"] = config.validation.attention_backend
    dtype = torch.float32 if train_precision(config.train, config.model) == "float32" else torch.bfloat16
    for option, name in backends.items():
        if name == NATIVE:
            yield option, name, None
            continue
        shape = read_component_config(config.model.source, config.model.revision, config.part)
        with torch.device("meta"), config_errors(f"{config.model.source}/{config.part}/config.json"):
            model = family.untrained(shape)
        try:
            head_size = family.dense_attention(model)[1]
        except ValueError as error:
            yield option, name, RunError(f"{option} {name}: {error}", f"Set {option} to {NATIVE}.")
            continue
        problem = find_problem(name, head_size, dtype, device, has_gradient=option.startswith("train"))
        target = f"{device.type} in {str(dtype).removeprefix('torch.')} with heads of {head_size}"
        refusal = RunError(
            f"{option}: {name} can't compute attention on {target}: {problem}",
            f"Install the package that it needs, or set {option} to {NATIVE}, torch's own choice for the device.",
        )
        yield option, name, refusal if problem else None


def find_problem(name: str, head_size: int, dtype: torch.dtype, device: torch.device, has_gradient: bool) -> str | None:
    """Returns the reason why a backend can't be used; None if its output and, with `has_gradient`, its gradients match
    attention by definition. Loads the kernels of a backend from the Hub."""
    generator = torch.Generator().manual_seed(0)
    shape = (4, TRIAL_BATCH, TRIAL_TOKENS, TRIAL_HEADS, head_size)
    query, key, value, weights = torch.randn(shape, generator=generator).to(device, dtype).unbind()
    inputs = [tensor.requires_grad_(has_gradient) for tensor in (query, key, value)]
    with warnings.catch_warnings(record=True) as remarks:  # with the reasons why torch rejects a kernel
        warnings.simplefilter("always")
        try:
            with attention_backend(name):
                out_BLHD = dispatch_attention_fn(query, key, value, backend=AttentionBackendName(name))
                assert out_BLHD.shape == shape[1:], f"its output has the shape {tuple(out_BLHD.shape)}"
                results = [out_BLHD, *(torch.autograd.grad(out_BLHD, inputs, weights) if has_gradient else ())]
        except (RuntimeError, ValueError, TypeError, AssertionError, AttributeError, ImportError, OSError) as error:
            reasons = [str(error) or type(error).__name__, *(str(warning.message) for warning in remarks)]
            first_lines = [reason.strip().splitlines()[0].partition(" (Triggered")[0] for reason in reasons]
            return "; ".join(dict.fromkeys(first_lines))
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected_BLHD = define_attention(*exact)
    expected = [expected_BLHD, *(torch.autograd.grad(expected_BLHD, exact, weights.double()) if has_gradient else ())]
    tolerance = TOLERANCE[dtype] if has_gradient else max(TOLERANCE[dtype], TOLERANCE_8_BITS)
    pairs = zip(results, expected, strict=True)
    errors = [((result.detach() - exact_result).norm() / exact_result.norm()).item() for result, exact_result in pairs]
    worst = max(errors, key=lambda error: error if math.isfinite(error) else math.inf)
    return None if worst <= tolerance else f"the relative error of its numbers is {worst:.2g}"


def define_attention(query_BLHD: torch.Tensor, key_BLHD: torch.Tensor, value_BLHD: torch.Tensor) -> torch.Tensor:
    scores_BHLL = torch.einsum("blhd,bmhd->bhlm", query_BLHD, key_BLHD) / math.sqrt(query_BLHD.shape[-1])
    return torch.einsum("bhlm,bmhd->blhd", scores_BHLL.softmax(-1), value_BLHD)


def use_backend(model: Any, family: ModelFamily, name: str) -> None:
    """Use a backend, which `check_attention` has tried, for the model's self-attention of visual tokens. Raises
    ValueError if the model has no such attention."""
    for attention in family.dense_attention(model)[0]:
        attention.set_attention_backend(name)


@contextmanager
def validation_backend(model: Any, family: ModelFamily, training: str, name: str | None) -> Iterator[None]:
    """Context that uses the backend of the validation prompts, `name`, instead of the backend for training."""
    if name is None or name == training:
        yield
        return
    use_backend(model, family, name)
    try:
        yield
    finally:
        use_backend(model, family, training)
