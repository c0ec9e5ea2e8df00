"""Masked loss: only the masked part of a picture or clip is trained.

The mask of a sample, reduced to the grid of its latents by encode-latents (1 is trained, 0 is not), multiplies the
squared errors before their mean, as in SimpleTuner and OneTrainer. Samples without a mask are trained everywhere.
"""

import torch

from schemas.config.methods import MaskedLoss
from trainer.methods.base import Method, MethodStep


class MaskedLossMethod(Method):
    def __init__(self, settings: MaskedLoss) -> None:
        self.settings = settings

    def loss_weight(self, step: MethodStep) -> torch.Tensor | None:
        mask_BTHW, outside = step.batch.extras.get("mask"), self.settings.unmasked_weight
        return None if mask_BTHW is None else outside + (1 - outside) * mask_BTHW
