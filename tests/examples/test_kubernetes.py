"""examples/kubernetes: valid Kubernetes documents with commands of this project, the image, and submit.sh."""

import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from ruamel.yaml import YAML

EXAMPLES = Path(__file__).parents[2] / "examples" / "kubernetes"
FILES = {path.name: path for path in EXAMPLES.glob("*.yaml") if path.name != "kustomization.yaml"}
DOCUMENTS = [(name, document) for name, path in sorted(FILES.items()) for document in YAML(typ="safe").load_all(path)]
JOBS = [document for _, document in DOCUMENTS if document["kind"] == "Job"]
STEPS = ("plan", "encode", "train", "decode")  # the steps of submit.sh without arguments; "vision" is optional


@pytest.mark.parametrize("version", ["1.31", "1.34"])
def test_the_documents_are_valid(version: str) -> None:
    assert len(DOCUMENTS) == 7
    for _, document in DOCUMENTS:
        kubernetes_validate.validate(document, version, strict=True)


def containers(job: dict[str, Any]) -> list[dict[str, Any]]:
    pod = job["spec"]["template"]["spec"]
    return [*pod.get("initContainers", []), *pod["containers"]]


def test_the_pods_of_an_indexed_job_share_the_work() -> None:
    indexed = [job["spec"] for job in JOBS if job["spec"].get("completionMode") == "Indexed"]
    assert len(indexed) == 3
    for spec in indexed:
        assert "--shard" not in spec["template"]["spec"]["containers"][0]["args"]
        assert spec["completions"] == spec["parallelism"] > 1


def test_the_jobs_run_every_stage() -> None:
    """Each program that makes results of a run is in one Job."""
    ran = [
        word
        for job in JOBS
        for container in containers(job)
        for word in (*container.get("command", ()), *container["args"])
    ]
    stages = [
        "discover",
        "bucket",
        "encode-text",
        "encode-latents",
        "encode-vision",
        "index",
        "train",
        "decode",
        "report",
    ]
    assert [ran.count(stage) for stage in stages] == [1] * len(stages)


KUBECTL = """#!/bin/sh
echo "$*" >> calls
[ "$1" != get ] || cat states
"""
SLEEP = """#!/bin/sh
echo sleep >> calls
[ "$(grep -c sleep calls)" -lt 3 ] || [ ! -e later ] || mv -f later states
"""


def submit(folder: Path, *steps: str, states: str, later: str = "") -> tuple[int, str, list[str]]:
    """Run submit.sh. Returns (exit code, error, calls). kubectl is replaced by a script that records its arguments.
    states: states of the Jobs; later: their states from the third query on, by default `states`."""
    shutil.copytree(EXAMPLES, folder, dirs_exist_ok=True)
    for name, program in (("kubectl", KUBECTL), ("sleep", SLEEP)):
        (folder / name).write_text(program)
        (folder / name).chmod(0o755)
    (folder / "states").write_text(states)
    (folder / "calls").unlink(missing_ok=True)
    (folder / "later").write_text(later or states)
    command = ["env", f"PATH={folder}:/usr/bin:/bin", "bash", str(folder / "submit.sh"), *steps]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    calls = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    return process.returncode, process.stderr, calls


def test_the_script_applies_each_step_after_the_jobs_of_the_one_before(tmp_path: Path) -> None:
    code, _, calls = submit(tmp_path, states="latentpress-plan SuccessCriteriaMet Complete\n")
    assert code == 0
    changes = [call for call in calls if call.startswith(("apply", "delete"))]
    expected = ["apply --kustomize . --selector !latentpress/step"]
    for step in STEPS:
        selector = f"--selector latentpress/step={step}"
        expected += [f"delete jobs {selector} --cascade=foreground", f"apply --kustomize . {selector}"]
    assert changes == expected
    for first, second in pairwise(STEPS):
        query_index = next(n for n, call in enumerate(calls) if call.startswith("get") and f"step={first} " in call)
        assert query_index < calls.index(f"apply --kustomize . --selector latentpress/step={second}")
