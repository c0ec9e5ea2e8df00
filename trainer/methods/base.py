"""The contract of a training method: what it adds to the plain flow-matching loss. Nothing of a method is in the loop.

A method is a file of this folder, a section of the configuration under train.methods, which names the tensors that it
needs of a sample, and a row of METHODS in `trainer/methods/__init__.py`.
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
    """A method that can't be used with this transformer or set."""

    exit_code = USAGE


class Predict(Protocol):
    """A forward pass without gradient and dropout, apart from DistributedDataParallel. Every rank takes as many (see
    `MethodStep.most_passes`)."""

    def __call__(
        self, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, *, base: bool = False
    ) -> torch.Tensor:
        """The velocity in float32. base: that of the model without its adapter, which only a LoRA or LoKr has."""


@dataclass
class MethodStep:
    """One forward and backward pass, as methods see it. `prepare` may replace its input and target.

    number: optimizer steps done before this one, of `steps`. model: the family's transformer. most_passes: of a number
    of forward passes the largest of all ranks where they share one model, and each has to take as many; else the number
    itself. Every rank calls it. host_sigma_B: sigma_B, on the host. shift: of the schedule of sigma. identities: (B,)
    text that determines a sample's random numbers. noisy_BCTHW: the input, in float32. Its first
    `family.clean_frames(task)` frames are given (i2v) and replaced by those of the condition, which has no noise.
    target_BCTHW: what the prediction is compared with. prediction_BCTHW: the predicted velocity, None until the forward
    pass is done. weight_BTHW: the product of the methods' factors of the squared errors, known to `Method.loss`.
    logged: see `log`. kept_tokens: index in `visual_blocks` -> the positions (B, K) of the only tokens that this block
    computes, where a method drops the others. A forward hook on such a block, registered with prepend=True, sees the K
    tokens.
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
        """A number of each sample, whose mean over the global batch becomes a metric of the optimizer step. All
        micro-batches of a step, on all ranks, log the same names in the same order."""
        self.logged[name] = value_B.detach()

    def uniform(self, purpose: str, *shape: int) -> torch.Tensor:
        """(B, *shape) numbers in 0..1 on the CPU, the same for the same step, position and purpose on any number of
        ranks."""
        return seeded_uniform(self.identities, purpose, shape)

    def normal(self, purpose: str, *shape: int) -> torch.Tensor:
        """Numbers like those of `uniform`, of the standard normal distribution, on the device of the step's noise."""
        return seeded_noise(self.identities, purpose, shape, self.noise_BCTHW.device)


class Method:
    """Does nothing; a method overrides what it needs. The tensors that it needs are named by its section. Eval loss and
    validation call nothing of it."""

    def setup(self, model: Any, family: ModelFamily, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Called once, before weights are loaded: MethodError where the method can't be used.

        model: the transformer on the meta device, without weights. shapes: those of one sample's tensors, by name.
        torch is seeded for what is drawn here.
        """

    def modules(self) -> torch.nn.Module | None:
        """The method's own weights. They are trained, saved in checkpoints and wrapped with the transformer."""
        return None

    def prepare(self, step: MethodStep) -> None:
        """Replace input or target, perhaps by forward passes of `step.predict`. Methods are called in the order of
        METHODS, all of them before the first `around`. sigma_B stays as it is."""

    def around(self, step: MethodStep) -> AbstractContextManager[None]:
        """Entered before the forward pass and left after the backward pass, since gradient checkpointing computes
        blocks again in the latter. Whatever is drawn at random is drawn once, here or in `prepare`."""
        return nullcontext()

    def loss_weight(self, step: MethodStep) -> torch.Tensor | None:
        """(B, T, h, w) factors of the squared errors; T is 1 where all frames share them."""
        return None

    def loss(self, step: MethodStep) -> torch.Tensor | None:
        """(B,) added to the flow-matching loss. Called after the forward pass. A method with modules always returns a
        loss that depends on all of their weights, if only times 0: DistributedDataParallel waits for each gradient."""
        return None

    @property
    def reads_numbers(self) -> bool:
        """Whether the next step depends on what `finish_step` is given, which is waited for then."""
        return False

    def finish_step(self, numbers: Mapping[str, float]) -> None:
        """Called after the backward passes of an optimizer step with the means of what was logged, the same on all
        ranks."""

    def state(self) -> dict[str, Any]:
        """JSON that checkpoints keep of the method beside its weights."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned. ValueError for what it can't have returned."""
