"""Scheduled sampling (rollout): some samples are trained on inputs that the model computed itself, as at inference.

Such a sample starts at a noisier point of its own line, x_s = (1 - s) x0 + s noise, and the model takes k Euler steps
down to its sigma without gradient; the result x replaces x_sigma. The noise levels are from a schedule of
`schedule_steps` steps with the run's shift. Sources: Bengio et al. 2015, "Scheduled Sampling for Sequence Prediction
with Recurrent Neural Networks"; Huang et al. 2025, "ReflexFlow" (arXiv 2512.04904), for flow matching; SimpleTuner's
options.

x is off the line by x - x_sigma, which the target noise - x0 would leave as it is. The velocity that leads from x to x0
is (x - x0) / sigma = noise - x0 + (x - x_sigma) / sigma. For a perfect model the mean of x - x_sigma, given x, is 0
after one Euler step, so any share of the second term has the same optimum, and with a larger share the model corrects
more of its own errors. The target has the share correction * min(1, sigma / (s - sigma)): below s / 2 the whole term
would multiply the model's error by more than 1.
"""

import math

import torch

from schemas.config.methods import ScheduledSampling
from schemas.devices import to_device
from trainer.flow import interpolate, shift_sigma
from trainer.methods.base import Method, MethodStep


class ScheduledSamplingMethod(Method):
    def __init__(self, settings: ScheduledSampling) -> None:
        self.settings = settings

    def prepare(self, step: MethodStep) -> None:
        lengths_B = self.draw_lengths(step)
        passes = step.most_passes(int(lengths_B.max()))
        if not passes:
            return
        sigmas_NB = self.schedule(step)[: passes + 1]
        noisy_BCTHW = roll_out(step, sigmas_NB, lengths_B)
        start_B = sigmas_NB.gather(0, to_device(lengths_B, sigmas_NB.device)[None])[0]
        # correction / max(sigma, s - sigma); for samples that are not rolled out, sigma may be 0, and the drift is 0.
        share_B = self.settings.correction / torch.maximum(step.sigma_B, start_B - step.sigma_B).clamp(min=1e-6)
        drift_BCTHW = noisy_BCTHW - step.noisy_BCTHW
        step.target_BCTHW = step.target_BCTHW + share_B.view(-1, *[1] * (drift_BCTHW.ndim - 1)) * drift_BCTHW
        step.noisy_BCTHW = noisy_BCTHW

    def probability(self, number: int) -> float:
        """Returns the probability that a sample is rolled out in step `number` (from 0)."""
        settings = self.settings
        since = number - settings.start_step
        progress = min(1.0, max(0.0, since / settings.ramp_steps)) if settings.ramp_steps else float(since >= 0)
        if settings.ramp_shape == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        return settings.prob_start + (settings.probability - settings.prob_start) * progress

    def draw_lengths(self, step: MethodStep) -> torch.Tensor:
        """Returns the number of Euler steps of each sample, (B,) on the CPU; 0 for samples that are not rolled out."""
        probability, longest = self.probability(step.number), self.settings.max_step_offset
        if probability == 0:
            return torch.zeros(len(step.batch), dtype=torch.long)
        chosen_B = step.uniform("scheduled_sampling") < probability
        drawn_B = step.uniform("scheduled_sampling/steps")
        if self.settings.strategy == "biased_early":
            drawn_B = drawn_B.square()
        elif self.settings.strategy == "biased_late":
            drawn_B = 1 - (1 - drawn_B).square()
        lengths_B = 1 + (drawn_B * longest).long().clamp(max=longest - 1)
        # At most the number of steps from pure noise to sigma.
        u_B = shift_sigma(step.host_sigma_B.double(), 1 / step.shift)
        most_B = ((1 - u_B) * self.settings.schedule_steps).ceil().long()
        return torch.where(chosen_B, torch.minimum(lengths_B, most_B), 0)

    def schedule(self, step: MethodStep) -> torch.Tensor:
        """Returns sigma (N, B): row j is the noise level j Euler steps before the step's own sigma, at most 1."""
        u_B = shift_sigma(step.host_sigma_B.double(), 1 / step.shift)
        offsets_N = torch.arange(self.settings.max_step_offset + 1).to(u_B) / self.settings.schedule_steps
        sigmas_NB = shift_sigma((u_B + offsets_N[:, None]).clamp(max=1), step.shift).to(step.sigma_B.dtype)
        sigmas_NB[0] = step.host_sigma_B
        return to_device(sigmas_NB, step.sigma_B.device)


def roll_out(step: MethodStep, sigmas_NB: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """Returns inputs (B, C, T, h, w) at the step's sigma, after a forward pass for each row of `sigmas_NB` except the
    first. All rollouts end together, so a sample with fewer steps starts later."""
    clean_frames = step.family.clean_frames(step.task)
    x_BCTHW = step.noisy_BCTHW.clone()
    for number in range(len(sigmas_NB) - 1, 0, -1):
        host_rows = (lengths_B >= number).nonzero()[:, 0]
        rows = to_device(host_rows, x_BCTHW.device)
        if not len(host_rows):  # only other ranks have samples in this pass
            step.predict(step.noisy_BCTHW[:1], step.sigma_B[:1], step.batch.select(host_rows.new_zeros(1)))
            continue
        sigma_R, batch = sigmas_NB[number, rows], step.batch.select(host_rows)
        noise_RCTHW = step.noise_BCTHW[rows]
        starting_R = to_device(lengths_B[host_rows] == number, x_BCTHW.device).view(-1, 1, 1, 1, 1)
        x_RCTHW = torch.where(starting_R, interpolate(batch.latents_BCTHW, noise_RCTHW, sigma_R), x_BCTHW[rows])
        distance_R = (sigmas_NB[number - 1, rows] - sigma_R).view(-1, 1, 1, 1, 1)
        x_BCTHW[rows] = x_RCTHW + distance_R * step.predict(x_RCTHW, sigma_R, batch)
    x_BCTHW[:, :, :clean_frames] = step.noisy_BCTHW[:, :, :clean_frames]
    return x_BCTHW
