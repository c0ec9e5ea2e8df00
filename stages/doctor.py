"""doctor: lists the devices, libraries, decoders, disks and stores of this machine. For each missing one it shows the
consequence and the remedy.

The report begins with one sentence: "ready", or the missing things. The program needs only the base install. If a
configuration exists, doctor also checks that this machine meets its needs. Each probe is a process with a time limit,
so that a probe cannot end or block the program.
"""

import os
import platform
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from schemas.cli.console import NOT_COMPUTING, Console, Options, Report, make_app
from schemas.config.encoding import cores
from schemas.config.loading import load_config
from schemas.config.pipeline import Config
from schemas.devices import EXPANDABLE
from schemas.errors import LatentpressError
from schemas.interruption import check_stop
from schemas.libraries import LIBRARIES, find_library, is_installed, needed_libraries, needed_stores
from schemas.text_format import format_bytes, shown_path
from stages.discovery.sources.urls import strip_secrets
from stages.maintenance.probes import TIME_LIMIT_S, UNWRITABLE, find_version, kill_probes, run_probe

MAX_PROBES = 4  # processes at the same time: each may import torch
POLL_S = 1.0  # seconds between two progress lines
DEFAULT_CONFIG = Path("pipeline.yaml")
INSTALL_TORCH = "install the torch build for the card (docs/install.md, For a GPU)"
SLOW_ADVICE = "try again when the machine is idle, or with a longer --time-limit"
MAX_NAMES = 3  # failures in the first sentence of the report, and probes in a progress line
DTYPE_ADVICE = {
    "bfloat16": "set precisions to float32, or choose another device",
    "float16": "set precisions to bfloat16 or float32",
    "float8": "choose int8-torchao or int8-quanto, not fp8-torchao",
}

Row = dict[str, Any]
Finding = Mapping[str, Any]


def _row(name: str, finding: str, consequence: str = "", remedy: str = "") -> Row:
    return {"what": name, "found": finding, "what_follows": consequence, "remedy": remedy}


def _failure(item: str, problem: str, remedy: str) -> Row:
    return {"item": item, "path": item, "reason": problem, "message": remedy}


@dataclass
class Probe:
    """A check of one library, disk or store.

    section, name: section of the report, and name of the row in it. consequence, remedy: consequence of a problem, and
    how to correct it. arguments: arguments of `run_probe`; () if no process has to be started. options: options of the
    configuration that need the library or place. describe: function that returns the rows of a finding with several.
    """

    section: str
    name: str
    consequence: str
    remedy: str
    arguments: tuple[str, ...]
    options: Sequence[str] = ()
    finding: Finding = field(default_factory=dict)
    describe: Callable[[Finding], Iterator[Row]] | None = None

    def rows(self) -> Iterator[Row]:
        finding = self.finding
        if "problem" in finding:
            remedy = SLOW_ADVICE if finding.get("slow") else self.remedy
            yield _row(self.name, finding["problem"], self.consequence, remedy)
        elif self.describe is not None:
            yield from self.describe(finding)
        else:
            yield _row(self.name, finding["found"], finding.get("follows", ""), finding.get("remedy", ""))

    def failures(self) -> Iterator[Row]:
        """Yield the options of the configuration that need the missing library or place."""
        for row in self.rows():
            if row["what_follows"] == self.consequence:
                for option in self.options:
                    yield _failure(option, f"{row['what']}: {row['found']}", row["remedy"])


def run(
    config: None,
    options: Options,
    console: Console,
    *,
    time_limit: Annotated[
        float, typer.Option(min=1, max=3600, metavar="SECONDS", help="Time limit of each probe.")
    ] = TIME_LIMIT_S,
) -> Report:
    report = Report("doctor", dry_run=options.dry_run, what="probes")
    configuration = _read_configuration(options, report)
    probes = list(_list_probes(configuration))
    processes = [probe for probe in probes if probe.arguments]
    if options.dry_run:
        report.remaining, report.details["probes"] = len(processes), [probe.name for probe in processes]
        return report
    _run_probes(processes, time_limit, console)
    report.done = len(processes)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    report.details["machine"] = [
        _row("latentpress", version("latentpress")),
        _row("Python", f"{platform.python_version()}, {sys.executable}"),
        _row("machine", f"{platform.machine()}, {cores()} cores, {format_bytes(memory)} of memory"),
    ]
    for probe in probes:
        report.details.setdefault(probe.section, []).extend(probe.rows())
    torch = probes[0].finding
    if configuration is not None:
        report.failed += [row for probe in probes for row in probe.failures()]
        report.failed += _list_device_failures(configuration, torch) if "devices" in torch else ()
    report.answer = _summarize(options.config, configuration, report.failed, probes)
    return report


