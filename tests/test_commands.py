"""The commands of README and docs/ run, in their order, in a folder of each document (tests/rehearsal.py).

A command that is new in a document runs here, or stands in NOT_RUN with the reason.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stages.cli import program_module
from tests.documents import DOCUMENTS, ROOT, shell_commands
from tests.rehearsal import Rehearsal, media
from tests.s3_server import BUCKET
from tests.terminal import run_in_terminal

LIMIT_S = 900
MAKE = "a target of the Makefile; the demo, the site and the wheel have tests of their own"
DOCKER = "needs Docker"
PIP = "installs; tests/test_wheel.py installs each way in environments of its own"
ELSEWHERE = "needs another machine"
CARD = "needs a card"
HOSTS = "tests/torture/test_two_hosts.py runs it on two hosts"
RAY = "tests/torture/test_ray.py runs it on a cluster"
SET = "set for all commands of the document"
#: document -> beginning of a command -> why it is not run.
NOT_RUN: dict[str, dict[str, str]] = {
    "README.md": {"make": MAKE},
    "CONTRIBUTING.md": {"make": MAKE, ".venv/bin/pre-commit install": "changes this repository"},
    "docs/machines.md": {
        "export RAY_worker_niceness": SET,
        "ray start": RAY,
        "latentpress encode-latents --engine ray": RAY,
        "latentpress encode-latents --address": RAY,
        "accelerate launch --multi_gpu --num_machines 1": CARD,
        "torchrun --nnodes 2": HOSTS,
        "accelerate launch --multi_gpu --num_machines 2": HOSTS,
        "python examples/ray_train.py": HOSTS,
    },
    "docs/configuration.md": {
        "latentpress export-adapter --format lycoris": "of a LoKr; tests/trainer/adapters/ converts them",
    },
    "docs/install.md": {
        "make": MAKE,
        "pip": PIP,
        ". .venv/bin/activate": PIP,
        "mkdir": DOCKER,
        "printf": DOCKER,
        "docker": DOCKER,
        "python3 -m venv": PIP,
        "~/venv/bin": PIP,
        "ssh": ELSEWHERE,
        "rsync": ELSEWHERE,
    },
    "docs/watching.md": {
        "export LATENTPRESS_WEBHOOK": SET,
        "latentpress decode --watch --device cuda:7": CARD,
        "pip": PIP,
    },
    "docs/guides/using-the-result.md": {"hf auth login": "asks for a token; the stand-in's is in the environment"},
}
#: What a document's words stand for here.
PLACES: dict[str, str] = {
    "/mnt/disk/": "disk/",
    "/mnt/clips": "media/clips",
    "/volume/photos/": "",
    "/models/qwen-image": "models/qwen-image",
    "s3://bucket/": f"s3://{BUCKET}/",
    "--nproc-per-node 4": "--nproc-per-node 2",
    "--shard 0/3": "--shard 0/1",
    "step-000750": "step-000004",
    "output/style/": "output/clips-lora/",
    " style style-rank8": " clips-lora clips-lora",
    "--projects runs": "--projects .",
    "--size 768x512@61": "--size 64x64@5",
}
SET_ID, OTHER = "0123456789abcdef", "other.safetensors"
#: Programs that write what others go on from; they, and those that write nothing, need no finished run.
BEGIN = ("discover", "bucket", "run")
ALONE = ("new", "rehearse", "import-config", "doctor", "ui", "queue")
STEPS_OF = {document: [*shell_commands(document)] for document in DOCUMENTS}


SHELL = subprocess.Popen  # as it is before a test lets programs be forks


def arguments(command: str) -> list[str]:
    """Of a new process: programs are forks; all else is left to a shell."""
    words = shlex.split(command)
    if words[0] == "latentpress":
        return [sys.executable, "-m", program_module(words[1]), *words[2:]]
    return ["bash", "-c", command]


def name(document: Path) -> str:
    return str(document.relative_to(ROOT))


def reason(document: Path, command: str) -> str | None:
    return next((why for start, why in NOT_RUN.get(name(document), {}).items() if command.startswith(start)), None)


@pytest.fixture(scope="session")
def finished() -> dict[str, Path]:
    """Configuration -> a folder in which it was run."""
    return {}


@pytest.fixture
def environment(tmp_path: Path, s3: Any, models: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """With stand-ins for the store, the Hub and a webhook; `latentpress` and `python` are those of these tests."""
    from tests.webhook_server import serve_webhook

    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with serve_webhook() as hook:
        own = {"PATH": path, "LATENTPRESS_WEBHOOK": hook.url, "MY_BOT": hook.url, "COLUMNS": "120"}
        yield {**os.environ, **own, "OMP_NUM_THREADS": "1"}


class Typist:
    """Types the commands of a document."""

    def __init__(
        self, rehearsal: Rehearsal, environment: dict[str, str], finished: dict[str, Path], kept: Path
    ) -> None:
        self.rehearsal, self.environment, self.finished, self.kept = rehearsal, environment, finished, kept
        self.folder, self.begun, self.runs = rehearsal.folder, set[str](), 0

    def type(self, command: str) -> tuple[int, str]:
        """Its exit code, and what it said."""
        for words, place in PLACES.items():
            command = command.replace(words, place)
        program = found[1] if (found := re.search(r"latentpress ([a-z-]+)", command)) else ""
        files = re.findall(r"([\w./-]+\.yaml)\b", command) or ["pipeline.yaml"]
        file = files[0]
        if program == "import-config":
            self.rehearsal.write_foreign(command)
        elif program not in ("new", "doctor"):
            for named in files:
                self.rehearsal.write(named)
        writes_nothing = program in ALONE or ("--dry-run" in command and (program in BEGIN or "--card" in command))
        if not writes_nothing and file not in self.begun:
            if program not in BEGIN:
                self._finish(file)
            self.begun.add(file)
        if OTHER in command:
            shutil.copy(self.folder / "output/clips-lora/adapter/pytorch_lora_weights.safetensors", self.folder / OTHER)
        if SET_ID in command:
            command = command.replace(SET_ID, next(path.name for path in (self.folder / "work/sets").glob("?" * 16)))
        if program == "ui":
            return self._serve(command)
        if program == "new" and "--yes" not in command:
            return run_in_terminal(arguments(command), 120, self.folder, self.environment, [""] * 12, LIMIT_S)
        if program == "train" and command.startswith("torchrun"):  # not the run that one process has trained
            self.runs += 1
            command += f" --set train.run=ranks-{self.runs}"
        return self._run(command)

    def _start(self, command: str) -> subprocess.Popen[str]:
        words = arguments(command)
        started = subprocess.Popen if words[0] == sys.executable else SHELL
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        return started(words, cwd=self.folder, env=self.environment, text=True, **pipes)

    def _run(self, command: str) -> tuple[int, str]:
        with self._start(command) as process:
            said, _ = process.communicate(timeout=LIMIT_S)
        return process.returncode, said

    def _finish(self, file: str) -> None:
        """As `latentpress run` leaves it."""
        if file not in self.finished:
            code, said = self._run(f"latentpress run --config {file}")
            assert code == 0, said
            self.finished[file] = Path(shutil.copytree(self.folder, self.kept / file, symlinks=True))
        else:
            for part in ("work", "output"):
                shutil.copytree(self.finished[file] / part, self.folder / part, dirs_exist_ok=True, symlinks=True)

    def _serve(self, command: str) -> tuple[int, str]:
        """Until it says its address, and Ctrl-C."""
        with self._start(f"{command} --port 0") as process:
            assert process.stdout is not None
            said = ""
            while "http://127.0.0.1:" not in said and (line := process.stdout.readline()):
                said += line
            process.send_signal(signal.SIGINT)
            said += process.communicate(timeout=LIMIT_S)[0]
        return (process.returncode if process.returncode != 130 else 0) if "http://127.0.0.1:" in said else -1, said


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("document", [it for it in DOCUMENTS if STEPS_OF[it]], ids=name)
def test_the_commands_of_a_document_run(
    document: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    tiny: Callable[[str], Path],
    environment: dict[str, str],
    finished: dict[str, Path],
    forked_programs: None,
) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    photographs = media(tmp_path_factory.getbasetemp() / "demo-media")
    typist = Typist(
        Rehearsal(folder, document, tiny, photographs), environment, finished, tmp_path_factory.mktemp("kept")
    )
    failed = []
    for command in STEPS_OF[document]:
        if reason(document, command) is None:
            began = time.monotonic()
            code, said = typist.type(command)
            print(f"{time.monotonic() - began:6.1f} s  {code}  {command}")
            failed += [f"{command}: {code}\n{said[-3000:]}"] if code else []
    assert failed == [], "\n".join(failed)


def test_what_is_not_run_stands_in_the_documents() -> None:
    for document, commands in NOT_RUN.items():
        for start in commands:
            assert any(command.startswith(start) for command in STEPS_OF[ROOT / document]), (document, start)
