"""Measurements of an optimizer step: losses by bucket and by noise level.

Everything is summed over the ranks in one call and copied to the host at once, so measuring adds no wait to a step.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from accelerate import Accelerator

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

    def reduce(self, accelerator: Accelerator) -> torch.Tensor:
        """(N,) sums over the ranks, for `describe`."""
        logged = [value[None] for value in self._logged.values()]
        measured = torch.cat([self._by_bucket.flatten(), self._by_quarter.flatten(), *logged])
        return accelerator.reduce(measured, "sum")

    def describe(self, sums: Sequence[float]) -> dict[str, Any]:
        """The metrics "loss" (the mean over the global batch), the metrics that methods logged, "loss_by_bucket" and
        "loss_by_sigma" (means over the samples of each bucket and quarter in the batch), and "set_aside", the number of
        samples that were left out, if there are any."""
        buckets = self.buckets
        losses, counts, rest = sums[:buckets], sums[buckets : 2 * buckets], sums[2 * buckets :]
        logged = rest[2 * len(QUARTERS) :]
        total = sum(counts)
        quarters = zip(QUARTERS, rest[: len(QUARTERS)], rest[len(QUARTERS) : 2 * len(QUARTERS)], strict=True)
        return {
            "loss": sum(losses) / max(1, total),
            **{name: value / max(1, total) for name, value in zip(self._logged, logged, strict=True)},
            "loss_by_bucket": {
                bucket: loss / count for bucket, loss, count in zip(self._samples, losses, counts, strict=True) if count
            },
            "loss_by_sigma": {name: loss / count for name, loss, count in quarters if count},
        }


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

    def read(self) -> tuple[dict[str, Any], float]:
        """The metrics of the losses, and the norm of the gradients. Waits until the device has computed them."""
        *sums, norm = self._values.wait().tolist()
        return self._losses.describe(sums), norm
