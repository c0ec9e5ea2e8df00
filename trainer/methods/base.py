"""The interface of training methods, which extend the plain flow-matching loss. The training loop has no code of a
particular method.

A method consists of a file in this folder, a section of the configuration under train.methods, which lists the tensors
of a sample that the method needs, and a row of METHODS in `trainer/methods/__init__.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from schemas.errors import USAGE, LatentpressError
from schemas.family import Task
from trainer import flow
from trainer.batch import Batch
from trainer.families.base import ModelFamily, TokenGrid
from trainer.noise import seeded_noise, seeded_uniform


class MethodError(LatentpressError):
    """Raised if a method can't be used with this transformer or set."""

    exit_code = USAGE


class Predict(Protocol):
    """A forward pass without gradient and dropout, outside DistributedDataParallel. Every rank makes the same number of
    passes (see `MethodStep.most_passes`)."""

    def __call__(
        self, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, *, without_adapter: bool = False
    ) -> torch.Tensor:
        """Returns the velocity in float32. without_adapter: whether to compute without the adapter, which only a LoRA
        or LoKr supports."""


@dataclass
class MethodStep:
    """The values of one forward and backward pass that methods can access. `Method.prepare` may replace the input and
    target.

    number: number of optimizer steps before this one, of `steps` in total. model: the family's transformer.
    most_passes: function of a rank's number of forward passes that returns the largest number of all ranks if they
    share one sharded model, because each rank has to make the same number of passes; otherwise it returns its argument.
    Every rank calls it. host_sigma_B: sigma_B on the CPU. shift: shift of the sigma schedule. identities: (B,) strings
    that determine the random numbers of each sample. noisy_BCTHW: the input, in float32. Its first
    `family.clean_frames(task)` frames are given (i2v) and replaced by the frames of the condition, which has no noise.
    target_BCTHW: target of the prediction. prediction_BCTHW: the predicted velocity, None until the forward pass is
    done. weight_BTHW: product of all methods' factors of the squared errors, available in `Method.loss`. logged: see
    `log`. kept_tokens: block index in `visual_blocks` -> positions (B, K) of the tokens that this block computes, if a
    method drops the remaining tokens. A forward hook on such a block, registered with prepend=True, gets the K tokens.
    """

    number: int
    steps: int
    model: Any
    family: ModelFamily
    task: Task
    predict: Predict
    most_passes: Callable[[int], int]
    batch: Batch
    noise_BCTHW: torch.Tensor
    sigma_B: torch.Tensor
    host_sigma_B: torch.Tensor
    shift: float
    identities: Sequence[str]
    noisy_BCTHW: torch.Tensor = field(init=False)
    target_BCTHW: torch.Tensor = field(init=False)
    prediction_BCTHW: torch.Tensor | None = None
    weight_BTHW: torch.Tensor | None = None
    kept_tokens: dict[int, torch.Tensor] = field(default_factory=dict)
    logged: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.noisy_BCTHW = flow.interpolate(self.batch.latents_BCTHW, self.noise_BCTHW, self.sigma_B)
        self.target_BCTHW = flow.velocity(self.batch.latents_BCTHW, self.noise_BCTHW)

    @property
    def grid(self) -> TokenGrid:
        return self.family.token_grid(self.model, self.batch)

    def log(self, name: str, value_B: torch.Tensor) -> None:
        """Log a number per sample; the mean over the global batch becomes a metric of the optimizer step. All
        micro-batches of a step, on all ranks, log the same names in the same order."""
        self.logged[name] = value_B.detach()

    def uniform(self, purpose: str, *shape: int) -> torch.Tensor:
        """Returns (B, *shape) uniform numbers in 0..1 on the CPU; step, position in the global batch and purpose
        determine them, for any number of ranks."""
        return seeded_uniform(self.identities, purpose, shape)

    def normal(self, purpose: str, *shape: int) -> torch.Tensor:
        """Returns (B, *shape) standard normal numbers, determined as in `uniform`, on the device of the noise."""
        return seeded_noise(self.identities, purpose, shape, self.noise_BCTHW.device)


class Method:
    """Base class whose functions do nothing; a method overrides the functions that it needs. The method's section lists
    the tensors that it needs. The evaluation loss and validation do not use methods."""

    def setup(self, model: Any, family: ModelFamily, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Called once, before weights are loaded. Raises MethodError if the method can't be used.

        model: the transformer on the meta device, without weights. shapes: name -> shape of one sample's tensor.
        torch's global seed is set before this call.
        """

    def modules(self) -> torch.nn.Module | None:
        """The method's own weights. They are trained, saved in checkpoints and wrapped with the transformer."""
        return None

    def prepare(self, step: MethodStep) -> None:
        """Replace the input or target, for example by forward passes of `step.predict`. Methods are called in the order
        of METHODS, and each `prepare` is called before the first `around`. sigma_B must not change."""

    def around(self, step: MethodStep) -> AbstractContextManager[None]:
        """Entered before the forward pass and left after the backward pass, since gradient checkpointing computes
        blocks again in the backward pass. Random numbers are drawn once, here or in `prepare`."""
        return nullcontext()

    def loss_weight(self, step: MethodStep) -> torch.Tensor | None:
        """Returns (B, T, h, w) factors of the squared errors; T is 1 if all frames share them."""
        return None

    def loss(self, step: MethodStep) -> torch.Tensor | None:
        """Returns a loss (B,) that is added to the flow-matching loss. Called after the forward pass. A method with
        modules always returns a loss that depends on all of their weights, multiplied by 0 if necessary, because
        DistributedDataParallel waits for each gradient."""
        return None

    @property
    def reads_numbers(self) -> bool:
        """Whether the next step depends on the numbers passed to `finish_step`; if so, each step waits for them."""
        return False

    def finish_step(self, numbers: Mapping[str, float]) -> None:
        """Called after the backward passes of an optimizer step. numbers: means of the logged numbers, the same on all
        ranks."""

    def state(self) -> dict[str, Any]:
        """Returns the method's state as JSON, which checkpoints store in addition to the method's weights."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state` returned. Raises ValueError for an invalid state."""
