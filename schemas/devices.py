"""Devices: the names that a configuration may give, and the device of this machine that a name stands for.

The only module of `schemas` that imports torch, and only inside functions, so that the trainer and the stages choose
devices by the same rules. All functions use `torch.accelerator`, so every accelerator that torch supports can be used.
"""

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from schemas.errors import USAGE, LatentpressError

if TYPE_CHECKING:
    import torch

#: torch's names of accelerators: NVIDIA and AMD (cuda), Intel, Apple, Ascend, Gaudi, Cambricon, Moore Threads, Meta
ACCELERATORS = ("cuda", "xpu", "mps", "npu", "hpu", "mlu", "musa", "mtia")
NAME_OF_DEVICE = rf"^(auto|cpu|({'|'.join(ACCELERATORS)})(:[0-9]{{1,3}})?)$"
DESCRIPTION = "auto, cpu, cuda, cuda:N, xpu, mps or another device of torch"
#: Devices that copy weights on one stream while another stream computes.
STREAM_DEVICES = ("cuda", "xpu")
#: Devices that share the host's memory, so tensors are not pinned for them.
UNIFIED_MEMORY = ("cpu", "mps")
ALIGNMENT = 64  # bytes; tensors that are copied together begin at multiples of it
#: Bytes of a card that are reserved for the CUDA context, memory inside kernels and fragmentation
RESERVED = 1 << 30
#: Variables of torch's allocator of CUDA memory; the first one that is set applies.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
#: A setting of the allocator. Segments of fixed sizes, torch's default, fragment when the bucket changes.
EXPANDABLE = "expandable_segments:True"
COMFORTABLE = 0.92  # share of a card's memory; a program that needs more of it barely fits


def judge_fit(needed: float, memory: float) -> Literal["yes", "barely", "no"]:
    """Whether a program fits a card. needed: memory that it needs, with RESERVED; memory: memory of the card, in the
    same unit."""
    return "no" if needed > memory else "barely" if needed > COMFORTABLE * memory else "yes"


class DeviceNotFound(LatentpressError):
    """Raised if the requested device is not available."""

    exit_code = USAGE


def find_device(name: str, process: int = 0) -> "torch.device":
    """The device that `name` refers to on this machine. "auto" is the accelerator that torch finds, else the CPU.

    process: number of this process among the processes of this machine. A name without a number assigns the devices to
    the processes in turn. DeviceNotFound if the device does not exist; it is never replaced by a different device.
    """
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "cpu" or (name == "auto" and accelerator is None):
        return torch.device("cpu")
    count = torch.accelerator.device_count() if accelerator is not None else 0
    kind, _, number = name.partition(":")
    if accelerator is None or kind not in ("auto", accelerator.type) or int(number or 0) >= count:
        devices = "no accelerator" if accelerator is None else f"{count} {accelerator.type} device{'s'[: count != 1]}"
        raise DeviceNotFound(
            f"device {name} is not available: torch {torch.__version__} finds {devices}",
            "Use --device cpu, or install the torch build for your card (docs/install.md, For a GPU). "
            "`latentpress doctor` lists the devices.",
        )
    if accelerator.type == "cuda" and torch.version.hip is None and sys.platform == "linux":
        use_expandable_segments()
    if not number and count > 1:
        number = str(process % count)
    return torch.device(f"{accelerator.type}:{number}" if number else accelerator.type)


def use_expandable_segments() -> None:
    """Set EXPANDABLE in the environment of this process and of the processes that it starts, unless the user has set
    any of ALLOCATOR_VARIABLES. torch reads the variables at its first allocation on a card."""
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ[ALLOCATOR_VARIABLES[-1]] = EXPANDABLE


def pins_memory(device: "torch.device") -> bool:
    """Whether host memory is pinned (page-locked) for this device, so that copies run while the host continues."""
    return device.type not in UNIFIED_MEMORY


def to_device(tensor: "torch.Tensor", device: "torch.device") -> "torch.Tensor":
    """A copy of the tensor on the device. The host does not wait for the device's queue, since the copy is from pinned
    memory; a copy from pageable memory would wait."""
    pinned = tensor.device.type == "cpu" and pins_memory(device)
    return (tensor.pin_memory() if pinned else tensor).to(device, non_blocking=pinned)


def to_device_together(tensors: "Sequence[torch.Tensor]", device: "torch.device") -> "list[torch.Tensor]":
    """Copies of host tensors on the device, like `to_device`, made by a single transfer. The copies share one block of
    device memory, which is freed when none of them is used any more."""
    import torch

    if not pins_memory(device):
        return [tensor.to(device) for tensor in tensors]
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]

    def placed(packed: torch.Tensor) -> list[torch.Tensor]:
        parts = zip(packed.split(sizes), tensors, strict=True)
        return [part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for part, tensor in parts]

    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    for target, tensor in zip(placed(packed), tensors, strict=True):
        target.copy_(tensor)
    return placed(packed.to(device, non_blocking=True))


class HostCopy:
    """Copies of tensors from one device to the host. The copies start when the object is created; `wait` and `wait_all`
    synchronize once and return the tensors on the host."""

    def __init__(self, *tensors: "torch.Tensor") -> None:
        import torch

        self._arrived: torch.Event | None = None
        if pins_memory(device := tensors[0].device):
            targets = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
            pairs = zip(targets, tensors, strict=True)
            self._tensors = [target.copy_(tensor, non_blocking=True) for target, tensor in pairs]
            self._arrived = torch.Event(device)
            self._arrived.record()
        else:
            self._tensors = [tensor.to("cpu") for tensor in tensors]

    def wait(self) -> "torch.Tensor":
        """The only tensor, on the host."""
        (tensor,) = self.wait_all()
        return tensor

    def wait_all(self) -> "list[torch.Tensor]":
        """The tensors on the host, in their order."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensors


def has_float64(device: "torch.device") -> bool:
    return device.type != "mps"


def device_name(device: "torch.device") -> str:
    """The name of the card; if it has no name, torch's type of the device."""
    import torch

    module = torch.get_device_module(device)
    return module.get_device_name(device) if hasattr(module, "get_device_name") else device.type


def device_memory(device: "torch.device") -> tuple[int, int]:
    """(free, total) bytes of an accelerator's memory. For mps, total is the maximum recommended by torch."""
    import torch

    if device.type == "mps":
        most = torch.mps.recommended_max_memory()
        return most - torch.mps.driver_allocated_memory(), most
    return torch.accelerator.get_memory_info(device)
