"""The encoding stages' use of torch: devices, errors while loading a model, tensors to arrays, freeing memory.

Only workers import it, after all work that does not need a model is done.
"""

import gc
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from safetensors import SafetensorError

from cache.models.compatibility import check_component
from cache.models.weights import REPLACE_CONFIG, WeightsError, config_errors
from cache.shards.tensors import Array
from schemas.config.encoding import Model, Resources
from schemas.devices import device_memory, device_name, find_device
from schemas.errors import LatentpressError

#: Parts of a RuntimeError's message if memory ran out: from torch's allocators on the CPU and on Apple's devices, from
#: CUDA, from CUDA's libraries and from Intel's.
OUT_OF_MEMORY_MESSAGES = (
    *("DefaultCPUAllocator", "MPS backend out of memory"),
    *("CUDA error: out of memory", "STATUS_ALLOC_FAILED", "OUT_OF_DEVICE_MEMORY"),
)
MEMORY_LIMITED = ("cuda", "xpu")  # devices on which torch can limit the memory of a process
#: Keys of picture sizes in an image processor's settings, and the largest valid side in pixels.
SIZE_KEYS, MAX_SIDE = ("size", "crop_size", "pad_size"), 4096
FREE_SHARE = 0.8  # of a card's free memory, used next to the trainer
#: Libraries that a shard's bytes may depend on; their versions are recorded if installed.
PROVENANCE_LIBRARIES = (
    *("torch", "diffusers", "transformers", "tokenizers", "accelerate", "optimum-quanto", "bitsandbytes", "flash-attn"),
    *("pillow", "pillow-heif", "av", "decord"),
)


def disable_progress_bars() -> None:
    """Hide the libraries' bars: the stages show their own."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def select_device(resources: Resources, process: int = 0) -> torch.device:
    """The device of process number `process`. Sets the number of CPU threads, which shards record."""
    torch.set_num_threads(resources.threads)
    return find_device(resources.device, process)


@contextmanager
def loading_errors(model: Model, part: str) -> Iterator[None]:
    """Context for loading a model: refuses a model of another family by name, and raises WeightsError for damaged
    weights."""
    check_component(model, part)
    with reading_errors(model.source, part):
        yield


@contextmanager
def reading_errors(source: str, part: str) -> Iterator[None]:
    """Context for reading weights: raises WeightsError for damaged weights, and LatentpressError if memory runs out."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, MemoryError, SafetensorError) as error:
        if isinstance(error, LatentpressError):
            raise
        if is_out_of_memory(error):
            problem = f"out of memory while loading {part} of {source}: {error}"
            raise LatentpressError(problem, "free memory, use fewer --workers or a larger card or machine") from error
        raise WeightsError(
            f"{source}: {part} can't be loaded: {type(error).__name__}: {error}",
            "replace the checkpoint with a whole copy",
        ) from error


def check_picture_sizes(folder: Path) -> None:
    """Raises WeightsError if a checkpoint's image processor makes pictures with a side of more than MOST_SIDE pixels,
    since such pictures would take all memory."""
    from transformers.image_processing_base import ImageProcessingMixin

    file = f"{folder}/preprocessor_config.json"
    with config_errors(file):
        values, _ = ImageProcessingMixin.get_image_processor_dict(folder)
        for key in SIZE_KEYS:
            size = values.get(key)
            sides = size.values() if isinstance(size, dict) else size if isinstance(size, list) else [size]
            for side in sides:
                if isinstance(side, int | float) and not side <= MAX_SIDE:
                    raise WeightsError(
                        f"{file}: {key} has a side of {side} pixels; at most {MAX_SIDE} are valid",
                        REPLACE_CONFIG,
                    )


def runtime_provenance(resources: Resources, device: torch.device) -> dict[str, Any]:
    """Versions of libraries, and hardware. They may differ between two valid shards of one fingerprint."""
    libraries = {}
    for name in PROVENANCE_LIBRARIES:
        with suppress(PackageNotFoundError):
            libraries[name] = version(name)
    hardware = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    if device.type != "cpu":
        hardware = device_name(device)
    if device.type == "cuda":
        libraries |= {"cuda": torch.version.cuda or "", "cudnn": str(torch.backends.cudnn.version())}
    codecs = {name: ".".join(map(str, number)) for name, number in av.library_versions.items()}
    return {
        "libraries": libraries | {name: codecs[name] for name in ("libavcodec", "libswscale") if name in codecs},
        "device": f"{device.type}: {hardware}",
        "threads": resources.threads,
    }


def to_array(tensor: torch.Tensor) -> Array:
    """Convert a tensor to its stored form: contiguous little-endian bytes, bfloat16 as its 16-bit pattern."""
    raw = tensor.detach().cpu().contiguous()
    dtype = str(raw.dtype).removeprefix("torch.")
    data = raw.reshape(-1).view(torch.uint8).numpy() if raw.numel() else np.empty(0, np.uint8)
    return Array(dtype, tuple(raw.shape), data)


@contextmanager
def memory_errors(work: str) -> Iterator[None]:
    """Context for computing: raises LatentpressError if memory runs out. work: description for the message."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        step = "free memory, or choose another --device; latents.tiling lowers the memory of autoencoders"
        raise LatentpressError(f"out of memory while {work}: {error}", step) from error


def limit_memory(device: torch.device) -> None:
    """Limit this process to FREE_SHARE of the card's free memory, because the trainer on the same card must not run out
    of memory. Has no effect on devices whose memory torch can't limit."""
    if device.type in MEMORY_LIMITED:
        free, total = device_memory(device)
        torch.get_device_module(device).set_per_process_memory_fraction(FREE_SHARE * free / total, device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on the device or on this machine; CUDA and its libraries report it in several ways."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY_MESSAGES)


def release_memory() -> None:
    """Free the memory that torch caches."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
