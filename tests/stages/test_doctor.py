"""The program doctor: things that a machine has and lacks, and the needs of a configuration."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from schemas import libraries
from schemas.errors import INCOMPLETE, OK
from schemas.libraries import Library
from stages import doctor
from stages.maintenance import probes
from tests.project import Project
from tests.stages.encoded_photos import IMAGE

DEVICES = {
    "version": "2.13.0",
    "build": "CUDA 13.0",
    "devices": [
        {"device": "cpu", "type": "cpu", "name": "AVX2", "dtypes": ["float32"], "attention": []},
        {
            "device": "cuda:0",
            "type": "cuda",
            "name": "an old card",
            "dtypes": ["float32", "float16"],
            "attention": ["sdpa"],
            "memory": 8 << 30,
            "free": 1 << 30,
        },
    ],
    "missing": {},
    "chosen": {"auto": "cuda", "cpu": "cpu"},
    "allocator": None,
}


def program(*arguments: str) -> tuple[int, dict[str, Any]]:
    ended = CliRunner().invoke(doctor.app, ["--json", *arguments])
    return ended.exit_code, json.loads(ended.stdout)


def rows(report: dict[str, Any], section: str) -> dict[str, dict[str, str]]:
    return {row["what"]: row for row in report["details"][section]}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Replaces the findings of the probes, which are not run."""
    findings: dict[str, dict[str, Any]] = {"devices": DEVICES, "decoders": {"H.264": True, "AV1": False}}

    def find(probe: str, *arguments: str, time_limit: float) -> dict[str, Any]:
        if probe == "disk":
            return findings.get("disk") or probes.probe_disk(*arguments)
        return findings.get(arguments[0] if probe == "library" else probe, {"found": "1.0"})

    monkeypatch.setattr(doctor, "run_probe", find)
    return findings


@pytest.mark.slow
def test_without_a_configuration_it_names_what_is_here(tmp_path: Path, forked_programs, monkeypatch) -> None:
    """With real probes, which also find the user's setting of the allocator."""
    findings: dict[str, dict[str, Any]] = {}

    def find(probe: str, *arguments: str, time_limit: float) -> dict[str, Any]:
        findings[probe] = probes.run_probe(probe, *arguments, time_limit=time_limit)
        return findings[probe]

    monkeypatch.setattr(doctor, "run_probe", find)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(libraries, "LIBRARIES", libraries.LIBRARIES[:1])
    monkeypatch.setattr(doctor, "LIBRARIES", libraries.LIBRARIES[:1])
    code, report = program()
    assert code == OK and not report["failed"] and "--config" in report["details"]["configuration"]
    assert sys.executable in rows(report, "machine")["Python"]["found"]
    devices = rows(report, "devices")
    assert devices["torch"]["found"].startswith(__import__("torch").__version__)
    assert "float32, bfloat16" in devices["cpu: dtypes"]["found"]
    assert "sdpa" in devices["cpu: attention"]["found"]
    assert rows(report, "decoders")["H.264"]["found"] == "decoded"
    assert str(tmp_path) in rows(report, "disks")["this folder"]["found"]
    assert findings["devices"]["allocator"] == ["PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64"]
    assert list(tmp_path.iterdir()) == []


def test_every_line_that_something_follows_from_has_a_remedy(quick, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "is_installed", lambda module: module in ("torch", "av", "bitsandbytes"))
    quick["bitsandbytes"] = {"problem": "OSError: libcudart.so.13 is not found"}
    code, report = program()
    lines = [row for section in report["details"].values() if isinstance(section, list) for row in section]
    assert code == OK and all(bool(row["what_follows"]) == bool(row["remedy"]) for row in lines)
    assert rows(report, "devices")["cuda:0"]["found"] == "an old card, 8.0 GiB, 1.0 GiB free"
    assert "bfloat16, float8" in rows(report, "devices")["cuda:0: dtypes"]["what_follows"]
    assert "libcudart" in rows(report, "libraries")["bitsandbytes"]["found"]
    assert rows(report, "libraries")["peft"]["remedy"] == "pip install -e '.[train]'"
    assert "rejected" in rows(report, "decoders")["AV1"]["what_follows"]


@pytest.mark.parametrize(
    ("user_setting", "found", "follows"),
    [
        (None, "expandable_segments:True, set by latentpress", False),
        (
            ["PYTORCH_ALLOC_CONF", "expandable_segments:true"],
            "expandable_segments:true, set by PYTORCH_ALLOC_CONF",
            False,
        ),
        (["PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64"], "max_split_size_mb:64, set by PYTORCH_CUDA", True),
    ],
)
def test_it_says_whether_segments_of_memory_are_expandable(quick, tmp_path, monkeypatch, user_setting, found, follows):
    monkeypatch.chdir(tmp_path)
    quick["devices"] = {**DEVICES, "allocator": user_setting}
    allocators = [row for row in rows(program()[1], "devices").values() if row["what"].endswith(": allocator")]
    assert [row["what"] for row in allocators] == ["cuda:0: allocator"]
    assert allocators[0]["found"].startswith(found) and ("fragment" in allocators[0]["what_follows"]) is follows


