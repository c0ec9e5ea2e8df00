"""Regularization data: samples that preserve the behavior of the base model.

`base`: the target is the prediction of the model without its adapter, at the same noisy input, sigma and text; the
sample's content only affects the input. `data`: the target is noise - x0, as for any sample, and the weight is the
`prior_loss_weight` of DreamBooth (Ruiz et al. 2023, arXiv 2208.12242).
"""

import torch

from schemas.config.methods import Regularization
from schemas.devices import to_device
from trainer.methods.base import Method, MethodStep


class RegularizationMethod(Method):
    def __init__(self, settings: Regularization) -> None:
        self.settings = settings

    def prepare(self, step: MethodStep) -> None:
        marked_B = step.batch.extras.get("regularization", torch.zeros(len(step.batch), dtype=torch.bool))
        if self.settings.target == "data" or not step.most_passes(int(marked_B.any())):
            return
        rows = marked_B.nonzero()[:, 0]
        selected = rows if len(rows) else rows.new_zeros(1)  # another rank has regularization samples
        device = step.sigma_B.device
        device_rows = to_device(selected, device)
        noisy_BCTHW, sigma_B = step.noisy_BCTHW[device_rows], step.sigma_B[device_rows]
        base = step.predict(noisy_BCTHW, sigma_B, step.batch.select(selected), without_adapter=True)
        step.target_BCTHW = step.target_BCTHW.index_copy(0, to_device(rows, device), base[: len(rows)])

    def loss_weight(self, step: MethodStep) -> torch.Tensor | None:
        marked_B = step.batch.extras.get("regularization")
        if marked_B is None or self.settings.weight == 1:
            return None
        weight_B = torch.where(to_device(marked_B, step.sigma_B.device), self.settings.weight, 1.0)
        return weight_B.view(-1, 1, 1, 1).expand(-1, 1, *step.batch.latents_BCTHW.shape[-2:])
