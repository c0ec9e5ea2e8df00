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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
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
from schemas.libraries import LIBRARIES, Library, find_library, is_installed, needed_libraries, needed_stores
from schemas.text_format import format_bytes, shown_path
from stages.discovery.sources.urls import strip_secrets
from stages.maintenance.probes import TIME_LIMIT_S, kill_probes, run_probe

MOST_PROBES = 4  # at a time: each may import torch
LOOK_S = 1.0  # between two looks at those that run
LEAST_SPACE = 20 << 30  # bytes of a disk; a cache of a few thousand clips takes more
DEFAULT_CONFIG = Path("pipeline.yaml")
STORE_ADVICE = "check the address, the network, and the credentials in the environment (docs/machines.md)"
UNWRITABLE = "nothing can be written there"
INSTALL_TORCH = "install the torch build for the card (docs/install.md, For a GPU)"
SLOW_ADVICE = "try again when the machine does nothing else, or with a longer --time-limit"
MOST_NAMED = 3  # failures in the sentence that the report begins with
DTYPE_ADVICE = {
    "bfloat16": "set precisions to float32, or choose another device",
    "float16": "set precisions to bfloat16 or float32",
    "float8": "choose int8-torchao or int8-quanto, not fp8-torchao",
}

Row = dict[str, Any]
#: Key -> what a probe found: of "devices", of "decoders", of a library's module, of a store's address.
Findings = Mapping[str, Mapping[str, Any]]


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
    tasks = dict(_list_probes(configuration))
    if options.dry_run:
        report.remaining, report.details["probes"] = len(tasks), [*tasks]
        return report
    findings = _run_probes(tasks, time_limit, console)
    report.done = len(findings)
    sections = {
        "machine": _describe_machine(),
        "devices": _describe_devices(findings.get("devices", {"problem": "torch is not installed"})),
        "libraries": _describe_libraries(findings),
        "decoders": _describe_decoders(findings.get("decoders", {"problem": "av is not installed"})),
        "disks": _describe_disks(configuration, findings),
        "stores": _describe_stores(findings),
    }
    report.details |= {name: rows for name, section in sections.items() if (rows := list(section))}
    if configuration is not None:
        report.failed += _list_failures(configuration, findings)
    report.answer = _answer(options.config, configuration, report.failed, findings)
    return report


def _answer(config: Path, configuration: Config | None, failed: Sequence[Row], findings: Findings) -> str:
    """One sentence: ready, or what is missing."""
    if failed:
        first = "; ".join(dict.fromkeys(f"{row['item']}: {row['reason']}" for row in failed[:MOST_NAMED]))
        more = f"; and {len(failed) - MOST_NAMED} more" if len(failed) > MOST_NAMED else ""
        return f"not ready for {shown_path(config)}: {first}{more}"
    problem = findings.get("devices", {"problem": "it is not installed"}).get("problem")
    if configuration is None and problem is not None:
        return f"not ready to encode and train: torch: {problem}"
    silent = [key for key, finding in findings.items() if finding.get("slow")]
    rest = f", but without an answer from {', '.join(silent)}" if silent else ""
    devices = [row["device"] for row in findings.get("devices", {}).get("devices", ())]
    where = f", on {', '.join(devices[1:])}" if devices[1:] else ", on the CPU alone, which is for tests"
    return (f"ready for {shown_path(config)}" if configuration is not None else "ready") + where + rest


def _read_configuration(options: Options, report: Report) -> Config | None:
    """The configuration, where there is one. One that is not valid is among the failures, and the probes go on."""
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


def _failure(item: str, problem: str, remedy: str) -> Row:
    return {"item": item, "path": item, "reason": problem, "message": remedy}


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
    named: dict[str, tuple[str, str]] = {"train.device": (configuration.train.device, model)}
    for stage, section in sections.items():
        if section is not None:
            named[f"stages.{stage}.device"] = stages.resources(stage).device, section.precision or model
    return named | {
        f"stages.{stage}.device": (stages.resources(stage).device, "float32") for stage in ("decode", "score")
    }


