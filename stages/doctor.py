"""doctor: what this machine has for latentpress (devices, libraries, decoders, disks, stores), what follows where
something is not there, and how it is put right.

It begins with one sentence: ready, or what is missing. It needs the base install alone and no configuration; with one
it also says what that needs and does not find. Each probe is a process with a time limit, so that nothing it tries can
end or hold up the program.
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
from schemas.errors import LatentpressError
from schemas.interruption import check_stop
from schemas.libraries import LIBRARIES, find_library, is_installed, needed_libraries, needed_stores
from schemas.text_format import format_bytes, shown_path
from stages.discovery.sources.urls import strip_secrets
from stages.maintenance.probes import TIME_LIMIT_S, UNWRITABLE, find_version, kill_probes, run_probe

MOST_PROBES = 4  # at a time: each may import torch
LOOK_S = 1.0  # between two looks at those that run
DEFAULT_CONFIG = Path("pipeline.yaml")
INSTALL_TORCH = "install the torch build for the card (docs/install.md, For a GPU)"
SLOW_ADVICE = "try again when the machine does nothing else, or with a longer --time-limit"
MOST_NAMED = 3  # failures in the sentence that the report begins with
DTYPE_ADVICE = {
    "bfloat16": "set precisions to float32, or choose another device",
    "float16": "set precisions to bfloat16 or float32",
    "float8": "choose int8-torchao or int8-quanto, not fp8-torchao",
}

Row = dict[str, Any]
Finding = Mapping[str, Any]


def _row(what: str, finding: str, follows: str = "", remedy: str = "") -> Row:
    return {"what": what, "found": finding, "what_follows": follows, "remedy": remedy}


def _failure(item: str, problem: str, remedy: str) -> Row:
    return {"item": item, "path": item, "reason": problem, "message": remedy}


@dataclass
class Probe:
    """A check of one library, disk or store.

    section, what: section of the report, and name of the row in it. follows, remedy: consequence of a problem, and what
    to do. words: arguments of `run_probe`; () if no process has to be started. options: options of the configuration
    that need the library or place. describe: function that returns the rows of a finding, if a finding has several.
    """

    section: str
    what: str
    follows: str
    remedy: str
    words: tuple[str, ...]
    options: Sequence[str] = ()
    finding: Finding = field(default_factory=dict)
    describe: Callable[[Finding], Iterator[Row]] | None = None

    def rows(self) -> Iterator[Row]:
        finding = self.finding
        if "problem" in finding:
            yield _row(self.what, finding["problem"], self.follows, SLOW_ADVICE if finding.get("slow") else self.remedy)
        elif self.describe is not None:
            yield from self.describe(finding)
        else:
            yield _row(self.what, finding["found"], finding.get("follows", ""), finding.get("remedy", ""))

    def failures(self) -> Iterator[Row]:
        """Options of the configuration that need what is not here."""
        for row in self.rows():
            if row["what_follows"] == self.follows:
                for option in self.options:
                    yield _failure(option, f"{row['what']}: {row['found']}", row["remedy"])


def run(
    config: None,
    options: Options,
    console: Console,
    *,
    time_limit: Annotated[
        float, typer.Option(min=1, max=3600, metavar="SECONDS", help="Of one probe; what takes longer is reported.")
    ] = TIME_LIMIT_S,
) -> Report:
    report = Report("doctor", dry_run=options.dry_run, what="probes")
    configuration = _read_configuration(options, report)
    probes = list(_list_probes(configuration))
    running = [probe for probe in probes if probe.words]
    if options.dry_run:
        report.remaining, report.details["probes"] = len(running), [probe.what for probe in running]
        return report
    _run_probes(running, time_limit, console)
    report.done = len(running)
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
    report.answer = _answer(options.config, configuration, report.failed, probes)
    return report


def _answer(config: Path, configuration: Config | None, failed: Sequence[Row], probes: Sequence[Probe]) -> str:
    """One sentence: ready, or what is missing."""
    if failed:
        first = "; ".join(dict.fromkeys(f"{row['item']}: {row['reason']}" for row in failed[:MOST_NAMED]))
        more = f"; and {len(failed) - MOST_NAMED} more" if len(failed) > MOST_NAMED else ""
        return f"not ready for {shown_path(config)}: {first}{more}"
    torch = probes[0].finding
    if configuration is None and "problem" in torch:
        return f"not ready to encode and train: torch: {torch['problem']}"
    silent = [probe.what for probe in probes if probe.finding.get("slow")]
    rest = f", but without an answer from {', '.join(silent)}" if silent else ""
    devices = [row["device"] for row in torch.get("devices", ())]
    where = f", on {', '.join(devices[1:])}" if devices[1:] else ", on the CPU alone, which is for tests"
    return (f"ready for {shown_path(config)}" if configuration is not None else "ready") + where + rest


def _read_configuration(options: Options, report: Report) -> Config | None:
    """The configuration, if there is one. One that is not valid is among the failures, and the probes are run."""
    if options.config == DEFAULT_CONFIG and not DEFAULT_CONFIG.exists():
        report.details["configuration"] = "none here: nothing is compared with what it needs; --config FILE names one"
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
    """All probes. The probe of torch is the first."""
    needed = defaultdict[str, list[str]](list)
    for module, option in dict.fromkeys(needed_libraries(configuration)) if configuration else ():
        needed[module].append(option)
    named = dict.fromkeys(name for name, _ in _list_devices(configuration).values()) if configuration else {}
    for library in dict.fromkeys([*LIBRARIES, *map(find_library, needed)]):
        words: tuple[str, ...] = ("library", library.module, library.distribution)
        section, describe = "libraries", None
        if library.module == "torch":
            words, section, describe = ("devices", *named), "devices", _describe_devices
        finding = {} if is_installed(library.module) else {"problem": "not installed"}
        if not finding and not library.imported:
            finding = {"found": find_version(library.distribution)}
        yield Probe(section, library.distribution, f"no {library.purpose}", library.command, () if finding else words,
                    needed[library.module], finding, describe)  # fmt: skip
    if is_installed("av"):
        yield Probe("decoders", "FFmpeg", "no videos are read or written", find_library("av").command, ("decoders",),
                    describe=_describe_decoders)  # fmt: skip
    folders = {"root": configuration.root, "output": configuration.output} if configuration else {"this folder": "."}
    for name, location in folders.items():
        if "://" not in location:
            yield Probe("disks", name, UNWRITABLE, "choose another place for it", ("disk", location), (name,))
    stores = defaultdict[str, list[str]](list)
    for option, url in needed_stores(configuration.root, configuration.datasets) if configuration else ():
        stores[url].append(option)
    for url, users in stores.items():
        remedy = "check the address, the network, and the credentials in the environment (docs/machines.md)"
        yield Probe("stores", strip_secrets(url), "nothing is read or written there", remedy, ("store", url), users)


def _list_devices(configuration: Config) -> dict[str, tuple[str, str]]:
    """Option -> the device that it names, and the dtype in which that computes."""
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
    """Fill in the findings."""
    with (
        console.progress(len(probes), "probing", unit="probes") as progress,
        ThreadPoolExecutor(min(MOST_PROBES, cores())) as pool,
    ):
        futures = [pool.submit(run_probe, *probe.words, time_limit=time_limit) for probe in probes]
        try:
            while waiting := [probe.what for probe, future in zip(probes, futures, strict=True) if not future.done()]:
                check_stop()
                done = len(probes) - len(waiting)
                progress.say(done, f"{done}/{len(probes)} probes, waiting for {', '.join(waiting[:MOST_NAMED])}")
                wait(futures, LOOK_S)
            progress.say(len(probes), "")
        except BaseException:  # an interrupt
            pool.shutdown(wait=False, cancel_futures=True)
            kill_probes()
            raise
    for probe, future in zip(probes, futures, strict=True):
        probe.finding = future.result()


def _describe_devices(finding: Finding) -> Iterator[Row]:
    devices = finding["devices"]
    follows = "encoding and training on the CPU, which is for tests" if len(devices) == 1 else ""
    build = f"{finding['version']}, built for {finding['build']}"
    yield _row("torch", build, follows, INSTALL_TORCH if follows else "")
    for device in devices:
        memory = (
            f", {format_bytes(device['memory'])}, {format_bytes(device['free'])} free" if "memory" in device else ""
        )
        yield _row(device["device"], f"{device['name']}{memory}")
        absent = [dtype for dtype in DTYPE_ADVICE if dtype not in device["dtypes"] and device["device"] != "cpu"]
        follows = f"it does not compute in {', '.join(absent)}" if absent else ""
        advice = "; ".join(DTYPE_ADVICE[dtype] for dtype in absent)
        yield _row(f"{device['device']}: dtypes", ", ".join(device["dtypes"]), follows, advice)
        yield _row(f"{device['device']}: attention", ", ".join(["native", *device["attention"]]))
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    follows = "" if compiler else "no train.compile; sparse attention (NABLA) computes every block"
    yield _row("C++ compiler", compiler or "none", follows, "" if compiler else "apt install g++, or the like")


def _describe_decoders(finding: Finding) -> Iterator[Row]:
    advice = "install PyAV's own wheel: pip install --force-reinstall av; or convert these videos"
    for codec, present in finding.items():
        follows = () if present else ("videos of this codec are rejected", advice)
        yield _row(codec, "decoded" if present else "no decoder", *follows)


def _list_device_failures(configuration: Config, finding: Finding) -> Iterator[Row]:
    for option, (name, dtype) in _list_devices(configuration).items():
        if name in finding["missing"]:
            yield _failure(option, finding["missing"][name], f"use cpu, or {INSTALL_TORCH}")
            continue
        device, dtypes = next(row for row in finding["devices"] if row["type"] == finding["chosen"][name]), [dtype]
        if option == "train.device" and configuration.train.base_precision == "fp8-torchao":
            dtypes += ["float8"] if device["type"] == "cuda" else []
        for needed in dtypes:
            if needed not in device["dtypes"]:
                yield _failure(option, f"{device['device']} does not compute in {needed}", DTYPE_ADVICE[needed])


app = make_app(
    "doctor",
    "What is installed and found on this machine, what is missing and how to get it; whether it suffices for the "
    "configuration.",
    run,
    examples=["--config other.yaml", "--json"],
    unused=NOT_COMPUTING,
    needs_config=False,
)

if __name__ == "__main__":
    app()
