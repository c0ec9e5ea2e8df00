"""The start and the end of a program, by a person or by another program.

On a terminal, what is shown while its modules are imported, which from a cold disk takes seconds, and while its process
ends; what it prints for a pipe; and the libraries that are not installed, named in place of a traceback.
"""

import os
import sys
from collections.abc import Sequence
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
    missing, extra = find_missing(error) if isinstance(error, ModuleNotFoundError) else ([], "")
    if not missing:
        return sys.__excepthook__(kind, error, trace)
    import json

    from schemas.cli.starting import hide_line
    from schemas.errors import LatentpressError

    step = f"Install {'what this program needs' if extra else 'latentpress with its dependencies'}: "
    step, who = step + install_command(extra), _program() if extra else "latentpress"
    shown = LatentpressError(f"{who} needs libraries that are not installed: {', '.join(missing)}", step)
    hide_line()
    print(f"error: {shown}", file=sys.stderr)
    if "--json" in sys.argv:
        document = {"program": _program(), "error": shown.to_dict(), "exit_code": shown.exit_code}
        print(json.dumps(document, indent=2))
    sys.exit(shown.exit_code)


def install_command(extra: str = "") -> str:
    """The command that installs latentpress with an extra, as it is installed here: from a clone, or as a package."""
    from pathlib import Path

    clone = (Path(__file__).parents[2] / "pyproject.toml").exists()
    if not extra:
        return "pip install -e ." if clone else "pip install latentpress"
    return f"pip install -e '.[{extra}]'" if clone else f"pip install 'latentpress[{extra}]'"


def find_missing(error: ModuleNotFoundError) -> tuple[list[str], str]:
    """The distributions that are not installed, by the metadata of latentpress, and the extra that brings them: those
    of latentpress itself (""), or else of the program's extra. Else the package that was not found, which one of those
    needs; nothing for a module of our own, or of a package that is there."""
    import re
    from importlib.metadata import PackageNotFoundError, requires, version
    from importlib.util import find_spec

    def is_missing(name: str) -> bool:
        try:
            return not version(name)
        except PackageNotFoundError:
            return True

    try:
        needed = requires("latentpress") or []
    except PackageNotFoundError:  # sources on PYTHONPATH
        needed = []
    extra = EXTRAS.get(_program(), "")
    for kind, lines in (
        ("", [line for line in needed if "extra ==" not in line]),
        (extra, [line for line in needed if f'extra == "{extra}"' in line]),
    ):
        names = [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines]
        if missing := [name for name in names if is_missing(name)]:
            return missing, kind
    module = (error.name or "").partition(".")[0]
    return [] if module in ("", *OUR_PACKAGES) or find_spec(module) else [module], ""


def _program() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # None for the command `latentpress`
    if spec is None or spec.name == "latentpress.__main__":
        return sys.argv[1]
    name = spec.name.removesuffix(".__main__").rpartition(".")[2].rstrip("_").replace("_", "-")
    return "train" if name == "trainer" else name
