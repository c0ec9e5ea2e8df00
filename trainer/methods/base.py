"""The contract of a training method: what it adds to the plain flow-matching loss. Nothing of a method is in the loop.

A method is a file of this folder, a section of the configuration under train.methods, which names the tensors that it
needs of a sample, and a row of METHODS in `trainer/methods/selection.py`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from schemas.family import Task
from schemas.identity import derive_seed
from trainer import flow
from trainer.batch import Batch
from trainer.families.base import FamilyModule


class Predict(Protocol):
    """A forward pass without gradient and dropout, apart from DistributedDataParallel."""

    def __call__(
        self, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, *, base: bool = False
    ) -> torch.Tensor:
        """The velocity in float32. base: that of the model without its adapter, which only a LoRA or LoKr has."""


@dataclass
class MethodStep:
    """One forward and backward pass, as methods see it. `prepare` may replace its input and target.

    number: optimizer steps done before this one, of `steps`. model: the family's transformer. shift: of the schedule of
    sigma. identities: (B,) text that determines a sample's random numbers. noisy_BCTHW: the input. target_BCTHW: what
    the prediction is compared with. prediction_BCTHW: the predicted velocity, None until the forward pass is done.
    kept_tokens: index in `visual_blocks` -> the positions (B, K) of the only tokens that this block computes, where a
    method drops the others. A forward hook on such a block, registered with prepend=True, sees the K tokens.
    """

    number: int
    steps: int
    model: Any
    family: FamilyModule
    task: Task
    predict: Predict
    batch: Batch
    noise_BCTHW: torch.Tensor
    sigma_B: torch.Tensor
    shift: float
    identities: Sequence[str]
    noisy_BCTHW: torch.Tensor = field(init=False)
    target_BCTHW: torch.Tensor = field(init=False)
    prediction_BCTHW: torch.Tensor | None = None
    kept_tokens: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.noisy_BCTHW = flow.interpolate(self.batch.latents_BCTHW, self.noise_BCTHW, self.sigma_B)
        self.target_BCTHW = flow.velocity(self.batch.latents_BCTHW, self.noise_BCTHW)

    def uniform(self, purpose: str, *shape: int) -> torch.Tensor:
        """(B, *shape) numbers in 0..1 on the CPU, the same for the same step, position and purpose on any number of
        ranks."""
        generators = [torch.Generator().manual_seed(derive_seed(identity, purpose)) for identity in self.identities]
        return torch.stack([torch.rand(shape, generator=generator) for generator in generators])


class Method:
    """Does nothing; a method overrides what it needs. The tensors that it needs are named by its section."""

    def modules(self) -> torch.nn.Module | None:
        """The method's own weights. They are trained, saved in checkpoints and wrapped with the transformer."""
        return None

    def prepare(self, step: MethodStep) -> None:
        """Replace input or target, perhaps by forward passes of `step.predict`. Methods are called in the order of
        METHODS, all of them before the first `around`."""

    def around(self, step: MethodStep) -> AbstractContextManager[None]:
        """Entered before the forward pass and left after the backward pass, since gradient checkpointing computes
        blocks again in the latter. Whatever is drawn at random is drawn once, here or in `prepare`."""
        return nullcontext()

    def loss_weight(self, step: MethodStep) -> torch.Tensor | None:
        """(B, T, h, w) factors of the squared errors; T is 1 where all frames share them."""
        return None

    def loss(self, step: MethodStep) -> torch.Tensor | None:
        """(B,) added to the flow-matching loss. Called after the forward pass."""
        return None
