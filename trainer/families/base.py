"""What the trainer asks of a family: the functions that a module of `trainer/families/` has.

Each module ends with an assignment of itself to a name of type `FamilyModule`, so that mypy reports a function that
is missing or has another signature.
"""

import importlib
from typing import Any, Protocol, cast

import torch

from schemas.family import Family, Task
from trainer.batch import Batch


class FamilyModule(Protocol):
    """A module of `trainer/families/`, named by `Family.transformer`.

    Latents are (B, C, T, h, w) in the model's space, sigma_B goes from 0 (data) to 1 (noise). model: what `load`
    returns, for `predict` perhaps inside DistributedDataParallel.
    """

    def load(
        self,
        source: str,
        revision: str | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Any:
        """The transformer of a checkpoint, a diffusers ModelMixin, or `trainer.experts.Experts` of several; no other
        part. ValueError or OSError where it can't be trained."""

    def clean_frames(self, task: Task) -> int:
        """Leading latent frames that are given: neither noised nor in the loss."""

    def predict(
        self, model: Any, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, task: Task
    ) -> torch.Tensor:
        """The predicted velocity, shaped as the latents. A sample's must not depend on its batch mates."""

    def sampling_dtype(self, model: Any) -> torch.dtype:
        """In which the pipeline keeps latents between denoising steps."""

    def initial_latents(self, noise_BCTHW: torch.Tensor, batch: Batch, task: Task) -> torch.Tensor:
        """What denoising starts from."""

    def postprocess_latents(self, latents_BCTHW: torch.Tensor, task: Task) -> torch.Tensor:
        """What the pipeline does to latents after denoising."""

    def lora_targets(self, model: Any) -> list[str]:
        """Full paths of the modules that LoRA adapts by default."""


def module_of(family: Family) -> FamilyModule:
    """The module that the catalogue names for a family."""
    return cast(FamilyModule, importlib.import_module(f"trainer.families.{family.transformer}"))
