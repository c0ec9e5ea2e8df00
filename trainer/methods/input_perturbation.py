"""Adds noise to the input that is not part of the target, because at inference the input has the errors of earlier
steps.

Source: Ning et al. 2023, "Input Perturbation Reduces Exposure Bias in Diffusion Models" (ICML 2023), arXiv 2301.11706;
for flow matching as in sd-scripts (ip_noise_gamma) and SimpleTuner (input_perturbation).
"""

from schemas.config.methods import InputPerturbation
from trainer.methods.base import Method, MethodStep


class InputPerturbationMethod(Method):
    """Adds sigma gamma xi to the input, xi standard normal, except to given frames. The target keeps the noise."""

    def __init__(self, settings: InputPerturbation) -> None:
        self._settings = settings

    def prepare(self, step: MethodStep) -> None:
        if not (strength := self.strength(step.number)):
            return
        xi_BCTHW = step.normal("input_perturbation", *step.noisy_BCTHW.shape[1:]).to(step.noisy_BCTHW)
        xi_BCTHW[:, :, : step.family.clean_frames(step.task)] = 0
        step.noisy_BCTHW = step.noisy_BCTHW + (strength * step.sigma_B).view(-1, 1, 1, 1, 1) * xi_BCTHW

    def strength(self, step: int) -> float:
        """Returns gamma after `step` optimizer steps."""
        remaining = 1 - step / self._settings.decay_steps if self._settings.decay_steps else 1
        return self._settings.strength * max(0, remaining)
