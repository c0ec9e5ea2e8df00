"""The base class of the families in `trainer/families/`, with defaults."""

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from cache.models.weights import load_part
from schemas.family import Family, Task
from trainer.batch import Batch


@dataclass(frozen=True)
class TokenGrid:
    """The order of a transformer's tokens: frames x rows x columns of patches, and the longest text of the batch.

    square: above 1, a frame's tokens go square by square (rows of squares), each of so many rows and columns of tokens,
    which stay together where tokens are dropped.
    """

    frames: int
    rows: int
    columns: int
    text_length: int
    square: int = 1

    @property
    def tokens(self) -> int:
        return self.frames * self.rows * self.columns

    def flatten(self, values_BTHWD: torch.Tensor) -> torch.Tensor:
        """(B, N, D), in the order of the tokens, of values on the grid."""
        if self.square > 1:
            squares = values_BTHWD.unflatten(3, (-1, self.square)).unflatten(2, (-1, self.square))
            values_BTHWD = squares.transpose(3, 4)  # B T H/s W/s s s D
        return values_BTHWD.flatten(1, -2)


@dataclass(frozen=True)
class BlockTokens:
    """The places of the visual tokens in the hidden states (B, L, D) that a visual block has as its first argument and
    as its output, or one of several outputs, at the index `output`. last: whether a text is before the visual tokens
    along the second axis; else they are the first, and a text may follow."""

    output: int | None = None
    last: bool = False

    def read_output(self, output: Any) -> torch.Tensor:
        return output if self.output is None else output[self.output]

    def replace_output(self, output: Any, hidden: torch.Tensor) -> Any:
        if self.output is None:
            return hidden
        return *output[: self.output], hidden, *output[self.output + 1 :]

    def divide(self, values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, L, ...) -> those of `count` visual tokens, and the text's."""
        text = values.shape[1] - count
        return (values[:, text:], values[:, :text]) if self.last else (values[:, :count], values[:, count:])

    def join(self, visual: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """The inverse of `divide`."""
        if not text.shape[1]:
            return visual
        return torch.cat([text, visual] if self.last else [visual, text], 1)


FIRST_TOKENS = BlockTokens()


def change_arguments(block: torch.nn.Module, change: Callable[[dict[str, Any]], dict[str, Any]]) -> RemovableHandle:
    """A hook by which a block gets all arguments by name, some of them changed. change: from its arguments by name to
    the ones that change. A block that is checkpointed is called with arguments in order, others with some by name."""
    signature = inspect.signature(type(block).forward)

    def by_name(
        block: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        arguments = signature.bind(block, *inputs, **named).arguments
        arguments.pop("self")
        return (), {**arguments, **change(arguments)}

    return block.register_forward_pre_hook(by_name, with_kwargs=True)


@dataclass
class KeptTokens:
    """The tokens of a route, of the N visual ones that the transformer has.

    positions_BK: ascending, in the order of `ModelFamily.token_grid`. square: that of the TokenGrid, whose squares are
    kept whole. waiting_BND: the hidden states of all visual tokens where the route begins; set by its first block.
    What stands before or after the visual tokens, as a text that is attended to jointly, is kept whole.
    """

    positions_BK: torch.Tensor
    tokens: int
    square: int = 1
    waiting_BND: torch.Tensor | None = None

    def __post_init__(self) -> None:
        starts_B1 = torch.arange(len(self.positions_BK), device=self.positions_BK.device)[:, None] * self.tokens
        self._rows = (self.positions_BK + starts_B1).flatten()  # of all samples' tokens, one after the other

    def take(self, values: torch.Tensor, where: BlockTokens = FIRST_TOKENS) -> torch.Tensor:
        """(B or 1, N + M, ...) -> (B, K + M, ...), where M values of a text stand `where` a block has them."""
        shape = self.positions_BK.shape
        visual, text = where.divide(values.expand(shape[0], *values.shape[1:]), self.tokens)
        return where.join(visual.flatten(0, 1).index_select(0, self._rows).unflatten(0, shape), text)

    def restore(self, values: torch.Tensor, where: BlockTokens = FIRST_TOKENS) -> torch.Tensor:
        """(B, K + M, D) -> (B, N + M, D): the tokens that waited, with these in their places."""
        assert self.waiting_BND is not None, "the route's first block has not run"
        visual, text = where.divide(values, self.positions_BK.shape[1])
        waiting = self.waiting_BND.to(values.dtype)
        restored = waiting.flatten(0, 1).index_copy(0, self._rows, visual.flatten(0, 1)).view_as(waiting)
        return where.join(restored, text)


class ModelFamily(ABC):
    """What the trainer asks of a transformer: a subclass in a module of `trainer/families/`, which `Family.transformer`
    names.

    Latents are (B, C, T, h, w) in the model's space, sigma_B goes from 0 (data) to 1 (noise). model: what `load`
    returns; `predict` may get it inside DistributedDataParallel. TRANSFORMER: its class, a ModelMixin and ConfigMixin,
    which diffusers need not have. Its blocks are checkpointed if it calls them by `_gradient_checkpointing_func`, as
    diffusers' models do. FLOAT32_MODULES: names of the modules that stay in float32 for any dtype: never call
    `.to(dtype)` on such a model. LORA_TARGETS: a regular expression that matches the full paths of the modules that
    LoRA adapts by default. QUANTIZED: a regular expression for the linear layers that a quantized base has in 8 or 4
    bits, nearly all weights. UNGUIDED_SCALE: the guidance scale up to which the pipeline does without the negative
    prompt.
    """

    TRANSFORMER: Any
    FLOAT32_MODULES: Collection[str] = ()
    LORA_TARGETS: str
    QUANTIZED: str
    UNGUIDED_SCALE = 1.0

    def load(
        self,
        source: str,
        revision: str | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        part: str = "transformer",
    ) -> Any:
        """Only a transformer of a checkpoint (a folder or repo). part: its sub-folder. ValueError or OSError if it
        can't be trained."""
        model = load_part(self.TRANSFORMER, source, revision, part, torch_dtype=dtype)
        self.check(source, model.config)
        self.install(model)
        return model.to(device)

    def untrained(self, config: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> Any:
        """A transformer as `load` would return, made from a config.json, with weights of no meaning. On the meta device
        it takes no memory."""
        model = self.TRANSFORMER.from_config(dict(config))
        self.install(model)
        for name, weight in model.named_parameters():
            if not {*self.FLOAT32_MODULES} & {*name.split(".")}:
                weight.data = weight.data.to(dtype)
        return model

    def check(self, source: str, config: Any) -> None:  # noqa: B027
        """ValueError if a transformer with this config can't be trained."""

    def install(self, model: Any) -> None:  # noqa: B027
        """Give a new transformer its own attention processors and hooks."""

    def clean_frames(self, task: Task) -> int:
        """Leading latent frames that are given: not noised, not in the loss."""
        return 0

    def blocks(self, model: Any) -> list[torch.nn.Module]:
        """The transformer's repeated blocks, in the order in which they compute: what is offloaded, checkpointed,
        compiled or sharded one by one."""
        return [*model.transformer_blocks]

    def visual_blocks(self, model: Any) -> list[torch.nn.Module]:
        """The blocks of `blocks` that compute the visual tokens (B, N, D), in the order of `token_grid`."""
        return self.blocks(model)

    def block_tokens(self, block: torch.nn.Module) -> BlockTokens:
        """The places where a visual block has these tokens in its arguments and output."""
        return FIRST_TOKENS

    def without_gradient(self, model: Any) -> list[torch.nn.Module]:
        """Modules on whose weights no prediction depends, as what a last block computes of the text. They are never
        trained: DistributedDataParallel waits for a gradient of each trained weight."""
        return []

    @abstractmethod
    def token_grid(self, model: Any, batch: Batch) -> TokenGrid:
        """The order of the visual blocks' tokens."""

    def hidden_size(self, model: Any) -> int:
        """D of the visual tokens."""
        return model.config.num_attention_heads * model.config.attention_head_dim

    @abstractmethod
    def dense_attention(self, model: Any) -> tuple[list[Any], int]:
        """The attention modules, of diffusers' AttentionModuleMixin, in which all visual tokens attend to each other
        without a mask, and the size of a head. ValueError, with the reason, if no attention backend can compute
        them."""

    @abstractmethod
    def route_blocks(self, blocks: Sequence[torch.nn.Module], kept: KeptTokens) -> list[RemovableHandle]:
        """Hooks by which `blocks`, visual ones in a row, compute kept tokens (B, K, D) alone, which the first of them
        gets in place of all: what else belongs to a token is taken with it. A block may look at the tokens that wait
        (`kept.restore`) where it computes neighbors."""

    @abstractmethod
    def predict(
        self, model: Any, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, task: Task
    ) -> torch.Tensor:
        """The predicted velocity, shaped as the latents; meaningless for given frames. A sample's prediction must not
        depend on its batch mates."""

    def sampling_dtype(self, model: Any) -> torch.dtype:
        """The dtype of the pipeline's latents between denoising steps."""
        return torch.float32

    def set_timesteps(self, scheduler: Any, steps: int, tokens: int, device: torch.device) -> None:
        """Set the scheduler's noise levels as the pipeline does, for latents of so many visual tokens."""
        scheduler.set_timesteps(steps, device=device)

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, scale: float) -> torch.Tensor:
        """The guided velocity (B, C, T, h, w), of the velocities with the prompt and with the negative prompt: by
        default classifier-free guidance (Ho and Salimans 2022), without effect at a scale of 1."""
        return unconditional + scale * (conditional - unconditional)

    def initial_latents(self, noise_BCTHW: torch.Tensor, batch: Batch, task: Task) -> torch.Tensor:
        """The latents that denoising starts from."""
        return noise_BCTHW

    def postprocess_latents(self, latents_BCTHW: torch.Tensor, task: Task) -> torch.Tensor:
        """The pipeline's processing of latents after denoising."""
        return latents_BCTHW


def set_linear_sigmas(
    scheduler: Any, steps: int, tokens: int, device: torch.device, linspace: Callable[..., Any] = np.linspace
) -> None:
    """`ModelFamily.set_timesteps` of pipelines that give sigmas from 1 to 1 / steps, and mu by the scheduler's config:
    that of a line through two numbers of tokens (`calculate_shift`), which a scheduler with a fixed shift ignores.
    linspace: that of the pipeline, in float64 or float32. A single step begins at 1, of which a scheduler with a
    `shift_terminal` makes 0 / 0."""
    config = scheduler.config
    fewest, most = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    low, high = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (high - low) / (most - fewest)
    sigmas = linspace(1.0, 1 / steps, steps).tolist()
    scheduler.set_timesteps(sigmas=sigmas, mu=tokens * slope + low - slope * fewest, device=device)
    if steps == 1:
        scheduler.sigmas[0], scheduler.timesteps[0] = 1.0, config.num_train_timesteps


def module_of(family: Family) -> ModelFamily:
    """The trainer's side of a family: the object of the only subclass that its module defines."""
    return _make(family.transformer)


@cache
def _make(name: str) -> ModelFamily:
    module = importlib.import_module(f"trainer.families.{name}")
    [defined] = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, ModelFamily) and value.__module__ == module.__name__
    ]
    return defined()


@contextmanager
def assistant_off(model: Any) -> Iterator[None]:
    """Within the body the model computes without its assistant, if it has one (`trainer/setup/adapters.py`)."""
    assistant = getattr(model, "assistant", None)
    if assistant is None:
        yield
        return
    assistant.active = False
    try:
        yield
    finally:
        assistant.active = True
