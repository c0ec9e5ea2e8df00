"""examples/kubernetes: documents that Kubernetes accepts, whose commands are ours."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from ruamel.yaml import YAML

from schemas.cli.options import parse_partition
from stages.cli import PROGRAMS

EXAMPLES = Path(__file__).parents[2] / "examples" / "kubernetes"
FILES = {path.name: path for path in EXAMPLES.glob("*.yaml") if path.name != "kustomization.yaml"}
DOCUMENTS = [(name, document) for name, path in sorted(FILES.items()) for document in YAML(typ="safe").load_all(path)]
JOBS = [document for _, document in DOCUMENTS if document["kind"] == "Job"]


@pytest.mark.parametrize("version", ["1.31", "1.34"])
def test_the_documents_are_valid(version: str) -> None:
    assert len(DOCUMENTS) == 5
    for _, document in DOCUMENTS:
        kubernetes_validate.validate(document, version, strict=True)


def containers(job: dict[str, Any]) -> list[dict[str, Any]]:
    pod = job["spec"]["template"]["spec"]
    return [*pod.get("initContainers", []), *pod["containers"]]


def test_every_pod_of_an_indexed_job_does_its_part(monkeypatch) -> None:
    indexed = [job["spec"] for job in JOBS if job["spec"].get("completionMode") == "Indexed"]
    assert len(indexed) == 2
    for spec in indexed:
        arguments = spec["template"]["spec"]["containers"][0]["args"]
        parts = []
        for index in range(spec["completions"]):
            monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
            parts.append(parse_partition(arguments[arguments.index("--shard") + 1])[:2])
        assert parts == [(index, spec["completions"]) for index in range(spec["completions"])]


def test_every_container_runs_a_program() -> None:
    for container in (container for job in JOBS for container in containers(job)):
        words = [*container.get("command", []), *container["args"]]
        assert {*words} & PROGRAMS.keys() and "--config" in words, words
