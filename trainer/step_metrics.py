"""Measurements of an optimizer step: losses by bucket and by noise level, and the gradient noise scale.

Everything is summed over the ranks in one call and copied to the host at once, so measuring adds no wait to a step.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from schemas.devices import HostCopy

QUARTERS = ("0-0.25", "0.25-0.5", "0.5-0.75", "0.75-1")  # of sigma


class StepLosses:
    """Sums of the losses of one step's samples. buckets: bucket -> micro-batches of all ranks."""

    def __init__(self, buckets: Mapping[str, int], batch_size: int, device: torch.device):
        self.buckets = len(buckets)
        self._samples = {bucket: count * batch_size for bucket, count in buckets.items()}
        self._quarters = torch.arange(len(QUARTERS), device=device)
        self._by_bucket = torch.zeros(2, len(buckets), device=device)  # sums of losses, and numbers of samples
        self._by_quarter = torch.zeros(2, len(QUARTERS), device=device)  # sums of losses, and numbers of samples
        self._logged: dict[str, torch.Tensor] = {}  # sums

    def add(
        self,
        bucket: str,
        sigma_B: torch.Tensor,
        loss_B: torch.Tensor,
        logged: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        """Add one micro-batch. A loss that is not finite stays in its own quarter and bucket. logged: (B,) numbers of
        methods."""
        for name, value_B in logged.items():
            self._logged[name] = self._logged.get(name, 0.0) + value_B.sum().float()
        bucket_number = list(self._samples).index(bucket)
        self._by_bucket[0, bucket_number] += loss_B.sum()
        self._by_bucket[1, bucket_number] += len(loss_B)
        quarter_B = (sigma_B * len(QUARTERS)).long().clamp(0, len(QUARTERS) - 1)
        belongs_BQ = quarter_B[:, None] == self._quarters
        self._by_quarter[0] += torch.where(belongs_BQ, loss_B[:, None].float(), 0.0).sum(0)
        self._by_quarter[1] += belongs_BQ.sum(0)

    def reduce(self, accelerator: Accelerator, squares: torch.Tensor) -> torch.Tensor:
        """(N,) sums over the ranks, for `describe`. squares: (1,), of the gradients, which are summed, too."""
        logged = [value[None] for value in self._logged.values()]
        measured = torch.cat([self._by_bucket.flatten(), self._by_quarter.flatten(), squares, *logged])
        return accelerator.reduce(measured, "sum")

    def describe(self, sums: Sequence[float]) -> tuple[dict[str, Any], float]:
        """The metrics "loss", the mean over the global batch, those that methods logged, "loss_by_bucket" and
        "loss_by_sigma": means over its samples, of buckets and quarters that it has. "set_aside": how many of its
        samples were left out, where there are some. And the sum of the squares."""
        buckets = self.buckets
        losses, counts, rest = sums[:buckets], sums[buckets : 2 * buckets], sums[2 * buckets :]
        squares, *others = rest[2 * len(QUARTERS) :]
        total = sum(counts)
        left_out = round(sum(self._samples.values()) - total)
        quarters = zip(QUARTERS, rest[: len(QUARTERS)], rest[len(QUARTERS) : 2 * len(QUARTERS)], strict=True)
        numbers = {
            "loss": sum(losses) / max(1, total),
            **{name: value / max(1, total) for name, value in zip(self._logged, others, strict=True)},
            "loss_by_bucket": {
                bucket: loss / count for bucket, loss, count in zip(self._samples, losses, counts, strict=True) if count
            },
            "loss_by_sigma": {name: loss / count for name, loss, count in quarters if count},
            **({"set_aside": left_out} if left_out else {}),
        }
        return numbers, squares


class StepNumbers:
    """The numbers of an optimizer step, on their way to the host.

    sums, norm: what `losses` reduced, and (), the norm of the gradients. finite: (), on the device: 1 where the losses
    and the norm are finite, else 0. known, measured: metrics that the host knows before and after the step is queued.
    metrics: None until they are read.
    """

    def __init__(
        self, step: int, losses: StepLosses, sums: torch.Tensor, norm: torch.Tensor, known: Mapping[str, Any]
    ) -> None:
        self.step, self.known, self._losses = step, known, losses
        self.measured: dict[str, Any] = {}
        self.metrics: dict[str, Any] | None = None
        values = torch.cat([sums, norm.detach().reshape(1).to(sums)])
        self.finite = torch.cat([values[: losses.buckets], values[-1:]]).isfinite().all().float()
        self._values = HostCopy(values)

    def read(self) -> tuple[dict[str, Any], float, float]:
        """The metrics of the losses, the sum of the gradients' squares, and their norm. Waits until they are there."""
        *sums, norm = self._values.wait().tolist()
        return *self._losses.describe(sums), norm


class GradientNoise:
    """The simple noise scale of McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A.1.

    Roughly the global batch, in samples, above which a larger one hardly saves steps: tr(S) / |G|^2, where S is the
    covariance of the gradients of single samples and G their mean. With |G_b|^2, the squared norm of the gradient of a
    micro-batch of b samples, averaged over all of the step's, and |G_B|^2, that of the global batch of B:

        |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b),    tr(S) = (|G_b|^2 - |G_B|^2) / (1 / b - 1 / B),

    each without bias, and each averaged over the steps before their ratio is taken. Cost: in every `every`-th step, the
    norm of each parameter's gradient in each backward pass: one small operation for each (640 matrices of a LoRA took
    24 ms on a CPU). The hooks see a rank's own gradient, before DistributedDataParallel or FSDP2 averages it. FSDP2
    computes it of the gathered weights, which modules have from before their forward pass.
    """

    DECAY = 0.98  # of the averages, for one measurement

    def __init__(self, model: torch.nn.Module, batch_size: int, accumulate: int, ranks: int, every: int):
        self._model = model
        self._small, self._accumulate, self._ranks = batch_size, accumulate, ranks
        self._every = every if accumulate * ranks > 1 else 0
        self._hooks: list[RemovableHandle] = []
        self._measured = set[torch.nn.Parameter]()
        self._norms: list[torch.Tensor] = []
        self.noise, self.signal = 0.0, 0.0  # the averages of tr(S) and |G|^2, times the same factor

    def begin(self, step: int) -> None:
        """Measure step `step` (from 0), if it is one of those."""
        if not self._every or step % self._every:
            return
        self._add_hooks(self._model)
        for part in self._model.modules():
            if isinstance(part, FSDPModule):
                self._hooks.append(part.register_forward_pre_hook(self._add_hooks))

    def _add_hooks(self, part: torch.nn.Module, *_: object) -> None:
        """Watch the parameters whose gradients can be seen, once each."""
        for weight in part.parameters():
            if weight.requires_grad and not isinstance(weight, DTensor) and weight not in self._measured:
                self._measured.add(weight)
                self._hooks.append(weight.register_hook(self._measure))

    def _measure(self, gradient: torch.Tensor) -> None:
        self._norms.append(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32))

    def take_squares(self, device: torch.device) -> torch.Tensor:
        """(1,) sum of the squared norms of the step, which ends."""
        for hook in self._hooks:
            hook.remove()
        norms, self._norms, self._hooks, self._measured = self._norms, [], [], set()
        return torch.stack(norms).square().sum()[None].to(device) if norms else torch.zeros(1, device=device)

    def update(self, norm: float, squares: float) -> dict[str, float]:
        """The metric "gradient_noise_scale" after a step whose gradient has this norm, unclipped, and whose
        micro-batches' gradients, of all ranks, have squared norms of this sum, 0 where they were not measured. None
        where it was not measured, can't be told (one micro-batch a step), or the averages are not above 0."""
        if not squares:
            return {}
        batches, b = self._accumulate * self._ranks, self._small
        # A micro-batch's loss is divided by accumulate before its backward pass.
        small, big = squares * self._accumulate**2 / batches, norm**2
        signal, noise = (batches * big - small) / (batches - 1), b * (small - big) / (1 - 1 / batches)
        self.signal = self.DECAY * self.signal + (1 - self.DECAY) * signal
        self.noise = self.DECAY * self.noise + (1 - self.DECAY) * noise
        return {"gradient_noise_scale": self.noise / self.signal} if min(self.signal, self.noise) > 0 else {}
