"""Masked loss: only the masked part of a picture or clip is trained.

The mask of a sample, reduced to the grid of its latents by encode-latents (1 is trained, 0 is not), gives the factors
of its loss before the mean: w = unmasked_weight + (1 - unmasked_weight) mask. SimpleTuner and sd-scripts multiply the
loss, too; OneTrainer multiplies prediction and target, which squares a factor between 0 and 1. Samples without a mask
are trained everywhere.

unmasked_probability: a share of the samples, drawn at each step, is trained everywhere (OneTrainer's option;
SimpleTuner's masked_loss_probability is 1 minus it). normalize_area: w is divided by its mean over the trained frames
(OneTrainer's normalize_masked_area_loss), so that a sample's loss is the mean over its mask, however small the mask is.
prior_weight: factor of an added loss, the mean of (1 - mask) times the squared difference from the prediction without
adapter (OneTrainer's masked_prior_preservation_weight).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from schemas.config.methods import MaskedLoss
from schemas.devices import to_device
from trainer.flow import loss_per_sample
from trainer.methods.base import Method, MethodStep

MIN_AREA = 1e-6  # an empty mask's loss stays 0


class MaskedLossMethod(Method):
    def __init__(self, settings: MaskedLoss) -> None:
        self.settings = settings
        self._base_BCTHW: torch.Tensor | None = None

    def mask(self, step: MethodStep) -> torch.Tensor | None:
        """Returns (B, T, h, w); 1 everywhere for samples that are trained everywhere in this step."""
        mask_BTHW = step.batch.extras.get("mask")
        if mask_BTHW is None or not self.settings.unmasked_probability:
            return mask_BTHW
        everywhere_B = to_device(step.uniform("unmasked"), mask_BTHW.device) < self.settings.unmasked_probability
        return torch.where(everywhere_B[:, None, None, None], 1.0, mask_BTHW)

    @contextmanager
    def around(self, step: MethodStep) -> Iterator[None]:
        """Computes the base prediction here and not in `prepare`, because the input is final. As the first of METHODS,
        this runs before later methods register hooks."""
        self._base_BCTHW = None
        if self.settings.prior_weight:  # without masks, too: ranks that share a model need equal numbers of passes
            self._base_BCTHW = step.predict(step.noisy_BCTHW, step.sigma_B, step.batch, without_adapter=True)
        yield

    def loss_weight(self, step: MethodStep) -> torch.Tensor | None:
        mask_BTHW, unmasked = self.mask(step), self.settings.unmasked_weight
        if mask_BTHW is None:
            return None
        weight_BTHW = unmasked + (1 - unmasked) * mask_BTHW
        if self.settings.normalize_area:
            clean_frames = 0 if weight_BTHW.shape[1] == 1 else step.family.clean_frames(step.task)
            weight_BTHW = weight_BTHW / weight_BTHW[:, clean_frames:].mean((1, 2, 3), keepdim=True).clamp(min=MIN_AREA)
        return weight_BTHW

    def loss(self, step: MethodStep) -> torch.Tensor | None:
        mask_BTHW, base_BCTHW, clean_frames = self.mask(step), self._base_BCTHW, step.family.clean_frames(step.task)
        if mask_BTHW is None or base_BCTHW is None:
            return None
        assert step.prediction_BCTHW is not None
        loss_B = loss_per_sample(step.prediction_BCTHW, base_BCTHW, clean_frames, 1 - mask_BTHW)
        return self.settings.prior_weight * loss_B
