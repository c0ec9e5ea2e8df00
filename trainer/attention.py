"""`train.attention` and `validation.attention`: the kernels of the attention of visual tokens.

The cost of this attention grows with the square of the number of tokens. In some families it is a self-attention; in
others, image and text attend to each other, with a mask if the texts of a batch have different lengths. Attention only
with keys of texts always uses torch's own choice. Kernels are tried on small tensors before a model is loaded, so that
a missing package, an unsupported card, dtype, head size, mask or backward pass, or wrong results are rejected.
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend

from cache.models.places import read_part_config
from cache.models.weights import config_errors
from cache.runs.training_run import RunError
from cache.sets.training_checks import train_precision
from schemas.config.pipeline import Config
from trainer.families.base import ModelFamily, on_meta
from trainer.joint_attention import EXACT_LENGTHS, MASKED, attend

AUTO, SDPA, VARLEN = "auto", "sdpa", "flash-varlen"
#: Value of the options -> diffusers' backend.
BACKENDS = {
    SDPA: AttentionBackendName.NATIVE,
    "cudnn": AttentionBackendName._NATIVE_CUDNN,
    "flash": AttentionBackendName.FLASH,
    VARLEN: EXACT_LENGTHS,
    "sage": AttentionBackendName.SAGE,
}
TRIAL_BATCH, TRIAL_TOKENS, TRIAL_HEADS = 2, 200, 2  # tokens: not a multiple of the tile sizes of kernels
TRIAL_PADDING = slice(40, 95)  # of the second sample: a text before an image
#: Largest relative error of output and gradients, by the norm. TF32 reaches 1e-3 and bfloat16 3e-3; SageAttention's
#: products have 8 bits.
TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 3e-2}
TOLERANCE_8_BITS = 0.15


def choose_attention(config: Config, family: ModelFamily, device: torch.device) -> str:
    """Returns the name of the kernels for training. Raises RunError if train.attention or validation.attention can't
    compute this model's attention on the device."""
    chosen = SDPA
    for option, name, error in try_kernels(config, family, device):
        if error is not None:
            raise error
        chosen = name if option == "train.attention" else chosen
    return chosen


def try_kernels(
    config: Config, family: ModelFamily, device: torch.device
) -> Iterator[tuple[str, str, RunError | None]]:
    """Yields each option in use, the name of its kernels (a choice for "auto"), and an error if the kernels can't
    compute this model's attention."""
    names: dict[str, str] = {"train.attention": config.train.attention}
    if config.validation.attention and config.validation.prompts:
        names["validation.attention"] = config.validation.attention
    for option, name in names.items():
        has_gradient = option == "train.attention"
        is_masked = family.MASKS_TEXT and has_gradient and config.train.batch_size > 1  # a prompt is not padded
        if name == SDPA or (name == AUTO and not (is_masked and device.type == "cuda")):
            yield option, SDPA, None
            continue
        tried = VARLEN if name == AUTO else name
        problem = _find_refusal(config, family, option, tried, is_masked) or _try(
            config, family, option, tried, device, has_gradient, is_masked
        )
        if name == AUTO:
            yield option, SDPA if problem else tried, None
        else:
            yield option, name, problem


def _find_refusal(config: Config, family: ModelFamily, option: str, name: str, is_masked: bool) -> RunError | None:
    """Returns an error if the kernels don't suit the family."""
    title = config.model.family
    if name == VARLEN and not family.MASKS_TEXT:
        reason = f"{option} {name}: the attention of {title} has no padding"
        return RunError(reason, f"Set {option} to {AUTO}, {SDPA}, cudnn or flash.")
    if is_masked and BACKENDS[name] not in MASKED:
        names = ", ".join(each for each, backend in BACKENDS.items() if backend in MASKED)
        reason = f"{option} {name}: its kernels have no mask, and {title} masks the padding of texts in a batch"
        step = f"Set {option} to {names} or {AUTO}, or set train.batch_size to 1 and raise train.accumulate."
        return RunError(reason, step)
    return None


def _try(
    config: Config,
    family: ModelFamily,
    option: str,
    name: str,
    device: torch.device,
    has_gradient: bool,
    is_masked: bool,
) -> RunError | None:
    shape = read_part_config(config.model, config.part)
    with on_meta(), config_errors(f"{config.model.source}/{config.part}/config.json"):
        model = family.untrained(shape)
    try:
        head_size = family.dense_attention(model)[1]
    except ValueError as error:
        return RunError(f"{option} {name}: {error}", f"Set {option} to {AUTO} or {SDPA}.")
    dtype = torch.float32 if train_precision(config.train, config.model) == "float32" else torch.bfloat16
    problem = find_problem(name, head_size, dtype, device, has_gradient, is_masked or name == VARLEN)
    target = f"{device.type} in {str(dtype).removeprefix('torch.')} with heads of {head_size}"
    refusal = RunError(
        f"{option}: {name} can't compute attention on {target}: {problem}",
        f"Install the package that it needs, or set {option} to {AUTO} or {SDPA}, torch's own choice for the device.",
    )
    return refusal if problem else None


