"""The base class of the families in `trainer/families/`, with defaults."""

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

import numpy as np
import torch
from diffusers.models.modeling_utils import no_init_weights
from torch.utils.hooks import RemovableHandle

from cache.models.weights import load_part
from schemas.family import Family, Task
from trainer.batch import Batch


@contextmanager
def on_meta() -> Iterator[None]:
    """Context in which models and adapters are made on the meta device. Their weights are not initialized, because
    initialization would take as long as everything else."""
    with torch.device("meta"), no_init_weights():
        yield


@dataclass(frozen=True)
class TokenGrid:
    """The order of a transformer's tokens: frames x rows x columns of patches, and the longest text of the batch.

    square: side of a square in tokens. Above 1, the tokens of a frame are ordered square by square (rows of squares),
    and a square is kept or dropped as a whole when tokens are dropped.
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
        """Returns values on the grid, (B, T, H, W, D), in the order of the tokens, (B, N, D)."""
        if self.square > 1:
            squares = values_BTHWD.unflatten(3, (-1, self.square)).unflatten(2, (-1, self.square))
            values_BTHWD = squares.transpose(3, 4)  # B T H/s W/s s s D
        return values_BTHWD.flatten(1, -2)


@dataclass(frozen=True)
class BlockTokens:
    """The positions of the visual tokens in the hidden states (B, L, D) of a visual block: in its first argument, and
    in its output. output: index of the hidden states if the block returns several outputs. is_text_first: whether
    visual tokens come after the text tokens in dim 1; otherwise they come first, and text tokens may follow."""

    output: int | None = None
    is_text_first: bool = False

    def read_output(self, output: Any) -> torch.Tensor:
        return output if self.output is None else output[self.output]

    def replace_output(self, output: Any, hidden: torch.Tensor) -> Any:
        if self.output is None:
            return hidden
        return *output[: self.output], hidden, *output[self.output + 1 :]

    def divide(self, values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, L, ...) -> the values of `count` visual tokens, and the values of the text tokens."""
        text = values.shape[1] - count
        return (values[:, text:], values[:, :text]) if self.is_text_first else (values[:, :count], values[:, count:])

    def join(self, visual: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """The inverse of `divide`."""
        if not text.shape[1]:
            return visual
        return torch.cat([text, visual] if self.is_text_first else [visual, text], 1)


FIRST_TOKENS = BlockTokens()


def change_arguments(block: torch.nn.Module, change: Callable[[dict[str, Any]], dict[str, Any]]) -> RemovableHandle:
    """Register a hook that passes all arguments to a block by name, with some of them changed. change: function from
    the block's arguments by name to the arguments that change. A checkpointed block is called with positional
    arguments, any other block with some arguments by name."""
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
    """The tokens that a route of blocks computes, K of the transformer's N visual tokens.

    positions_BK: ascending positions in the order of `ModelFamily.token_grid`. square: side of the TokenGrid's squares,
    which are kept as a whole. waiting_BND: hidden states of all visual tokens at the start of the route; its first
    block sets them. Tokens before or after the visual tokens, such as the text in joint attention, are all kept.
    """

    positions_BK: torch.Tensor
    tokens: int
    square: int = 1
    waiting_BND: torch.Tensor | None = None

    def __post_init__(self) -> None:
        starts_B1 = torch.arange(len(self.positions_BK), device=self.positions_BK.device)[:, None] * self.tokens
        self._rows = (self.positions_BK + starts_B1).flatten()  # row numbers in the tokens of all samples, concatenated

    def take(self, values: torch.Tensor, block_tokens: BlockTokens = FIRST_TOKENS) -> torch.Tensor:
        """(B or 1, N + M, ...) -> (B, K + M, ...). block_tokens: positions of the N visual tokens next to M text
        tokens."""
        shape = self.positions_BK.shape
        visual, text = block_tokens.divide(values.expand(shape[0], *values.shape[1:]), self.tokens)
        return block_tokens.join(visual.flatten(0, 1).index_select(0, self._rows).unflatten(0, shape), text)

    def restore(self, values: torch.Tensor, block_tokens: BlockTokens = FIRST_TOKENS) -> torch.Tensor:
        """(B, K + M, D) -> (B, N + M, D): the waiting tokens, with the K kept tokens replaced by `values`."""
        assert self.waiting_BND is not None, "the route's first block has not run"
        visual, text = block_tokens.divide(values, self.positions_BK.shape[1])
        waiting = self.waiting_BND.to(values.dtype)
        restored = waiting.flatten(0, 1).index_copy(0, self._rows, visual.flatten(0, 1)).view_as(waiting)
        return block_tokens.join(restored, text)


class ModelFamily(ABC):
    """The trainer's interface to a transformer. A family is a subclass in a module of `trainer/families/`;
    `Family.transformer` is the name of the module.

    Latents are (B, C, T, h, w) in the model's space, sigma_B goes from 0 (data) to 1 (noise). model: the transformer
    that `load` returns; `predict` may get it inside DistributedDataParallel. TRANSFORMER: class of the model, a
    ModelMixin and ConfigMixin, which need not be part of diffusers. Its blocks are checkpointed if it calls them by
    `_gradient_checkpointing_func`, like the models of diffusers. FLOAT32_MODULES: names of the modules that stay in
    float32 for any dtype: never call `.to(dtype)` on such a model. LORA_TARGETS: a regular expression that matches the
    full paths of the modules that LoRA adapts by default. QUANTIZED: a regular expression for the linear layers that
    are stored in 8 or 4 bits in a quantized base, nearly all weights. UNGUIDED_SCALE: the largest guidance scale at
    which the pipeline does not compute the negative prompt. MASKS_TEXT: whether the modules of `dense_attention` also
    compute texts, and mask their padding in a batch; their processors call `trainer.joint_attention.attend`.
    """

    TRANSFORMER: Any
    FLOAT32_MODULES: Collection[str] = ()
    LORA_TARGETS: str
    QUANTIZED: str
    UNGUIDED_SCALE = 1.0
    MASKS_TEXT = False

    def load(
        self,
        source: str,
        revision: str | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        part: str = "transformer",
    ) -> Any:
        """Load only a transformer of a checkpoint (a folder or repo). part: sub-folder of the transformer. Raises
        ValueError or OSError if the transformer can't be trained."""
        model = load_part(self.TRANSFORMER, source, revision, part, torch_dtype=dtype)
        self.check(source, model.config)
        self.install(model)
        return model.to(device)

    def untrained(self, config: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> Any:
        """Returns a transformer like `load`, made from a config.json, with untrained weights. On the meta device it
        takes no memory."""
        model = self.TRANSFORMER.from_config(dict(config))
        self.install(model)
        for name, weight in model.named_parameters():
            if not {*self.FLOAT32_MODULES} & {*name.split(".")}:
                weight.data = weight.data.to(dtype)
        return model

    def check(self, source: str, config: Any) -> None:  # noqa: B027
        """Raise ValueError if a transformer with this config can't be trained."""

    def install(self, model: Any) -> None:  # noqa: B027
        """Give a new transformer its own attention processors and hooks."""

    def clean_frames(self, task: Task) -> int:
        """Number of leading latent frames that are given: they are not noised and are not part of the loss."""
        return 0

    def blocks(self, model: Any, task: Task) -> list[torch.nn.Module]:
        """The transformer's repeated blocks that compute for the task, in the order in which they compute: the units of
        offloading, checkpointing, compilation and sharding."""
        return self.visual_blocks(model)

    def idle_blocks(self, model: Any, task: Task) -> list[torch.nn.Module]:
        """The blocks that compute only for other tasks of the same checkpoint. Their weights stay on the host if blocks
        are offloaded."""
        used = dict.fromkeys(self.blocks(model, task))
        others = dict.fromkeys(block for other in get_args(Task) for block in self.blocks(model, other))
        return [block for block in others if block not in used]

    def visual_blocks(self, model: Any) -> list[torch.nn.Module]:
        """The blocks that compute the visual tokens (B, N, D), in the order of `token_grid`, for any task."""
        return [*model.transformer_blocks]

    def block_tokens(self, block: torch.nn.Module) -> BlockTokens:
        """Returns the positions of the visual tokens in the arguments and output of a visual block."""
        return FIRST_TOKENS

    def without_gradient(self, model: Any, task: Task) -> list[torch.nn.Module]:
        """Modules whose weights do not affect the task's prediction, such as the text layers of a last block, or the
        layers of references for a task without references. They are never trained, because DistributedDataParallel
        waits for a gradient of each trained weight."""
        return []

    @abstractmethod
    def token_grid(self, model: Any, batch: Batch) -> TokenGrid:
        """The order of the visual blocks' tokens."""

    def hidden_size(self, model: Any) -> int:
        """Width D of the visual tokens (B, N, D)."""
        return model.config.num_attention_heads * model.config.attention_head_dim

    @abstractmethod
    def dense_attention(self, model: Any) -> tuple[list[Any], int]:
        """Returns the attention modules in which all visual tokens attend to each other, whose processors have the
        attribute `_attention_backend`, and the size of a head. Raises ValueError, with the reason, if the kernels of
        `train.attention` can't compute them."""

    @abstractmethod
    def route_blocks(self, blocks: Sequence[torch.nn.Module], kept_tokens: KeptTokens) -> list[RemovableHandle]:
        """Register hooks so that `blocks`, consecutive visual blocks, compute only the kept tokens (B, K, D), which the
        first block gets instead of all tokens. Other values of a token, such as rotary embeddings, are selected in the
        same way. A block may read the waiting tokens (`kept.restore`) if it computes neighboring tokens."""

    @abstractmethod
    def predict(
        self, model: Any, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, task: Task
    ) -> torch.Tensor:
        """Returns the predicted velocity, in the shape of the latents; meaningless for given frames. A sample's
        prediction must not depend on the rest of its batch."""

    def sampling_dtype(self, model: Any) -> torch.dtype:
        """The dtype of the pipeline's latents between denoising steps."""
        return torch.float32

    def set_timesteps(self, scheduler: Any, steps: int, tokens: int, device: torch.device) -> None:
        """Set the scheduler's noise levels as the pipeline does. tokens: number of visual tokens of the latents."""
        scheduler.set_timesteps(steps, device=device)

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, scale: float) -> torch.Tensor:
        """Returns the guided velocity (B, C, T, h, w) from the velocities with the prompt and with the negative prompt:
        by default classifier-free guidance (Ho and Salimans 2022), which has no effect at a scale of 1."""
        return unconditional + scale * (conditional - unconditional)

    def initial_latents(self, noise_BCTHW: torch.Tensor, batch: Batch, task: Task) -> torch.Tensor:
        """Returns the latents from which denoising starts."""
        return noise_BCTHW

    def postprocess_latents(self, latents_BCTHW: torch.Tensor, task: Task) -> torch.Tensor:
        """The pipeline's processing of latents after denoising."""
        return latents_BCTHW


#: Key of model_index.json, and then of the scheduler's config: the noise levels, before the shift, of a distilled
#: checkpoint, in descending order.
SIGMAS = "sample_sigmas"


def set_linear_sigmas(
    scheduler: Any, steps: int, tokens: int, device: torch.device, linspace: Callable[..., Any] = np.linspace
) -> None:
    """`ModelFamily.set_timesteps` for pipelines that pass sigmas from 1 to 1 / steps, or the checkpoint's own sigmas if
    there are as many of them as steps, and mu from the scheduler's
    config: mu is linear in the number of tokens (`calculate_shift`), and a scheduler with a fixed shift ignores it.
    linspace: the pipeline's function, in float64 (NumPy) or float32 (torch). A single step starts at sigma 1, which is
    set explicitly because a scheduler with a `shift_terminal` would compute 0 / 0."""
    config = scheduler.config
    fewest, most = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    low, high = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (high - low) / (most - fewest)
    own = config.get(SIGMAS) or ()
    sigmas = [*own] if len(own) == steps else linspace(1.0, 1 / steps, steps).tolist()
    scheduler.set_timesteps(sigmas=sigmas, mu=tokens * slope + low - slope * fewest, device=device)
    if steps == 1:
        scheduler.sigmas[0], scheduler.timesteps[0] = 1.0, config.num_train_timesteps


def module_of(family: Family) -> ModelFamily:
    """Returns the trainer's object for a family: an instance of the only ModelFamily subclass in its module."""
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
def sampling(model: Any) -> Iterator[None]:
    """Context in which the model computes without its assistant and with its adapter of few steps, if any
    (`trainer/setup/adapters.py`)."""
    adapters = getattr(model, "frozen_adapters", ())
    for adapter in adapters:
        adapter.is_active = not adapter.is_active
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_active = not adapter.is_active