def _summarize(config: Path, configuration: Config | None, failed: Sequence[Row], probes: Sequence[Probe]) -> str:
    """Returns one sentence: ready, or not ready with the first failures."""
    if failed:
        causes = "; ".join(dict.fromkeys(f"{row['item']}: {row['reason']}" for row in failed[:MAX_NAMES]))
        suffix = f"; and {len(failed) - MAX_NAMES} more" if len(failed) > MAX_NAMES else ""
        return f"not ready for {shown_path(config)}: {causes}{suffix}"
    torch = probes[0].finding
    if configuration is None and "problem" in torch:
        return f"not ready to encode and train: torch: {torch['problem']}"
    slow_probes = [probe.name for probe in probes if probe.finding.get("slow")]
    exception = f", but these probes did not end in time: {', '.join(slow_probes)}" if slow_probes else ""
    devices = [row["device"] for row in torch.get("devices", ())]
    device = f", on {', '.join(devices[1:])}" if devices[1:] else ", on the CPU only, which is for tests"
    return (f"ready for {shown_path(config)}" if configuration is not None else "ready") + device + exception


def _read_configuration(options: Options, report: Report) -> Config | None:
    """Returns the configuration, or None if it does not exist or is not valid. An invalid one is added to the failures,
    and the probes are still run."""
    if options.config == DEFAULT_CONFIG and not DEFAULT_CONFIG.exists():
        report.details["configuration"] = f"not checked: {DEFAULT_CONFIG} does not exist; use --config FILE"
        return None
    report.details["configuration"] = str(options.config)
    try:
        return load_config(options.config, options.overrides)
    except LatentpressError as error:
        if not options.config.exists():
            raise
        report.failed.append(_failure(str(options.config), error.message, error.next_step))
        return None


def _list_probes(configuration: Config | None) -> Iterator[Probe]:
    """Yield all probes, the probe of torch first."""
    options_by_module = defaultdict[str, list[str]](list)
    for module, option in dict.fromkeys(needed_libraries(configuration)) if configuration else ():
        options_by_module[module].append(option)
    devices = dict.fromkeys(name for name, _ in _list_devices(configuration).values()) if configuration else {}
    for library in dict.fromkeys([*LIBRARIES, *map(find_library, options_by_module)]):
        arguments: tuple[str, ...] = ("library", library.module, library.distribution)
        section, describe = "libraries", None
        if library.module == "torch":
            arguments, section, describe = ("devices", *devices), "devices", _describe_devices
        finding = {} if is_installed(library.module) else {"problem": "not installed"}
        if not finding and not library.imported:
            finding = {"found": find_version(library.distribution)}
        yield Probe(section, library.distribution, f"no {library.purpose}", library.command,
                    () if finding else arguments, options_by_module[library.module], finding,
                    describe)  # fmt: skip
    if is_installed("av"):
        yield Probe("decoders", "FFmpeg", "videos cannot be read or written", find_library("av").command, ("decoders",),
                    describe=_describe_decoders)  # fmt: skip
    folders = {"root": configuration.root, "output": configuration.output} if configuration else {"this folder": "."}
    for name, location in folders.items():
        if "://" not in location:
            yield Probe("disks", name, UNWRITABLE, "choose another folder", ("disk", location), (name,))
    stores = defaultdict[str, list[str]](list)
    for option, url in needed_stores(configuration.root, configuration.datasets) if configuration else ():
        stores[url].append(option)
    for url, store_options in stores.items():
        remedy = "check the address, the network, and the credentials in the environment (docs/machines.md)"
        name, consequence = strip_secrets(url), "its files cannot be read or written"
        yield Probe("stores", name, consequence, remedy, ("store", url), store_options)


def _list_devices(configuration: Config) -> dict[str, tuple[str, str]]:
    """Returns option -> (name of the device, dtype of the computation)."""
    stages, model = configuration.stages, configuration.model.precision
    sections = {
        "encode-text": configuration.text,
        "encode-latents": configuration.latents,
        "encode-vision": configuration.vision if configuration.vision.model else None,
        "features": configuration.features,
        "caption": configuration.caption,
        "masks": configuration.masks,
    }
    dtypes: dict[str, str] = {
        stage: section.precision or model for stage, section in sections.items() if section is not None
    }
    dtypes |= {"decode": "float32", "score": "float32"}
    return {"train.device": (configuration.train.device, model)} | {
        f"stages.{stage}.device": (stages.resources(stage).device, dtype) for stage, dtype in dtypes.items()
    }


