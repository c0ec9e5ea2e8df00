"""Masked loss: only the masked part of a picture or clip is trained.

The mask of a sample, reduced to the grid of its latents by encode-latents (1 is trained, 0 is not), gives the factors
of its loss before the mean: w = unmasked_weight + (1 - unmasked_weight) mask. SimpleTuner and sd-scripts multiply the
loss, too; OneTrainer multiplies prediction and target, which squares a factor between 0 and 1. Samples without a mask
are trained everywhere.

unmasked_probability: a share of the samples, drawn at each step, is trained everywhere (OneTrainer's option;
SimpleTuner's masked_loss_probability is 1 minus it). normalise_area: w is divided by its mean over the trained frames
(OneTrainer's normalize_masked_area_loss), so that a sample's loss is the mean over its mask however small that is.
"""

import torch

from schemas.config.methods import MaskedLoss
from trainer.methods.base import Method, MethodStep

LEAST_AREA = 1e-6  # an empty mask's loss stays 0


class MaskedLossMethod(Method):
    def __init__(self, settings: MaskedLoss) -> None:
        self.settings = settings

    def loss_weight(self, step: MethodStep) -> torch.Tensor | None:
        mask_BTHW, outside = step.batch.extras.get("mask"), self.settings.unmasked_weight
        if mask_BTHW is None:
            return None
        weight_BTHW = outside + (1 - outside) * mask_BTHW
        if self.settings.unmasked_probability:
            everywhere_B = step.uniform("unmasked") < self.settings.unmasked_probability
            weight_BTHW = torch.where(everywhere_B.to(mask_BTHW.device)[:, None, None, None], 1.0, weight_BTHW)
        if self.settings.normalise_area:
            given = 0 if weight_BTHW.shape[1] == 1 else step.family.clean_frames(step.task)
            weight_BTHW = weight_BTHW / weight_BTHW[:, given:].mean((1, 2, 3), keepdim=True).clamp(min=LEAST_AREA)
        return weight_BTHW
