"""Guidance loss: training of checkpoints into which classifier-free guidance was distilled.

Such a checkpoint predicts the guided velocity of its teacher, u + s (v - u), and is sampled without guidance. The plain
target v = noise - x0 would teach it to predict the unguided velocity again, whose samples are pale and blurred. This
method's target is

    u + s (v - u)

with u the prediction of the trained model for the same input with the null prompt, its adapter on, without gradient and
dropout, and s = `scale`. Sources: the options of the same purpose in ai-toolkit (`do_guidance_loss`) and musubi-tuner
(`sigma_min`, here `below`). diffusion-pipe and DiffSynth-Studio compare (p + (s - 1) u) / s with v instead, p the
prediction with the caption: the same objective, with a loss and a gradient that are 1 / s^2 times as large.

u is not computed for samples whose noise level before the shift is less than `below`, where guidance hardly changes the
prediction; their target is v.
"""

from schemas.config.methods import Guidance
from schemas.devices import to_device
from trainer.flow import shift_sigma
from trainer.methods.base import Method, MethodStep


class GuidanceMethod(Method):
    def __init__(self, settings: Guidance) -> None:
        self.settings = settings

    def prepare(self, step: MethodStep) -> None:
        if self.settings.scale == 1:
            return
        guided_B = shift_sigma(step.host_sigma_B.double(), 1 / step.shift) >= self.settings.below
        if not step.most_passes(int(guided_B.any())):
            return
        rows = guided_B.nonzero()[:, 0]
        selected = rows if len(rows) else rows.new_zeros(1)  # another rank has samples with a guided target
        device = step.sigma_B.device
        device_rows = to_device(selected, device)
        batch = step.batch.select(selected).with_null_text()
        null_BCTHW = step.predict(step.noisy_BCTHW[device_rows], step.sigma_B[device_rows], batch)
        target_BCTHW = null_BCTHW + self.settings.scale * (step.target_BCTHW[device_rows] - null_BCTHW)
        step.target_BCTHW = step.target_BCTHW.index_copy(0, to_device(rows, device), target_BCTHW[: len(rows)])
