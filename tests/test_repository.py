"""Files that GitHub reads: valid by its schemas, and what they call exists."""

import re
import subprocess
from pathlib import Path
from typing import Any

import check_jsonschema
import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parent.parent
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
ACTIONS = sorted((GITHUB / "actions").glob("*/action.yml"))
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")


def read(path: Path) -> Any:
    return YAML(typ="safe").load(path)


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    return read(path)["jobs"]


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("github-workflows", WORKFLOWS),
        ("github-actions", ACTIONS),
        ("github-issue-forms", FORMS),
        ("github-issue-config", [GITHUB / "ISSUE_TEMPLATE" / "config.yml"]),
        ("dependabot", [GITHUB / "dependabot.yml"]),
        ("citation-file-format", [ROOT / "CITATION.cff"]),
    ],
)
def test_the_files_are_valid(schema: str, files: list[Path]) -> None:
    arguments = ["--builtin-schema", f"vendor.{schema}", *map(str, files)]
    done = CliRunner().invoke(check_jsonschema.main, arguments)
    assert files and done.exit_code == 0, done.output


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_only_read_unless_a_job_says_more_and_ends_in_time(path: Path) -> None:
    assert read(path)["permissions"] == {"contents": "read"} and "concurrency" in read(path)
    assert all("timeout-minutes" in job for job in jobs(path).values())
    assert not {"pull_request_target", "workflow_run"} & set(read(path)["on"])
    for job in jobs(path).values():
        for step in job["steps"]:
            uses = step.get("uses", "")
            assert not uses.startswith("actions/checkout@") or step["with"]["persist-credentials"] is False
            # What a branch, tag or title is called must not become a part of a script.
            assert "${{ github." not in step.get("run", "")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_what_a_workflow_calls_exists(path: Path) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for job in jobs(path).values():
        for step in job["steps"]:
            called = re.findall(r"\bmake (?:--\S+ )*([a-z-]+)", step.get("run", ""))
            assert set(called) <= targets
            uses = step.get("uses", "")
            assert not uses.startswith("./") or (ROOT / uses / "action.yml").exists()


def test_release_notes_are_the_changelog_of_a_version() -> None:
    def notes(version: str) -> subprocess.CompletedProcess[str]:
        command = ["make", "--silent", "release-notes", f"VERSION={version}"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    newest = notes("0.1.0").stdout
    assert newest.startswith("## [0.1.0]") and "\n## " not in newest and "### Added" in newest
    assert notes("0.1").returncode != 0 and "CHANGELOG.md has no version 0.1" in notes("0.1").stderr
