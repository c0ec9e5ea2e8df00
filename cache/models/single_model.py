"""A model that stands alone, as transformers saves one: config.json and *.safetensors in a folder or a repository.

Unlike a checkpoint in diffusers layout it has no components. Pickled weights are not read. Imports no torch.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cache.models.weights import (
    COMMIT_PATTERN,
    WeightsError,
    bar_class,
    call_hub,
    check_config,
    hash_file,
    local_folder,
)
from cache.store.store import Store
from schemas.activities import activity
from schemas.identity import hash_json

CONFIG_FILE = "config.json"
WEIGHT_FILES = (CONFIG_FILE, "*.safetensors", "*.safetensors.index.json")
#: With those of its tokenizer and its processor.
MODEL_FILES = (*WEIGHT_FILES, "*.json", "*.txt", "*.model", "*.jinja")


@dataclass(frozen=True)
class SingleModel:
    """The place of a model. source: a directory or a repository's id. key: the option that names it. advice: what the
    option may be. files: patterns of the names that are read."""

    source: str
    revision: str | None
    key: str
    advice: str
    files: tuple[str, ...] = WEIGHT_FILES

    def fingerprint(self, memo: Store | None = None) -> dict[str, Any]:
        """Return what determines the model, as small JSON. Raises WeightsError.

        For a local directory {"content"}, the xxh3 of its files; for a repository {"repo", "commit"}, for which only
        its config is fetched. memo: remembers the hashes of large files, so that each is read once.
        """
        if (folder := self._local_folder()) is None:
            return {"repo": self.source, "commit": self.config_file().parent.name}
        return {"content": hash_json([[path.name, hash_file(path, memo)] for path in self._list_files(folder)])}

    def config_file(self) -> Path:
        """config.json. Of a repository that at the revision's present commit or, offline, at the commit in the local
        cache; its folder is named by the commit. Looked up once in a process, so that a branch that moves meanwhile
        does not change the fingerprint. A local one may be missing."""
        folder = self._local_folder()
        return _fetch_config(self.source, self.revision, self.key) if folder is None else folder / CONFIG_FILE

    def fetch(self) -> Path:
        """The directory of the files, a repository's after fetching them. Raises WeightsError."""
        folder = self._local_folder()
        if folder is None:
            from huggingface_hub import snapshot_download

            with activity(f"fetching {self.source}", unit="bytes") as task:
                options = {"allow_patterns": list(self.files), "tqdm_class": bar_class(task)}
                folder = Path(call_hub(snapshot_download, self.source, self.revision, key=self.key, **options))
        if not any(path.suffix == ".safetensors" for path in self._list_files(folder)):
            raise WeightsError(
                f"{self.source} has no *.safetensors",
                "save the model with transformers' save_pretrained, which writes them; pickled weights are not read",
            )
        check_config(folder / CONFIG_FILE)
        return folder

    def _local_folder(self) -> Path | None:
        return local_folder(self.source, self.advice)

    def _list_files(self, folder: Path) -> list[Path]:
        shown = [path for path in folder.iterdir() if not path.name.startswith(".")]
        return sorted(path for path in shown if any(map(path.match, self.files)))


@cache
def _fetch_config(repo: str, revision: str | None, key: str) -> Path:
    from huggingface_hub import hf_hub_download

    config = Path(call_hub(hf_hub_download, repo, revision, key=key, filename=CONFIG_FILE))
    if not COMMIT_PATTERN.fullmatch(config.parent.name):
        raise WeightsError(
            f"{key}: the installed huggingface_hub keeps {config} in a folder that does not name its commit",
            "name a folder, or install the huggingface_hub of constraints.txt",
        )
    return config
