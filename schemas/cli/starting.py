"""The start and the end of a program, by a person or by another program.

On a terminal, what is shown while its modules are imported, which from a cold disk takes seconds, and while its process
ends; what it prints for a pipe; a library that is not installed, named in place of a traceback; and how large libraries
are imported in less time and memory, without messages that no user can act on.
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
#: The extra that a program is installed with, of those that need one.
EXTRAS = {
    **dict.fromkeys(("configure", "discover", "bucket", "preview", "notify", "push", "thumbnails"), "media"),
    **dict.fromkeys(
        ("features", "caption", "masks", "encode-text", "encode-latents", "encode-vision", "decode", "score", "verify"),
        "encode",
    ),
    **dict.fromkeys(("train", "export-adapter"), "train"),
    "report": "report",
    "ui": "ui",
}
#: Programs of the trainer -> module.
TRAINER_PROGRAMS = {"train": "trainer", "checks": "trainer.checks", "export-adapter": "trainer.export_adapter"}
PIPE_CLOSED = 141  # the exit code that a shell gives SIGPIPE


def program_module(program: str) -> str:
    return TRAINER_PROGRAMS.get(program) or f"stages.{program.replace('-', '_')}"


def start_program(program: str, words: Sequence[str], **options: Any) -> "Popen[str]":
    """Start a program as a process, without the working directory on its import path. words: its arguments. options: of
    subprocess.Popen."""
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
    """Called when a program's modules are there, or its process is gone."""
    if _is_shown():
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def print_for_reader(text: str, stream: TextIO) -> None:
    """End the process as SIGPIPE does where the reader of a pipe is gone, as `head` is when it has its lines."""
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # for what is left in its buffer
        sys.exit(PIPE_CLOSED)


def explain_missing_libraries() -> None:
    """Programs call it before their imports of libraries."""
    sys.excepthook = _explain


def _explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Instead of `sys.excepthook`: end the process. What is imported here may not be imported at the top, where the
    working directory may still have a module of that name (`remove_working_directory`)."""
    from importlib.util import find_spec

    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if missing in ("", *OUR_PACKAGES) or find_spec(missing):
        return sys.__excepthook__(kind, error, trace)
    import json

    from schemas.errors import LatentpressError

    program = _program()
    step = f"Install what this program needs: {install_command(EXTRAS.get(program, ''))}"
    shown = LatentpressError(f"{program} needs the library {missing!r}, which is not installed", step)
    hide_line()
    print(f"error: {shown}", file=sys.stderr)
    if "--json" in sys.argv:
        document = {"program": program, "error": shown.to_dict(), "exit_code": shown.exit_code}
        print(json.dumps(document, indent=2))
    sys.exit(shown.exit_code)


def install_command(extra: str = "") -> str:
    """The command that installs latentpress with an extra, as it is installed here: from a clone, or as a package."""
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


MANY_OBJECTS = 100_000  # torch alone creates more, a program that has imported it before fewer


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """For imports of torch, transformers and diffusers. They create millions of objects that stay, and the collector
    would examine them again and again: a sixth of the import's time. Here it does so once at most, at the end."""
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
    """Let pyarrow find no pandas in this process. Where pandas is installed, pyarrow imports it at its first conversion
    and then has no use for it: 50 MiB and a quarter of a second. It looks for pandas once. For programs that have no
    use for pandas either; they can still import it."""
    sys.meta_path.insert(0, _NoPandas)
    try:
        import pyarrow as pa

        pa.scalar(0)
    finally:
        sys.meta_path.remove(_NoPandas)


#: Logger -> beginning of a message, empty for all. On CPUs with AVX512-BF16 bitsandbytes then computes with its own
#: library; torchao's are of compiled kernels and tensor classes that nothing here uses.
NOISE = {
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward from kernels-community",
    "torchao": "Failed to load ",
    "torch.utils._pytree": "<enum ",
    "diffusers.quantizers.torchao.torchao_quantizer": "Unable to import `torchao` Tensor objects",
}
#: torch says that float32 norms of bfloat16 weights have no fused kernel; bitsandbytes that nothing is paged on a CPU,
#: as docs/training.md does.
IGNORED_WARNINGS = ("Mismatch dtype between input and weight", "Paged optimizers are not supported on CPU")


@lru_cache(None)
def silence_libraries() -> None:
    """Hide log records and warnings of libraries that ask for nothing. Only the first call has an effect."""
    import logging
    import warnings

    for name, start in NOISE.items():
        logging.getLogger(name).addFilter(
            lambda record, start=start: not record.getMessage().startswith(start)  # type: ignore[misc]
        )
    for start in IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", start, UserWarning)
