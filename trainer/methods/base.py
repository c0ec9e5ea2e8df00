"""The contract of a training method: what it adds to the plain flow-matching loss. Nothing of a method is in the loop.

A method is a file of this folder, a section of the configuration under train.methods, which names the tensors that it
needs of a sample, and a row of METHODS in `trainer/methods/selection.py`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from schemas.family import Task
from schemas.identity import derive_seed
from trainer.batch import Batch
from trainer.families.base import FamilyModule


@dataclass
class MethodStep:
    """One forward and backward pass, as methods see it.

    model: the family's transformer. identities: (B,) text that determines a sample's random numbers. prediction_BCTHW:
    the predicted velocity, None until the forward pass is done.
    """

    model: Any
    family: FamilyModule
    task: Task
    batch: Batch
    sigma_B: torch.Tensor
    identities: Sequence[str]
    prediction_BCTHW: torch.Tensor | None = None

    def uniform(self, purpose: str) -> torch.Tensor:
        """(B,) numbers in 0..1 on the CPU, the same for the same step, position and purpose on any number of ranks."""
        generators = [torch.Generator().manual_seed(derive_seed(identity, purpose)) for identity in self.identities]
        return torch.stack([torch.rand((), generator=generator) for generator in generators])


class Method:
    """Does nothing; a method overrides what it needs. The tensors that it needs are named by its section."""

    def modules(self) -> torch.nn.Module | None:
        """The method's own weights. They are trained, saved in checkpoints and wrapped with the transformer."""
        return None

    def around(self, step: MethodStep) -> AbstractContextManager[None]:
        """Entered before the forward pass and left after the backward pass, since gradient checkpointing computes
        blocks again in the latter. Whatever is drawn at random is drawn once, here."""
        return nullcontext()

    def loss_weight(self, step: MethodStep) -> torch.Tensor | None:
        """(B, T, h, w) factors of the squared errors; T is 1 where all frames share them."""
        return None

    def loss(self, step: MethodStep) -> torch.Tensor | None:
        """(B,) added to the flow-matching loss. Called after the forward pass."""
        return None