def find_problem(
    name: str, head_size: int, dtype: torch.dtype, device: torch.device, has_gradient: bool, is_masked: bool = False
) -> str | None:
    """Returns the reason why kernels can't be used; None if their output and, with `has_gradient`, their gradients
    match attention by definition. is_masked: whether a sample has padding, whose output does not count."""
    generator, backend = torch.Generator().manual_seed(0), BACKENDS[name]
    shape = (4, TRIAL_BATCH, TRIAL_TOKENS, TRIAL_HEADS, head_size)
    query, key, value, weights = torch.randn(shape, generator=generator).to(device, dtype).unbind()
    inputs = [tensor.requires_grad_(has_gradient) for tensor in (query, key, value)]
    real_BS = torch.ones(shape[1:3], dtype=torch.bool, device=device)
    real_BS[1, TRIAL_PADDING] = not is_masked
    weights = weights * real_BS[..., None, None]
    with warnings.catch_warnings(record=True) as remarks:  # with the reasons why torch rejects a kernel
        warnings.simplefilter("always")
        try:
            with nullcontext() if backend == EXACT_LENGTHS else attention_backend(backend):  # checks its package
                out_BSHD = attend(query, key, value, real_BS if is_masked else None, backend)
                assert out_BSHD.shape == shape[1:], f"its output has the shape {tuple(out_BSHD.shape)}"
                gradients = torch.autograd.grad(out_BSHD, inputs, weights) if has_gradient else ()
                results = [out_BSHD * real_BS[..., None, None], *gradients]
        except (RuntimeError, ValueError, TypeError, AssertionError, AttributeError, ImportError, OSError) as error:
            reasons = [str(error) or type(error).__name__, *(str(warning.message) for warning in remarks)]
            first_lines = [reason.strip().splitlines()[0].partition(" (Triggered")[0] for reason in reasons]
            return "; ".join(dict.fromkeys(first_lines))
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected_BSHD = define_attention(exact[0], exact[1], exact[2], real_BS) * real_BS[..., None, None]
    expected = [expected_BSHD, *(torch.autograd.grad(expected_BSHD, exact, weights.double()) if has_gradient else ())]
    tolerance = TOLERANCE[dtype] if has_gradient else max(TOLERANCE[dtype], TOLERANCE_8_BITS)
    pairs = zip(results, expected, strict=True)
    errors = [((result.detach() - exact_result).norm() / exact_result.norm()).item() for result, exact_result in pairs]
    worst = max(errors, key=lambda error: error if math.isfinite(error) else math.inf)
    return None if worst <= tolerance else f"the relative error of its numbers is {worst:.2g}"


def define_attention(
    query_BSHD: torch.Tensor, key_BSHD: torch.Tensor, value_BSHD: torch.Tensor, real_BS: torch.Tensor
) -> torch.Tensor:
    scores_BHSS = torch.einsum("bshd,bthd->bhst", query_BSHD, key_BSHD) / math.sqrt(query_BSHD.shape[-1])
    scores_BHSS = scores_BHSS.masked_fill(~real_BS[:, None, None], -math.inf)
    return torch.einsum("bhst,bthd->bshd", scores_BHSS.softmax(-1), value_BSHD)


def use_kernels(model: Any, family: ModelFamily, name: str) -> None:
    """Use kernels, which `choose_attention` has tried, for the model's attention of visual tokens. name: not "auto".
    A model without such attention keeps its own kernels."""
    for attention in _list_layers(model, family):
        attention.processor._attention_backend = BACKENDS[name]


def _list_layers(model: Any, family: ModelFamily) -> list[Any]:
    try:
        return family.dense_attention(model)[0]
    except ValueError:
        return []


@contextmanager
def validation_attention(model: Any, family: ModelFamily, name: str | None) -> Iterator[None]:
    """Context that uses the kernels of the validation prompts instead of the kernels for training. name: value of
    validation.attention."""
    layers = _list_layers(model, family) if name is not None else []
    before = [attention.processor._attention_backend for attention in layers]
    if name is not None:
        use_kernels(model, family, SDPA if name == AUTO else name)
    try:
        yield
    finally:
        for attention, backend in zip(layers, before, strict=True):
            attention.processor._attention_backend = backend