def _list_probes(configuration: Config | None) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Key of the findings, and the probe with its arguments; the slowest first."""
    if is_installed("torch"):
        named = [name for name, _ in _list_devices(configuration).values()] if configuration else []
        yield "devices", ("devices", *dict.fromkeys(named))
    for library in _list_libraries(configuration):
        if library.imported and library.module != "torch" and is_installed(library.module):
            yield library.module, ("library", library.module, library.distribution)
    if is_installed("av"):
        yield "decoders", ("decoders",)
    for _, url in needed_stores(configuration) if configuration else ():
        yield strip_secrets(url), ("store", url)
    for name, location in _list_disks(configuration).items():
        yield f"disk of {name}", ("disk", location)


def _list_disks(configuration: Config | None) -> dict[str, str]:
    """Name -> folder."""
    named = {"this folder": "."}
    if configuration is not None:
        named = {"root": configuration.root, "output": configuration.output}
    return {name: location for name, location in named.items() if "://" not in location}


def _list_libraries(configuration: Config | None) -> list[Library]:
    needed = [find_library(module) for module, _ in needed_libraries(configuration)] if configuration else []
    return list(dict.fromkeys([*LIBRARIES, *needed]))


def _run_probes(tasks: Mapping[str, Sequence[str]], time_limit: float, console: Console) -> dict[str, dict[str, Any]]:
    """Run the probes; return their findings."""
    with (
        console.progress(len(tasks), "probing", unit="probes") as progress,
        ThreadPoolExecutor(min(MOST_PROBES, cores())) as pool,
    ):
        futures = {key: pool.submit(run_probe, *words, time_limit=time_limit) for key, words in tasks.items()}
        try:
            while waiting := [key for key, future in futures.items() if not future.done()]:
                check_stop()
                done = len(tasks) - len(waiting)
                progress.say(done, f"{done}/{len(tasks)} probes, waiting for {', '.join(waiting[:MOST_NAMED])}")
                wait(futures.values(), LOOK_S)
            progress.say(len(tasks), "")
        except BaseException:  # an interrupt
            pool.shutdown(wait=False, cancel_futures=True)
            kill_probes()
            raise
    return {key: future.result() for key, future in futures.items()}


def _row(what: str, finding: str, follows: str = "", remedy: str = "") -> Row:
    return {"what": what, "found": finding, "what_follows": follows, "remedy": remedy}


def _describe_machine() -> Iterator[Row]:
    yield _row("latentpress", version("latentpress"))
    yield _row("Python", f"{platform.python_version()}, {sys.executable}")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield _row("machine", f"{platform.machine()}, {cores()} cores, {format_bytes(memory)} of memory")


def _describe_devices(finding: Mapping[str, Any]) -> Iterator[Row]:
    if "problem" in finding:
        remedy = SLOW_ADVICE if finding.get("slow") else find_library("torch").command
        yield _row("torch", finding["problem"], "no encoding and no training", remedy)
        return
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


def _describe_libraries(findings: Findings) -> Iterator[Row]:
    for library in LIBRARIES:
        if library.module == "torch":
            continue
        finding = findings.get(library.module)
        if not is_installed(library.module):
            yield _row(library.distribution, "not installed", f"no {library.purpose}", library.command)
        elif finding and "problem" in finding:
            fitting = f"install the version for this torch and driver: {library.command}"
            remedy = SLOW_ADVICE if finding.get("slow") else fitting
            yield _row(library.distribution, finding["problem"], f"no {library.purpose}", remedy)
        else:
            yield _row(library.distribution, finding["version"] if finding else version(library.distribution))


def _describe_decoders(finding: Mapping[str, Any]) -> Iterator[Row]:
    if "problem" in finding:
        yield _row("FFmpeg", finding["problem"], "no videos are read or written", find_library("av").command)
        return
    for codec, present in finding.items():
        advice = "install PyAV's own wheel: pip install --force-reinstall av; or convert these videos"
        follows = () if present else ("videos of this codec are set aside", advice)
        yield _row(codec, "decoded" if present else "no decoder", *follows)


def _describe_disks(configuration: Config | None, findings: Findings) -> Iterator[Row]:
    for name, location in _list_disks(configuration).items():
        finding = findings[f"disk of {name}"]
        if "problem" in finding:
            yield _row(name, f"{location}: {finding['problem']}", UNWRITABLE, f"choose another place for {name}")
            continue
        advice: tuple[str, str] | tuple[()] = ()
        if not finding["writable"]:
            advice = UNWRITABLE, f"choose another place for {name}, or allow this user to write"
        elif finding["free"] < LEAST_SPACE:
            advice = "little room for caches and checkpoints", "free space, or choose a place on another disk"
        yield _row(name, f"{finding['folder']}: {format_bytes(finding['free'])} free", *advice)


def _describe_stores(findings: Findings) -> Iterator[Row]:
    for url, finding in findings.items():
        if "://" in url and "problem" in finding:
            yield _row(url, finding["problem"], "nothing is read or written there", STORE_ADVICE)
        elif "://" in url:
            yield _row(url, f"reached, {finding['entries']} names")


def _list_failures(configuration: Config, findings: Findings) -> Iterator[Row]:
    """Needs of the configuration that this machine lacks, with the option that needs it."""
    for module, option in dict.fromkeys(needed_libraries(configuration)):
        library = find_library(module)
        if not is_installed(module):
            yield _failure(option, f"{library.distribution} is not installed", library.command)
        elif "problem" in (finding := findings.get("devices" if module == "torch" else module, {})):
            remedy = SLOW_ADVICE if finding.get("slow") else library.command
            yield _failure(option, f"{library.distribution} can't be used: {finding['problem']}", remedy)
    for option, url in needed_stores(configuration):
        if "problem" in (finding := findings.get(strip_secrets(url), {})):
            yield _failure(option, f"{strip_secrets(url)}: {finding['problem']}", STORE_ADVICE)
    for row in _describe_disks(configuration, findings):
        if row["what_follows"] == UNWRITABLE:
            yield _failure(row["what"], f"{row['found']}, and {row['what_follows']}", row["remedy"])
    if "devices" in findings.get("devices", {}):
        yield from _list_device_failures(configuration, findings["devices"])


def _list_device_failures(configuration: Config, finding: Mapping[str, Any]) -> Iterator[Row]:
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
