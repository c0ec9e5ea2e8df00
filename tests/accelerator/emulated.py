"""A device that computes on the CPU and behaves as an accelerator does: torch's PrivateUse1 backend, in Python.

As on CUDA, an operation that mixes its tensors with those of the host is refused, a copy to the host that does not
block arrives later, and the host waits where it asks for a value; `counts.counting` counts that.

`install` changes torch for the rest of the process: `conftest.py` gives each test of this folder a process of its own.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from accelerate import state
from torch.nn.attention import SDPBackend
from torch.optim import optimizer
from torch.utils import _foreach_utils, backend_registration, swap_tensors

from tests.accelerator.counts import has_arrived, next_copy, wait
from tests.accelerator.tensors import NAME, Emulated, Generator, compute, copy_from, is_pinned, pin_memory, with_pinning

#: Operations that make a tensor of nothing, and that torch does not compose of `empty` and others that fill it.
FACTORIES = (
    *("empty.memory_format", "empty_strided", "arange", "arange.start", "arange.start_step", "linspace", "logspace"),
    *("eye", "eye.m", "randperm", "randperm.generator", "tril_indices", "triu_indices", "range", "range.step"),
)
#: What autocast computes in the lower precision, as on a CPU.
LOWERED = (
    *("linear", "mm", "bmm", "addmm", "addbmm", "baddbmm", "matmul", "conv1d", "conv2d", "conv3d", "convolution"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention"),
)
#: Of torch.accelerator, which asks the device's allocator and its guard in C++.
ACCELERATOR_FUNCTIONS = (
    *("synchronize", "empty_cache", "max_memory_allocated", "memory_allocated", "get_memory_info", "current_stream"),
    "set_device_index",
)

_libraries: list[torch.library.Library] = []  # what they register is forgotten with them


def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """`tensor.data = value`, which keeps the identity of the tensor, also from one device to another."""
    if isinstance(tensor, Emulated) is isinstance(value, Emulated):
        torch._C.TensorBase.data.__set__(tensor, value)
        if isinstance(tensor, Emulated):
            tensor.raw = value.raw
        return
    made, gradient, tensor.grad = value.detach(), tensor.grad, None
    made.requires_grad_(tensor.requires_grad)
    with patch.object(
        torch.Tensor, "_use_count", lambda self: 1
    ):  # what a forward pass before has kept is not looked at
        swap_tensors(tensor, torch.nn.Parameter(made, made.requires_grad) if is_parameter(tensor) else made)
    if gradient is not None:  # torch lets no gradient be elsewhere
        gradient.data = gradient.to(value.device)
        tensor.grad = gradient


def can_set_data(
    tensor: torch.Tensor, value: torch.Tensor, real: Any = torch._has_compatible_shallow_copy_type
) -> bool:
    return isinstance(tensor, Emulated) or isinstance(value, Emulated) or real(tensor, value)


def is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def lowered(operation: Any) -> Callable[..., Any]:
    """The operation as autocast computes it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(NAME)

        def cast(value: Any) -> Any:
            lowers = isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float16, torch.bfloat16)
            return value.to(dtype) if lowers else value

        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            return operation(*map(cast, args), **{key: cast(value) for key, value in kwargs.items()})

    return run


def attend(
    query: Any, key: Any, value: Any, mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, **more: Any
) -> torch.Tensor:
    """scaled_dot_product_attention by the kernel that the CPU chooses. Of other devices torch asks no kernel."""
    parts = [getattr(tensor, "raw", tensor) for tensor in (query, key, value, mask)]
    if torch._fused_sdp_choice(*parts, dropout_p, is_causal, **more) == SDPBackend.MATH.value:
        plain = torch.ops.aten._scaled_dot_product_attention_math
        return plain(query, key, value, mask, dropout_p, is_causal, **more)[0]
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -torch.inf)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=more.get("scale"))[0]


class Stream:
    """All streams are one."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.device = torch.device(NAME, 0)

    def record_event(self, event: Any = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        """Nothing: what is queued later is computed later."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing, either."""

    def synchronize(self) -> None:
        wait("synchronize")


class Event:
    def __init__(self, device: Any = None, **_: Any) -> None:
        self.until = 0

    def record(self, stream: Any = None) -> None:
        self.until = next_copy()

    def wait(self, stream: Any = None) -> None:
        """Nothing: there is one stream."""

    def query(self) -> bool:
        return has_arrived(self.until)

    def synchronize(self) -> None:
        wait("synchronize", self.until)


def make_backend() -> Any:
    """The module `torch.npu`."""
    stream = Stream()

    @contextmanager
    def on_stream(_: Any) -> Iterator[None]:
        yield

    return SimpleNamespace(
        _is_in_bad_fork=lambda: False,
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        set_device_index=lambda device: None,
        synchronize=lambda device=None: wait("synchronize"),
        empty_cache=lambda: None,
        manual_seed=lambda seed: None,
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        max_memory_allocated=lambda device=None: 0,
        memory_allocated=lambda device=None: 0,
        get_memory_info=lambda device=None: (1 << 40, 1 << 40),
        Stream=Stream,
        Event=Event,
        stream=on_stream,
        current_stream=lambda device=None: stream,
    )


def install() -> torch.device:
    """Give torch the device, which is its accelerator from now on."""
    torch.utils.rename_privateuse1_backend(NAME)
    backend = make_backend()
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend)
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", attend, "AutogradPrivateUse1")
    library.impl("_copy_from", copy_from, "PrivateUse1")
    others = torch.library.Library("_", "IMPL")
    others.fallback(lambda func, *args, **kwargs: compute(func, args, kwargs), "PrivateUse1")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _libraries.extend((library, others))
    for name in FACTORIES:
        packet, _, overload = name.partition(".")
        operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(name, lambda *args, func=operation, **kwargs: compute(func, args, kwargs), "PrivateUse1")
    for name in LOWERED:
        library.impl(name, lowered(getattr(torch.ops.aten, name)), "AutocastPrivateUse1")
    torch.Tensor.data = property(torch._C.TensorBase.data.__get__, set_data)
    torch._has_compatible_shallow_copy_type = can_set_data  # by which `Module.to` keeps parameters, as on CUDA
    torch.Tensor.pin_memory, torch.Tensor.is_pinned = pin_memory, is_pinned
    torch.empty, torch.empty_like, torch.zeros = map(with_pinning, (torch.empty, torch.empty_like, torch.zeros))
    torch.Generator, torch.Event, torch.Stream = Generator, Event, Stream
    for name in ACCELERATOR_FUNCTIONS:
        setattr(torch.accelerator, name, getattr(backend, name))
    state.is_npu_available = lambda *_: True  # accelerate looks for torch's package of that name
    optimizer._foreach_supported_types.append(Emulated)
    _foreach_utils._foreach_supported_types.append(Emulated)
    return torch.device(NAME, 0)