def _run_probes(probes: Sequence[Probe], time_limit: float, console: Console) -> None:
    """Run the probes and set their findings."""
    with (
        console.progress(len(probes), "probing", unit="probes") as progress,
        ThreadPoolExecutor(min(MAX_PROBES, cores())) as pool,
    ):
        futures = [pool.submit(run_probe, *probe.arguments, time_limit=time_limit) for probe in probes]
        try:
            while names := [probe.name for probe, future in zip(probes, futures, strict=True) if not future.done()]:
                check_stop()
                count = len(probes) - len(names)
                progress.say(count, f"{count}/{len(probes)} probes, waiting for {', '.join(names[:MAX_NAMES])}")
                wait(futures, POLL_S)
            progress.say(len(probes), "")
        except BaseException:  # an interrupt
            pool.shutdown(wait=False, cancel_futures=True)
            kill_probes()
            raise
    for probe, future in zip(probes, futures, strict=True):
        probe.finding = future.result()


def _describe_devices(finding: Finding) -> Iterator[Row]:
    devices = finding["devices"]
    consequence = "encoding and training run on the CPU, which is for tests" if len(devices) == 1 else ""
    build = f"{finding['version']}, built for {finding['build']}"
    yield _row("torch", build, consequence, INSTALL_TORCH if consequence else "")
    for device in devices:
        memory = (
            f", {format_bytes(device['memory'])}, {format_bytes(device['free'])} free" if "memory" in device else ""
        )
        yield _row(device["device"], f"{device['name']}{memory}")
        unsupported = [dtype for dtype in DTYPE_ADVICE if dtype not in device["dtypes"] and device["device"] != "cpu"]
        consequence = f"{', '.join(unsupported)} cannot be used" if unsupported else ""
        advice = "; ".join(DTYPE_ADVICE[dtype] for dtype in unsupported)
        yield _row(f"{device['device']}: dtypes", ", ".join(device["dtypes"]), consequence, advice)
        if device["type"] == "cuda" and finding["build"].startswith("CUDA"):
            yield _describe_allocator(f"{device['device']}: allocator", finding["allocator"])
        yield _row(f"{device['device']}: attention", ", ".join(["sdpa", *device["attention"]]))
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    consequence = "" if compiler else "train.compile cannot be used; sparse attention (NABLA) computes every block"
    yield _row("C++ compiler", compiler or "none", consequence, "" if compiler else "install one: apt install g++")


def _describe_allocator(name: str, user_setting: tuple[str, str] | None) -> Row:
    """Returns the row of torch's allocator. user_setting: the user's environment variable and its value."""
    if user_setting is None:
        return _row(name, f"{EXPANDABLE}, set by latentpress")
    variable, value = user_setting
    is_expandable = EXPANDABLE.lower() in value.lower().replace(" ", "")
    return _row(
        name,
        f"{value or 'nothing'}, set by {variable}",
        "" if is_expandable else "a change of bucket may fragment the memory",
        "" if is_expandable else f"add {EXPANDABLE} to {variable}, or unset {variable}",
    )


def _describe_decoders(finding: Finding) -> Iterator[Row]:
    advice = "install PyAV's own wheel: pip install --force-reinstall av; or convert these videos"
    for codec, has_decoder in finding.items():
        problem = () if has_decoder else ("videos with this codec are rejected", advice)
        yield _row(codec, "decoded" if has_decoder else "no decoder", *problem)


def _list_device_failures(configuration: Config, finding: Finding) -> Iterator[Row]:
    for option, (name, dtype) in _list_devices(configuration).items():
        if name in finding["missing"]:
            yield _failure(option, finding["missing"][name], f"use cpu, or {INSTALL_TORCH}")
            continue
        device, dtypes = next(row for row in finding["devices"] if row["type"] == finding["chosen"][name]), [dtype]
        if option == "train.device" and configuration.train.base_precision == "fp8-torchao":
            dtypes += ["float8"] if device["type"] == "cuda" else []
        for needed_dtype in dtypes:
            if needed_dtype not in device["dtypes"]:
                problem = f"{device['device']} does not support {needed_dtype}"
                yield _failure(option, problem, DTYPE_ADVICE[needed_dtype])


app = make_app(
    "doctor",
    "Check whether this machine is ready for the configuration: list devices, libraries, decoders, disks and stores, "
    "and how to install missing ones.",
    run,
    examples=["--config other.yaml", "--json"],
    unused=NOT_COMPUTING,
    needs_config=False,
)

if __name__ == "__main__":
    app()
