"""Probes of this machine for `doctor`. Each runs in a separate process, because importing a library, or reading a store
or a disk, may crash, hang or print.

`python -m stages.maintenance.probes` reads a JSON list (the probe and its arguments) from standard input, and prints
its findings. The list is not passed as arguments of the process, because addresses may contain passwords."""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schemas.cli.starting import start_program
from schemas.devices import ALLOCATOR_VARIABLES
from schemas.text_format import describe_exit, format_bytes, shorten

if TYPE_CHECKING:
    import torch

TIME_LIMIT_S = 120.0  # torch from a cold disk and the first use of a card take a minute
LEAST_SPACE = 20 << 30  # bytes of free disk space; a cache of a few thousand clips needs more
UNWRITABLE = "nothing can be written there"
DTYPES = ("float32", "bfloat16", "float16")
FP8_CAPABILITY = (8, 9)  # Ada and Hopper
#: Codec -> FFmpeg's decoders; one of them is enough.
DECODERS = {
    "H.264": ("h264",),
    "H.265": ("hevc",),
    "VP9": ("vp9", "libvpx-vp9"),
    "AV1": ("libdav1d", "av1"),
    "ProRes": ("prores",),
}


_running: set[subprocess.Popen[str]] = set()


def run_probe(probe: str, *arguments: str, time_limit: float = TIME_LIMIT_S) -> dict[str, Any]:
    """The findings of a probe; {"problem": reason} if its process fails. If it takes longer than `time_limit` seconds,
    the findings also have "slow", and the process is killed but not awaited, because a process that hangs in the kernel
    does not end. The output goes to a file, because a pipe stays open while the probe's child processes hold it."""
    request = json.dumps([probe, *arguments])
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = start_program(
            "maintenance.probes",
            (),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        _running.add(process)
        try:
            process.communicate(request, time_limit)
        except subprocess.TimeoutExpired:
            _kill(process)
            return {"problem": f"no answer in {time_limit:g} s", "slow": True}
        finally:
            _running.discard(process)
        output.seek(0)
        errors.seek(0)
        try:
            return json.load(output)
        except ValueError:
            lines = errors.read().strip().splitlines()
            return {"problem": shorten(lines[-1], 200) if lines else f"its process {describe_exit(process.returncode)}"}


def kill_probes() -> None:
    """Kill all running probes."""
    for process in [*_running]:
        _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a process and the processes that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def probe_devices(*names: str) -> dict[str, Any]:
    """The version of torch and its devices. names: configured devices. Among the findings: missing, the reason why each
    unavailable device of `names` is not found; chosen, the types of the available devices; allocator, the user's
    variable of torch's allocator and its value, None if the user has set no variable."""
    import torch

    from schemas.devices import DeviceNotFound, device_memory, device_name, find_device

    builds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": getattr(torch.version, "xpu", None)}
    build = next((f"{name} {number}" for name, number in builds.items() if number), "CPU")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = [_describe("cpu", torch.backends.cpu.get_cpu_capability(), torch.device("cpu"))]
    kind = accelerator.type if accelerator is not None else "cpu"
    for number in range(torch.accelerator.device_count() if kind != "cpu" else 0):
        device = torch.device(kind, number)
        row = _describe(str(device), device_name(device), device)
        row["free"], row["memory"] = device_memory(device)
        devices.append(row)
    problems, types = {}, {}
    user_settings = [[name, os.environ[name]] for name in ALLOCATOR_VARIABLES if name in os.environ]
    for name in names:
        try:
            types[name] = find_device(name).type
        except DeviceNotFound as error:
            problems[name] = error.message
    return {
        **{"version": torch.__version__, "build": build, "devices": devices, "missing": problems, "chosen": types},
        "allocator": user_settings[0] if user_settings else None,
    }


def _describe(name: str, model: str, device: "torch.device") -> dict[str, Any]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel, varlen

    row: dict[str, Any] = {"device": name, "type": device.type, "name": model, "dtypes": [], "attention": []}
    for dtype in DTYPES:
        with suppress(RuntimeError, TypeError):
            matrix = torch.ones(16, 16, dtype=getattr(torch, dtype), device=device)
            if bool((matrix @ matrix == 16).all()):
                row["dtypes"].append(dtype)
    if (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
    ):
        row["dtypes"].append("float8")
    query = torch.ones(1, 2, 16, 64, dtype=torch.bfloat16, device=device)
    ends = torch.tensor([0, 9, 16], dtype=torch.int32, device=device)
    with suppress(RuntimeError), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        if bool(torch.nn.functional.scaled_dot_product_attention(query, query, query).isfinite().all()):
            row["attention"].append("cudnn")
    with suppress(RuntimeError):
        packed = query[0].transpose(0, 1)
        out = varlen.varlen_attn(packed, packed, packed, ends, ends, 9, 9)
        if isinstance(out, torch.Tensor) and bool(out.isfinite().all()):
            row["attention"].append("flash-varlen")
    return row


def probe_library(module: str, distribution: str) -> dict[str, Any]:
    """Import a library. Returns its version."""
    importlib.import_module(module)
    return {"found": find_version(distribution)}


def find_version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "of unknown version"


def probe_decoders() -> dict[str, Any]:
    """Whether PyAV's FFmpeg decodes each codec."""
    import av

    return {name: any(decoder in av.codecs_available for decoder in decoders) for name, decoders in DECODERS.items()}


def probe_store(url: str) -> dict[str, Any]:
    """List the first level of a store."""
    from stages.discovery.sources.urls import open_filesystem

    filesystem, path = open_filesystem(url)
    try:
        return {"found": f"reached, {len(filesystem.ls(path, detail=False))} names"}
    except FileNotFoundError:
        return {"found": "reached, 0 names"}


def probe_disk(location: str) -> dict[str, Any]:
    """Find the disk of a folder, which does not have to exist, and its free space."""
    path = Path(location).absolute()
    folder = next(part for part in (path, *path.parents) if part.is_dir())
    free = shutil.disk_usage(folder).free
    finding = {"found": f"{folder}: {format_bytes(free)} free"}
    if not os.access(folder, os.W_OK):
        return finding | {"follows": UNWRITABLE, "remedy": "choose another place, or allow this user to write"}
    if free < LEAST_SPACE:
        advice = "free space, or choose a place on another disk"
        return finding | {"follows": "little space for caches and checkpoints", "remedy": advice}
    return finding


PROBES: dict[str, Callable[..., dict[str, Any]]] = {
    "devices": probe_devices,
    "library": probe_library,
    "decoders": probe_decoders,
    "store": probe_store,
    "disk": probe_disk,
}


def main() -> None:
    from stages.discovery.sources.urls import scrub_secrets

    probe, *arguments = json.load(sys.stdin)
    warnings.simplefilter("ignore")
    with redirect_stdout(sys.stderr):
        try:
            findings = PROBES[probe](*arguments)
        except Exception as error:  # any error is a finding
            message = f"{type(error).__name__}: {error}".splitlines()[0]
            findings = {"problem": scrub_secrets(shorten(message, 200), *arguments[:1])}
    print(json.dumps(findings))


if __name__ == "__main__":
    main()
