"""The start and the end of a program, by a person or by another program.

On a terminal, a line while the modules are imported (seconds from a cold disk) and while the process ends; output to a
closed pipe; an error that names a missing library instead of a traceback; and faster imports of large libraries with
less memory, without messages that users can't act on.
"""

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from subprocess import Popen

OUR_PACKAGES = ("schemas", "cache", "stages", "trainer")
#: Program -> the extra that installs its libraries. Programs without extra libraries are not listed.
EXTRAS = {
    **dict.fromkeys(("new", "discover", "bucket", "preview", "notify", "push", "thumbnails"), "media"),
    **dict.fromkeys(
        (
            "features",
            "caption",
            "masks",
            "encode-text",
            "encode-latents",
            "encode-vision",
            "decode",
            "score",
            "verify",
            "rehearse",
        ),
        "encode",
    ),
    **dict.fromkeys(("train", "export-adapter"), "train"),
    "report": "report",
    "ui": "ui",
}
#: Programs of the trainer -> module.
TRAINER_PROGRAMS = {"train": "trainer", "checks": "trainer.checks", "export-adapter": "trainer.export_adapter"}
PIPE_CLOSED = 141  # exit code that a shell reports for SIGPIPE


def program_module(program: str) -> str:
    return TRAINER_PROGRAMS.get(program) or f"stages.{program.replace('-', '_')}"


def start_program(program: str, words: Sequence[str], **options: Any) -> "Popen[str]":
    """Start a program as a process, without the working directory on its import path. words: its arguments. options:
    keyword arguments of subprocess.Popen."""
    import subprocess

    return subprocess.Popen([sys.executable, "-P", "-m", program_module(program), *words], **options)


def _is_shown() -> bool:
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def begin_silently() -> None:
    """End by the signal at Ctrl-C until the program handles it itself: Python's own handler raises in the middle of an
    import and prints a traceback. Called after `remove_working_directory`."""
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def show_starting(program: str) -> None:
    if _is_shown():
        print(f"starting {program} ...", end="", file=sys.stderr, flush=True)


def show_ending(program: str) -> None:
    """Show that a program whose output is complete is ending."""
    if _is_shown():
        print(f"ending {program} ...", end="", file=sys.stderr, flush=True)


def hide_line() -> None:
    """Clear the line, after a program's modules are imported or its process has ended."""
    if _is_shown():
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def print_for_reader(text: str, stream: TextIO) -> None:
    """Print a text. If the reader of a pipe has exited, as `head` does, end the process with the code of SIGPIPE."""
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # discards the rest of the buffer
        sys.exit(PIPE_CLOSED)


def explain_missing_libraries() -> None:
    """Replace tracebacks of missing libraries by messages. Programs call it before they import libraries."""
    sys.excepthook = _explain


def _explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Replacement of `sys.excepthook`, which ends the process. Its imports can't be at the top of the module, since the
    working directory may still provide modules of the same names at that time (`remove_working_directory`)."""
    from importlib.util import find_spec

    library = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if library in ("", *OUR_PACKAGES) or find_spec(library):
        return sys.__excepthook__(kind, error, trace)
    import json

    from schemas.errors import LatentpressError

    program = _program()
    step = f"Install the libraries of this program: {install_command(EXTRAS.get(program, ''))}"
    report = LatentpressError(f"{program} needs the library {library!r}, which is not installed", step)
    hide_line()
    print(f"error: {report}", file=sys.stderr)
    if "--json" in sys.argv:
        document = {"program": program, "error": report.to_dict(), "exit_code": report.exit_code}
        print(json.dumps(document, indent=2))
    sys.exit(report.exit_code)


def install_command(extra: str = "") -> str:
    """The command that installs latentpress with an extra, from a clone or from the package index like this one."""
    from pathlib import Path

    clone = (Path(__file__).parents[2] / "pyproject.toml").exists()
    if not extra:
        return "pip install -e ." if clone else "pip install latentpress"
    return f"pip install -e '.[{extra}]'" if clone else f"pip install 'latentpress[{extra}]'"


def _program() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # None for the command `latentpress`
    if spec is None or spec.name == "latentpress.__main__":
        return sys.argv[1]
    name = spec.name.removesuffix(".__main__").rpartition(".")[2].rstrip("_").replace("_", "-")
    return "train" if name == "trainer" else name


MANY_OBJECTS = 100_000  # torch alone creates more; if it was imported before, fewer are created


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Pause garbage collection for imports of torch, transformers and diffusers. They create millions of permanent
    objects, which the collector would examine repeatedly: a sixth of the import's time. With the pause, it runs at most
    once, at the end."""
    gc.disable()
    try:
        yield
    finally:
        if gc.get_count()[0] > MANY_OBJECTS:
            gc.collect()
        gc.enable()


class _NoPandas:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("left out by schemas.cli.starting", name=name)


def leave_out_pandas() -> None:
    """Keep pyarrow from importing pandas in this process. If pandas is installed, pyarrow imports it at the first
    conversion without using it, which costs 50 MiB and a quarter of a second. pyarrow looks for pandas only once. For
    programs that do not use pandas; they can still import it."""
    sys.meta_path.insert(0, _NoPandas)
    try:
        import pyarrow as pa

        pa.scalar(0)
    finally:
        sys.meta_path.remove(_NoPandas)


#: Logger -> start of the hidden messages. bitsandbytes' message is harmless: on CPUs with AVX512-BF16 it computes with
#: its own library instead. torchao's messages are about compiled kernels and tensor classes that are not used here.
NOISE = {
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward from kernels-community",
    "torchao": "Failed to load ",
    "torch.utils._pytree": "<enum ",
    "diffusers.quantizers.torchao.torchao_quantizer": "Unable to import `torchao` Tensor objects",
}
#: torch warns that float32 norms of bfloat16 weights have no fused kernel; bitsandbytes warns that nothing is paged on
#: a CPU, which docs/training.md explains.
IGNORED_WARNINGS = ("Mismatch dtype between input and weight", "Paged optimizers are not supported on CPU")


@lru_cache(None)
def silence_libraries() -> None:
    """Hide log records and warnings of libraries that need no action. Only the first call has an effect."""
    import logging
    import warnings

    for name, start in NOISE.items():
        logging.getLogger(name).addFilter(
            lambda record, start=start: not record.getMessage().startswith(start)  # type: ignore[misc]
        )
    for start in IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", start, UserWarning)
