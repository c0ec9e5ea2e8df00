"""A stand-in for huggingface_hub.HfApi that takes models, and a repository in the local cache of that library."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from tests.processes import ForkedProgram

TOKEN = "hf_s3cretTokenOfTheHub"


@dataclass
class ModelHub:
    """The methods of HfApi that push calls. A repository is a folder and a file with its privacy and commits.

    failures: name of a method -> status of the answer, or "cut" for a connection that fails
    """

    folder: Path
    failures: dict[str, int | str] = field(default_factory=dict)

    def install(self) -> None:
        huggingface_hub.HfApi = lambda **options: self  # type: ignore[misc,assignment]

    def files(self, repo: str) -> dict[str, bytes]:
        paths = [path for path in (self.folder / repo).rglob("*") if path.is_file()]
        return {str(path.relative_to(self.folder / repo)): path.read_bytes() for path in paths}

    def log(self, repo: str) -> list[str]:
        """Return "private" or "public", then the message of each commit."""
        return (self.folder / f"{repo}.log").read_text().splitlines()

    def _fail(self, status: int | str) -> None:
        from huggingface_hub.errors import HfHubHTTPError

        response: Any = SimpleNamespace(status_code=status, headers={}, request=None)
        said = f"refused: {TOKEN}"
        raise ConnectionError(said) if status == "cut" else HfHubHTTPError(said, response=response, server_message=said)

    def create_repo(self, repo: str, private: bool, exist_ok: bool = False) -> str:
        if status := self.failures.get("create_repo"):
            self._fail(status)
        if not (self.folder / repo).exists():
            (self.folder / repo).mkdir(parents=True)
            (self.folder / f"{repo}.log").write_text("private\n" if private else "public\n")
        return f"https://hub.invalid/{repo}"

    def repo_info(self, repo: str) -> SimpleNamespace:
        return SimpleNamespace(private=self.log(repo)[0] == "private", sha=f"commit {len(self.log(repo))}")

    def create_commit(self, repo: str, adds: list[Any], commit_message: str, parent_commit: str) -> SimpleNamespace:
        if status := self.failures.get("create_commit", 412 * (parent_commit != self.repo_info(repo).sha)):
            self._fail(status)
        for add in adds:
            path = self.folder / repo / add.path_in_repo
            path.parent.mkdir(parents=True, exist_ok=True)
            with add.as_file() as content:
                path.write_bytes(content.read())
        with (self.folder / f"{repo}.log").open("a") as log:
            log.write(f"{commit_message}\n")
        return SimpleNamespace(oid=self.repo_info(repo).sha)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelHub:
    """The hub without a repository, also for programs that are forked. The user's token is in the environment."""
    hub = ModelHub(tmp_path / "hub-of-models")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(huggingface_hub, "HfApi", huggingface_hub.HfApi)  # as it is again after the test
    monkeypatch.setattr(ForkedProgram, "prepare", hub.install)
    hub.install()
    return hub


def branch_that_moves(folder: Path, hub: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, str], Path]:
    """Make a repository in a local cache, offline, with the files of a folder. Returns the part of a fingerprint that
    identifies its weights, and the file that names the commit of the branch."""
    repo, weights = (
        hub / "models--someone--a-branch-that-moves",
        {"repo": "someone/a-branch-that-moves", "commit": "a" * 40},
    )
    shutil.copytree(folder, repo / "snapshots" / weights["commit"])
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(weights["commit"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return weights, repo / "refs" / "main"