@pytest.mark.parametrize(
    ("override", "item", "words"),
    [
        ("model.precision=bfloat16", "train.device", "cuda:0 does not support bfloat16"),
        ("train.base_precision=fp8-torchao", "train.device", "cuda:0 does not support float8"),
        ("train.attention=flash", "train.attention flash", "flash-attn: not installed"),
        ("train.optimizer.name=lion_pytorch.Lion", "train.optimizer.name lion_pytorch.Lion", "lion_pytorch: not"),
        ("text.quantization=nf4-bnb", "text.quantization nf4-bnb", "bitsandbytes: no driver"),
    ],
)
def test_what_the_configuration_needs_and_this_machine_lacks(
    quick, project: Callable[..., Project], override: str, item: str, words: str
) -> None:
    home = project(IMAGE)
    home.config()
    base = ["--config", str(home.folder / "pipeline.yaml"), "--set", "model.precision=float32"]
    quick["bitsandbytes"] = {"problem": "no driver"}
    code, report = program(*base)
    assert code == OK and not report["failed"], report["failed"]
    code, report = program(*base, "--set", override)
    assert code == INCOMPLETE
    failure = next(row for row in report["failed"] if row["item"] == item)
    assert words in failure["reason"] and failure["message"]


@pytest.mark.slow
@pytest.mark.long
def test_a_device_and_a_store_that_are_not_there(project: Callable[..., Project], monkeypatch) -> None:
    """With real probes; the message does not contain secrets."""
    monkeypatch.setattr(doctor, "is_installed", lambda module: module == "torch" or libraries.is_installed(module))
    monkeypatch.setattr(libraries, "LIBRARIES", libraries.LIBRARIES[:1])
    home = project(IMAGE)
    url = "http://127.0.0.1:9/media"
    home.config()
    changes = ["--set", "train.device=mps", "--set", f"datasets.photos.instance_data_dir={url}"]
    code, report = program("--config", str(home.folder / "pipeline.yaml"), *changes)
    assert code == INCOMPLETE
    failures = {row["item"]: row["reason"] for row in report["failed"]}
    assert "device mps is not available" in failures["train.device"]
    assert any(url in reason for reason in failures.values()) and url in rows(report, "stores")


def test_a_configuration_that_is_not_valid_is_one_of_the_failures(quick, tmp_path) -> None:
    (tmp_path / "a.yaml").write_text("model: {family: nobody}\n")
    code, report = program("--config", str(tmp_path / "a.yaml"))
    assert code == INCOMPLETE and "nobody" in report["failed"][0]["reason"] and report["details"]["libraries"]


#: It hangs, and its child process keeps the output open.
LEAVES_A_CHILD = "import subprocess, time\nsubprocess.Popen(['sleep', '600'])\ntime.sleep(600)\n"
CRASHES = "import os\nprint('noise', flush=True)\nos._exit(9)\n"
RAISES = "raise OSError('s3://user:password@host/x: the driver is too old')\n"


@pytest.mark.parametrize(
    ("source", "limit", "problem"),
    [
        (LEAVES_A_CHILD, 3.0, "no answer in 3 s"),
        (CRASHES, 60.0, "noise"),
        (RAISES, 60.0, "OSError: s3://host/x: the driver is too old"),
        ("__version__ = '1'\nprint('noise')\n", 60.0, None),
    ],
)
def test_a_library_that_hangs_crashes_or_prints(tmp_path, monkeypatch, source, limit, problem) -> None:
    (tmp_path / "strange_library.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(doctor.__file__).parent.parent}")
    start = time.monotonic()
    finding = probes.run_probe("library", "strange_library", "strange-library", time_limit=limit)
    assert finding.get("problem") == problem and time.monotonic() - start < 300


def test_every_library_is_one_that_pip_can_install() -> None:
    """Each library is in an extra, or is installed by its own name."""
    import tomllib

    extras = tomllib.loads((Path(doctor.__file__).parent.parent / "pyproject.toml").read_text())["project"]
    for library in libraries.LIBRARIES:
        assert isinstance(library, Library) and library.purpose
        if library.extra:
            listed = " ".join(extras["optional-dependencies"][library.extra]).lower()
            assert library.distribution.lower() in listed, library


def test_it_begins_with_one_sentence(quick, project: Callable[..., Project], tmp_path: Path, monkeypatch) -> None:
    def first_line(*arguments: str) -> str:
        return CliRunner().invoke(doctor.app, arguments).stdout.splitlines()[0]

    home = project(IMAGE)
    home.config()
    path = str(home.folder / "pipeline.yaml")
    arguments = ["--config", path, "--set", "model.precision=float32"]
    quick["bitsandbytes"] = {"problem": "no answer in 120 s", "slow": True}
    monkeypatch.chdir(home.folder)
    assert first_line(*arguments).startswith("doctor: ready for pipeline.yaml, on cuda:0")
    arguments[-1] = "model.precision=bfloat16"
    assert first_line(*arguments).startswith("doctor: not ready for pipeline.yaml: train.device: cuda:0 does not")
    monkeypatch.chdir(tmp_path)
    answer = program("--time-limit", "9")[1]["answer"]
    assert answer.startswith("ready, on cuda:0, but") and answer.endswith("bitsandbytes")
    quick["devices"] = DEVICES | {"devices": DEVICES["devices"][:1]}
    assert "ready, on the CPU only" in first_line()
    quick["devices"] = {"problem": "OSError: no libcudart"}
    assert first_line() == "doctor: not ready to encode and train: torch: OSError: no libcudart"
