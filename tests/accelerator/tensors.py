"""Tensors of the emulated device, each of which holds a CPU tensor, and how operations on them are computed: on the
CPU, after what a real device would refuse was refused, and what it would wait for was counted."""

import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from tests.accelerator.counts import arrive_later, count_copy, read_in_order, wait

NAME = "npu"  # one of the names that a configuration may give
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")  # they take indices of the host
#: Operations whose result the host must know: a number, or how many there are.
WAITING = {"_local_scalar_dense": "item", "_unique2": "unique", "unique_dim": "unique"}
WAITING |= {name: name for name in ("nonzero", "masked_select", "equal", "bincount", "unique_consecutive")}


class Emulated(torch.Tensor):
    """A tensor on the device. raw: its numbers."""

    raw: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> "Emulated":
        made = torch.Tensor._make_wrapper_subclass(
            cls, raw.shape, raw.stride(), raw.storage_offset(), dtype=raw.dtype, device=torch.device(NAME, 0)
        )
        made.raw = raw
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return compute(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        copied.__dict__ |= {name: value for name, value in vars(self).items() if name != "raw"}
        return memo.setdefault(id(self), copied)

    def __repr__(self, **_: Any) -> str:
        return f"{self.raw!r} on {self.device}"

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().numpy()
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
            "memory first."
        )

    def tolist(self) -> Any:
        wait("tolist")
        return self.raw.tolist()

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.raw.untyped_storage()

    def pin_memory(self, *_: Any) -> torch.Tensor:
        raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")

    def is_pinned(self, *_: Any) -> bool:
        return False


def compute(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What the dispatcher calls for an operation that has a tensor of the device, or makes one."""
    name = func._schema.name.removeprefix("aten::")
    owners, host = dict[int, Emulated](), list[torch.Tensor]()  # owners: by the id of their CPU tensor

    def unwrap(value: Any) -> Any:
        if isinstance(value, Emulated):
            owners[id(value.raw)] = value
            return value.raw
        if isinstance(value, torch.Tensor):
            host.append(value)
        elif type(value) in (list, tuple):
            return type(value)(map(unwrap, value))
        return value

    raw_args, raw_kwargs = unwrap(args), {key: unwrap(value) for key, value in kwargs.items()}
    device = kwargs.get("device")
    if name == "copy_":
        return copy(args[0], args[1], *raw_args[:2], later=any(args[2:]) or bool(kwargs.get("non_blocking")))
    check_devices(name, args, owners, host)
    on_device = bool(owners) if device is None else device.type == NAME
    check_generators(on_device, *args, *kwargs.values())
    if device is not None:
        raw_kwargs["device"] = torch.device("cpu")
    if name in INDEXING:
        count_indices(args[1])
    elif name in WAITING or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        wait(WAITING.get(name, name))
    elif name == "_to_copy" and not on_device:
        return copy_to_host(func, raw_args, raw_kwargs)

    def wrap(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            owner = owners.get(id(value))
            if owner is not None and owner.shape != value.shape:
                raise NotImplementedError(f"{func} gives a tensor of {NAME} another shape")
            return Emulated(value.resolve_conj()) if owner is None else owner  # the device's tensor has no such mark
        return type(value)(map(wrap, value)) if type(value) in (list, tuple) else value

    found = func(*raw_args, **raw_kwargs)
    return wrap(found) if on_device else found


def check_devices(name: str, args: tuple, owners: dict[int, Emulated], host: list[torch.Tensor]) -> None:
    """RuntimeError for tensors on two devices. As on CUDA a number of the host, which has no dimension, is none."""
    if not owners:
        return
    if name in INDEXING:
        if not isinstance(args[0], Emulated):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        indices = {id(index) for index in args[1]}
        host = [tensor for tensor in host if id(tensor) not in indices]
    elif name.endswith("_") and any(args[0] is tensor for tensor in host):
        host = [torch.empty(1)]  # a number of the host can't take the result
    if any(tensor.dim() for tensor in host):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:0 and cpu! "
            f"(when computing {name})"
        )


def check_generators(on_device: bool, *values: Any) -> None:
    """RuntimeError where random numbers are drawn by a generator of the other device."""
    wanted = NAME if on_device else "cpu"
    for value in values:
        if isinstance(value, torch._C.Generator):
            found = NAME if value._cdata in Generator.on_device else "cpu"
            if found != wanted:
                raise RuntimeError(f"Expected a '{wanted}' device type for generator but found '{found}'")


class Generator(torch._C.Generator):
    """One of the device is one of the CPU that says otherwise, so that both draw the same numbers."""

    on_device: ClassVar = weakref.WeakValueDictionary[int, "Generator"]()  # by the address that operations get

    def __new__(cls, device: Any = "cpu") -> "Generator":
        made = super().__new__(cls)
        if torch.device(device).type == NAME:
            cls.on_device[made._cdata] = made
        return made

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, 0) if self._cdata in self.on_device else torch.device("cpu")


def count_indices(indices: Any) -> None:
    """Indices of the host are copied; of a mask the host asks how many elements it selects."""
    for index in indices:
        if index is not None and not isinstance(index, Emulated):
            count_copy("to device, blocking")
            wait("copy of an index")
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            wait("mask")


# --- copies between host and device ---


def copy(target: Any, source: Any, raw_target: torch.Tensor, raw_source: torch.Tensor, later: bool) -> torch.Tensor:
    """`target.copy_(source)`. later: without waiting, where that is possible."""
    if isinstance(target, Emulated):
        if not isinstance(source, Emulated):
            count_to_device(raw_source, later)
        raw_target.copy_(raw_source)
    else:
        send_to_host(raw_target, raw_source.to(raw_target.dtype), later and is_pinned(target))
    return target


def copy_from(source: Any, target: Any, non_blocking: bool = False) -> torch.Tensor:
    """What torch.tensor(..., device=...) calls in place of `copy_`."""
    return copy(target, source, getattr(target, "raw", target), getattr(source, "raw", source), non_blocking)


def count_to_device(source: torch.Tensor, later: bool) -> None:
    later = later and is_pinned(source)
    read_in_order(source)
    count_copy("to device" if later else "to device, blocking")
    if not later:
        wait("copy to device")


def copy_to_host(func: Any, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    """`tensor.to("cpu")`. One that does not block writes to pinned memory, as torch's does."""
    value = func(*args, **kwargs)
    if not (later := bool(kwargs.get("non_blocking"))):
        send_to_host(value, value, later)
        return value
    target = torch.empty_like(value)
    mark_pinned(target)
    send_to_host(target, value, later)
    return target


def send_to_host(target: torch.Tensor, value: torch.Tensor, later: bool) -> None:
    """later: the numbers arrive at the next wait."""
    count_copy("to host" if later else "to host, blocking")
    if later:
        arrive_later(target, value)
    else:
        wait("copy to host")
        if target is not value:
            target.copy_(value)


def is_pinned(tensor: torch.Tensor, *_: Any) -> bool:
    return tensor.device.type == "cpu" and hasattr(tensor.untyped_storage(), "pinned")


def mark_pinned(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().pinned = True  # it stays with the memory, not only with this object
    return tensor


def pin_memory(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return tensor if is_pinned(tensor) else mark_pinned(tensor.clone())


def with_pinning(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.empty` or the like, whose option `pin_memory` torch refuses without a device that it knows."""

    def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        made = factory(*args, **kwargs)
        return mark_pinned(made) if pin_memory else made

    return make
