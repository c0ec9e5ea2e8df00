"""Finds the weights of a checkpoint and identifies them for a cache's fingerprint. Does not import torch.

A source is a local directory in diffusers layout or the id of a Hugging Face repository. Repositories are reached
through huggingface_hub, so its own settings apply (HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE, ...). Only safetensors files
are read, because reading a pickle can run code from it.
"""

import json
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import xxhash
from pydantic import Field

from cache.store.damage import DamageError
from cache.store.files import StoreError
from cache.store.json_checks import check_object, printable
from cache.store.store import Store
from schemas.activities import Progress, activity
from schemas.errors import USAGE, LatentpressError
from schemas.identity import hash_json
from schemas.json_records import Record
from schemas.regular_files import NOT_REGULAR, open_regular
from schemas.text_format import format_bytes, shown_path

WEIGHTS_SUFFIX = ".safetensors"
#: Files of a component that are downloaded: weights, configurations, a tokenizer's files; never a pickle.
TOKENIZER_PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja")
ALLOW_PATTERNS = ("*.safetensors", *TOKENIZER_PATTERNS)
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def find_weights_problem(folder: Path) -> tuple[str, str] | None:
    """Return (reason why a folder's weights can't be read, next step), or None if the weights are safetensors files."""
    files = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    for name in files:
        if name.endswith(f"{WEIGHTS_SUFFIX}.index.json") and not _is_valid_index(folder / name):
            problem = f"{folder / name} does not list *{WEIGHTS_SUFFIX} files in its own folder"
            return problem, "replace the checkpoint with a whole copy from a source that you trust"
    if any(name.endswith(WEIGHTS_SUFFIX) for name in files):
        return None
    pickled = [name for name in files if name.endswith(PICKLE_SUFFIXES)]
    if not pickled:
        return f"{folder} has no *{WEIGHTS_SUFFIX}", "replace the checkpoint with a whole copy in diffusers layout"
    return (
        f"{folder / pickled[0]} is a pickle, which can run code, and *{WEIGHTS_SUFFIX} files are missing",
        f"use a checkpoint with *{WEIGHTS_SUFFIX}; or, if you trust this one, load the folder with its class in "
        "diffusers or transformers, call save_pretrained(folder, safe_serialization=True) on it, and remove the "
        "pickled files",
    )


def _is_valid_index(path: Path) -> bool:
    """Whether an index file maps every weight to a safetensors file in the index's own folder."""
    try:
        with open_regular(path) as file:
            files = json.loads(file.read())["weight_map"].values()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
    return all(isinstance(name, str) and name.endswith(WEIGHTS_SUFFIX) and Path(name).name == name for name in files)


MODEL_INDEX, DIFFUSERS_WEIGHTS = "model_index.json", "diffusion_pytorch_model"
INDEXES = (
    MODEL_INDEX,
    "modular_model_index.json",
)  # of a pipeline, of a modular pipeline; a checkpoint has one of them
HASH_BUFFER_BYTES = 1 << 20
MEMO_MIN_BYTES = 1 << 28  # hashes of smaller files are not remembered
PATH_HINT = "set model.path to a checkpoint in diffusers layout; without it the flavour's repository is used"
MAX_LISTED_FILES = 8  # entries of a folder in an error message
WHOLE_COPY = "replace it with a whole copy"
REPLACE_CONFIG = "replace it with the config.json of the published checkpoint"
_COUNT_KEYS, MAX_COUNT = re.compile("layers|depth|blocks|stages|labels"), 10_000  # keys of a config.json
ONE_CHECKPOINT = "take its config.json and its weights from one checkpoint, or replace it with a whole copy"
COMMIT_PATTERN = re.compile(r"[0-9a-f]{40}")
_REPO_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class WeightsError(LatentpressError, ValueError):
    """A checkpoint, or a component of it, that is missing or can't be reached."""


class UnknownCommit(WeightsError):
    """A repository whose commit is unknown, because no encoding stage has run for this root."""


class UnsafeWeights(WeightsError):
    """Weights that are not safetensors, or missing."""

    exit_code = USAGE


class CheckpointNotFound(WeightsError):
    """The source in the configuration is neither a directory nor a repository id."""

    exit_code = USAGE


class HubError(WeightsError):
    """A repository that can't be reached."""


def fingerprint_weights(
    source: str, parts: Sequence[str], revision: str | None, memo: Store | None = None
) -> dict[str, Any]:
    """Return a small JSON object that identifies the weights of the components `parts`, for a cache's fingerprint.

    For a local directory: {"content"}, a hash over the xxh3 of every file of the components, whatever the directory's
    name. For a repository: {"repo", "commit", "parts"}; nothing is fetched. Raises WeightsError. memo: store for the
    commits that `current_commit` finds and for the hashes of large files by path, size and time, so that each file is
    read once.
    """
    folder = local_folder(source)
    if folder is None:
        return {"repo": source, "commit": _find_commit(source, revision, memo), "parts": sorted(parts)}
    _check_components(folder, parts)
    files = sorted((name, path) for part in parts for name, path in _list_files(folder, part))
    with activity(f"reading the weights of {shown_path(folder)}", unit="bytes") as task:
        task.total = sum(path.stat().st_size for _, path in files)
        return {"content": hash_json([[name, hash_file(path, memo, task.advance)] for name, path in files])}


def fetch_components(
    source: str, revision: str | None, parts: Sequence[str], files: Sequence[str] = ALLOW_PATTERNS
) -> Path:
    """Return the directory with the components `parts`. From a repository, only these components are fetched. files:
    patterns for the names of the files that are fetched. Raises WeightsError."""
    folder = local_folder(source)
    if folder is None:
        from huggingface_hub import snapshot_download

        patterns = [*INDEXES, *(f"{part}/{pattern}" for part in parts for pattern in files)]
        with activity(f"fetching {', '.join(parts)} of {source}", unit="bytes") as task:
            bars = bar_class(task)
            folder = Path(call_hub(snapshot_download, source, revision, allow_patterns=patterns, tqdm_class=bars))
    _check_components(folder, parts)
    return folder


def load_part(model_class: Any, source: str, revision: str | None, part: str, **settings: Any) -> Any:
    """Load the model of one component of a checkpoint; only this component is fetched. Also raises WeightsError if the
    files have weights that the model does not have, which the libraries would ignore."""
    folder = fetch_components(source, revision, (part,)) / part
    return load_pretrained(model_class, folder, may_leave_out=False, **settings)


def load_pretrained(
    model_class: Any, folder: Path, unneeded: Collection[str] = (), may_leave_out: bool = True, **settings: Any
) -> Any:
    """Call `model_class.from_pretrained(folder)`, for safetensors only. Raises UnsafeWeights if the weights are
    pickled, and WeightsError if a weight's shape differs or a weight is missing, which the libraries would initialize
    at random. unneeded: prefixes of weight names that may be missing. may_leave_out: whether the files may have weights
    that the model does not have."""
    if problem := find_weights_problem(folder):
        raise UnsafeWeights(*problem)
    check_config(folder / "config.json")
    size = format_bytes(sum(path.stat().st_size for path in folder.iterdir() if path.is_file()))
    loading = activity(f"loading {model_class.__name__} from {shown_path(folder)}, {size}")
    with loading, config_errors(f"{shown_path(folder)}/config.json"):
        settings |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # mismatches raise below
        model, loaded = model_class.from_pretrained(folder, use_safetensors=True, **settings)
    counters = "num_batches_tracked"  # a counter in batch norms that only training uses
    needed = [key for key in loaded["missing_keys"] if not key.startswith(tuple(unneeded)) and counters not in key]
    _refuse_weights(folder, loaded["mismatched_keys"], needed, () if may_leave_out else loaded["unexpected_keys"])
    return model


def check_stored(folder: Path, model_shapes: Mapping[str, tuple[int, ...]], ignored: Sequence[str] = ()) -> None:
    """Raise the errors of `load_part` for a folder of a diffusers model, reading only the headers of its files.
    model_shapes: name -> shape for all weights of the model. ignored: regular expressions for names of weights that the
    model ignores."""
    from safetensors import safe_open

    if problem := find_weights_problem(folder):
        raise UnsafeWeights(*problem)
    single, index = folder / f"{DIFFUSERS_WEIGHTS}{WEIGHTS_SUFFIX}", f"{DIFFUSERS_WEIGHTS}{WEIGHTS_SUFFIX}.index.json"
    files = {single} if single.is_file() else set[Path]()
    if (folder / index).is_file():
        files = {folder / name for name in read_object(folder / index)["weight_map"].values()}
    file_shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        with safe_open(path, "np") as file:
            file_shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    common = file_shapes.keys() & model_shapes.keys()
    misshapen = [
        (name, file_shapes[name], model_shapes[name]) for name in common if file_shapes[name] != model_shapes[name]
    ]
    surplus = [name for name in file_shapes.keys() - common if not any(re.search(pattern, name) for pattern in ignored)]
    _refuse_weights(folder, misshapen, model_shapes.keys() - common, surplus)


def _refuse_weights(
    folder: Path, misshapen: Iterable[tuple[str, Any, Any]], missing_names: Iterable[str], surplus_names: Iterable[str]
) -> None:
    """Raise WeightsError if weights do not have the shape given by config.json, are missing or are not in the model."""
    for name, file_shape, model_shape in sorted(misshapen):
        shapes = f"has shape {[*file_shape]}, but its config.json requires {[*model_shape]}"
        raise WeightsError(f"{folder}: {name} {shapes}", ONE_CHECKPOINT)
    if names := [*missing_names]:
        raise WeightsError(f"{folder} lacks {name_some(names)}", WHOLE_COPY)
    if names := [*surplus_names]:
        problem = "has weights that the model in its config.json does not have"
        raise WeightsError(f"{folder} {problem}: {name_some(names)}", ONE_CHECKPOINT)


def check_config(file: Path) -> None:
    """Check a config.json before a model is made from it. Raises WeightsError if the file has more layers or labels
    than any model, since making that model would exhaust the memory before its weights are compared with the files.
    Raises UnsafeWeights if the file names a kernel on the hub, which is code, or another model, which would be
    fetched."""
    objects: list[dict[str, Any]] = []  # each object follows the objects nested in it
    try:
        with open_regular(file) as opened:
            json.loads(opened.read(), object_hook=objects.append)
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{file} can't be read: {error}", WHOLE_COPY) from error
    for key, value in (setting for values in objects for setting in values.items()):
        counts = value if isinstance(value, list) else [value]
        if _COUNT_KEYS.search(key) and any(isinstance(count, int) and count > MAX_COUNT for count in counts):
            problem = f"{file}: {key} is {printable(value)}; the maximum is {MAX_COUNT}"
            raise WeightsError(problem, REPLACE_CONFIG)
        if key.endswith("attn_implementation") and "/" in str(value):
            problem = f"{file}: {key} is {printable(value)}, a kernel on the hub, which is code"
            raise UnsafeWeights(problem, "remove that key from the file, if you trust the rest of the checkpoint")
    if objects and (backbone := objects[-1].get("backbone")):  # in a nested configuration, "backbone" has no effect
        problem = f"{file}: backbone is {printable(backbone)}, a model that is not a part of the checkpoint"
        raise UnsafeWeights(problem, "choose a checkpoint that has its backbone_config instead")


def name_some(names: Iterable[str]) -> str:
    """The first names of a list, for messages."""
    first = sorted(names)
    return printable(", ".join(first[:3])) + (f" and {len(first) - 3} more" if len(first) > 3 else "")


@contextmanager
def config_errors(file: str) -> Iterator[None]:
    """Context in which a model is made from the config.json `file`. Raises WeightsError in place of the errors that the
    model's class raises for a value it can't use. Damaged weights raise errors of other types."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (
        *(TypeError, AttributeError, LookupError, ArithmeticError, AssertionError, ImportError, StrictDataclassError),
    ) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
        raise WeightsError(f"{file} has a value that the model does not accept ({reason})", REPLACE_CONFIG) from error


def read_component_config(source: str, revision: str | None, part: str) -> dict[str, Any]:
    """Return the config.json of one component. From a repository, only this file is fetched. Raises WeightsError."""
    folder = local_folder(source)
    if folder is None:
        return read_hub_object(source, revision, f"{part}/config.json")
    _check_components(folder, (part,))
    return read_object(folder / part / "config.json")


def read_hub_object(repo: str, revision: str | None, file: str) -> dict[str, Any]:
    """Return a JSON file of a repository; only this file is fetched. Raises WeightsError."""
    from huggingface_hub import hf_hub_download

    return read_object(Path(call_hub(hf_hub_download, repo, revision, filename=file)))


def read_cached_object(repo: str, revision: str | None, file: str) -> dict[str, Any] | None:
    """Return a JSON file of a repository from the local cache, without a request; None if the file was not fetched
    before. Raises WeightsError."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(repo, file, revision=revision)
    return read_object(Path(path)) if isinstance(path, str) else None


def read_object(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as file:
            return check_object(json.loads(file.read()), "the JSON")
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{path} can't be read: {error}", WHOLE_COPY) from error


def list_parts(index: Mapping[str, Any]) -> list[str]:
    """The sub-folders of the components that an index names. In the index of a modular pipeline, an entry
    has a third item, the repository and sub-folder of the component; components of other repositories are left out."""
    entries = {name: entry for name, entry in index.items() if isinstance(entry, list)}
    places = {name: entry[2] for name, entry in entries.items() if len(entry) > 2 and isinstance(entry[2], dict)}
    if not places:
        return [name for name, entry in entries.items() if entry[:1] != [None]]
    repos = {name: place.get("pretrained_model_name_or_path") for name, place in places.items()}
    own = {name: place for name, place in places.items() if repos[name] == repos.get("transformer")}
    return [*dict.fromkeys(str(place.get("subfolder") or name) for name, place in own.items())]


def find_index(folder: Path) -> Path | None:
    """The index of the pipeline in a checkpoint's folder; None if the folder has no index."""
    return next((folder / name for name in INDEXES if (folder / name).is_file()), None)


def local_folder(source: str, advice: str = PATH_HINT) -> Path | None:
    """Return the directory `source`, or None if `source` is a repository id. Raises CheckpointNotFound if `source` is
    neither."""
    folder = Path(os.path.expanduser(source))  # "~name" stays unchanged if the user does not exist
    if folder.is_dir():
        return folder
    if _REPO_PATTERN.fullmatch(source) and not folder.exists():
        return None
    raise CheckpointNotFound(f"{source} is neither a directory nor a repository id (owner/name)", advice)


def _check_components(folder: Path, parts: Sequence[str]) -> None:
    if missing_parts := [part for part in parts if not _list_files(folder, part)]:
        names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
        if len(names) > MAX_LISTED_FILES:
            names[MAX_LISTED_FILES:] = [f"{len(names) - MAX_LISTED_FILES} more"]
        raise WeightsError(
            f"{folder} lacks {', '.join(missing_parts)}; it contains {', '.join(names) or 'nothing'}",
            f"in diffusers layout each of these folders contains a config and weights: {', '.join(parts)}",
        )


def _list_files(folder: Path, part: str) -> list[tuple[str, Path]]:
    """(name relative to `folder`, path) of a component's files, except hidden ones, which systems leave behind."""
    files = [(path.relative_to(folder), path) for path in (folder / part).rglob("*") if not path.is_dir()]
    visible = [(name, path) for name, path in files if not any(p.startswith(".") for p in name.parts) and path.exists()]
    return sorted((name.as_posix(), path) for name, path in visible)


class FileHash(Record):
    """The hash of a large file, in a file named by its path, size and time."""

    path: str
    content: str


class RepoCommit(Record):
    """The commit of a repository's revision."""

    repo: str
    commit: str = Field(pattern=r"^[0-9a-f]{40}$")


def hash_file(path: Path, memo: Store | None, advance: Callable[[int], object] = lambda count: None) -> str:
    """Return the xxh3-128 of a file's bytes. Raises WeightsError for a pipe or a device. memo: store for the hashes of
    large files. advance: function that is called with the number of bytes read."""
    about, name = path.stat(), os.fspath(path.resolve())
    if not stat.S_ISREG(about.st_mode):
        raise WeightsError(f"{path} {NOT_REGULAR}", WHOLE_COPY)
    key = [name, about.st_size, about.st_mtime_ns]
    if memo is None or about.st_size < MEMO_MIN_BYTES:
        return _hash_content((name, about.st_size, about.st_mtime_ns), advance)
    rel = f"weights/{hash_json(key)}.json"
    with suppress(FileNotFoundError, DamageError):  # a damaged record is written again
        content = memo.read_record(rel, FileHash).content
        advance(about.st_size)
        return content
    content = _hash_content((name, about.st_size, about.st_mtime_ns), advance)
    with suppress(StoreError):  # a read-only root: the file is hashed again next time
        memo.publish_record(rel, FileHash(path=name, content=content))
    return content


_hashes: dict[tuple[str, int, int], str] = {}  # (path, size, time of change) -> content


def _hash_content(key: tuple[str, int, int], advance: Callable[[int], object]) -> str:
    if key in _hashes:
        advance(key[1])
    else:
        content, buffer = xxhash.xxh3_128(), memoryview(bytearray(HASH_BUFFER_BYTES))
        with open(key[0], "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                content.update(buffer[:count])
                advance(count)
        _hashes[key] = content.hexdigest()
    return _hashes[key]


def _memo_path(repo: str, revision: str | None) -> str:
    return f"weights/{hash_json([repo, revision])}.json"


def _read_memo(rel: str, memo: Store) -> str | None:
    """Return the commit that `current_commit` stored, or None if the record is missing or can't be read."""
    with suppress(StoreError, OSError, DamageError):
        return memo.read_record(rel, RepoCommit).commit
    return None


def _find_commit(repo: str, revision: str | None, memo: Store | None) -> str:
    """Return the commit that the last encoding stage found for a revision, or else the commit in the local cache. Makes
    no request."""
    if revision and COMMIT_PATTERN.fullmatch(revision):
        return revision
    if memo is not None and (commit := _read_memo(_memo_path(repo, revision), memo)):
        return commit
    from huggingface_hub import try_to_load_from_cache

    for index in INDEXES:
        if isinstance(cached := try_to_load_from_cache(repo, index, revision=revision), str):
            return Path(cached).parent.name
    at = f" at revision {revision}" if revision else ""
    raise UnknownCommit(
        f"the commit of {repo}{at} is unknown, because the checkpoint has not been downloaded yet",
        "`latentpress run` downloads it, as `latentpress encode-text` and `latentpress encode-latents` do; or set "
        "model.revision to a full commit, or model.path to a local copy",
    )


def current_commit(repo: str, revision: str | None, memo: Store) -> str:
    """Return the current commit of a revision or, offline, the commit in the local cache. Only this function requests
    the commit from the hub. It stores the commit in `memo` for programs that only read, on this and other machines."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    def download_index(**options: Any) -> str:
        try:
            return hf_hub_download(filename=INDEXES[0], **options)
        except EntryNotFoundError:
            return hf_hub_download(filename=INDEXES[1], **options)

    commit = Path(call_hub(download_index, repo, revision)).parent.name
    rel = _memo_path(repo, revision)
    if _read_memo(rel, memo) != commit:
        with suppress(StoreError):
            memo.publish_record(rel, RepoCommit(repo=repo, commit=commit))
    return commit


def call_hub(download: Any, repo: str, revision: str | None, *, key: str = "model.path", **options: Any) -> str:
    """Call a function of huggingface_hub; raises HubError if it fails. key: name of the option that takes a local copy
    instead, for the message."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return download(repo_id=repo, revision=revision, **options)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        at = f" at revision {revision}" if revision else ""
        raise HubError(
            f"the repository {repo}{at} can't be reached, and no folder has this name: {error}",
            "check its name and revision and the network (HF_ENDPOINT for a mirror); for a gated repository, run "
            f"`hf auth login`; or set {key} to a local copy",
        ) from error


def bar_class(task: Progress) -> Any:
    """Return a class for `tqdm_class` whose bars in bytes advance `task`. The library has two bars for one download:
    bytes received and bytes written. The larger number counts."""
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **settings: Any) -> None:
            self._counts_bytes = settings.get("unit") == "B"
            super().__init__(*args, **{**settings, "disable": True})

        def update(self, n: float | None = 1) -> None:
            if not self._counts_bytes:
                return
            self.n += n or 0
            task.total = max(task.total or 0, self.total or 0) or None
            task.advance(max(0, self.n - task.done))

    return Bar


# -- models without components -----------------------------------------------------------------------------------------

CONFIG_FILE = "config.json"
WEIGHT_FILES = (CONFIG_FILE, "*.safetensors", "*.safetensors.index.json")
#: WEIGHT_FILES and the files of the model's tokenizer and processor.
MODEL_FILES = (*WEIGHT_FILES, "*.json", "*.txt", "*.model", "*.jinja")


@dataclass(frozen=True)
class SingleModel:
    """A model without components, as transformers saves it: config.json and *.safetensors in a folder or a repository.

    source: a directory or a repository id. key: name of the option that sets `source`. advice: valid values of the
    option, for messages. files: patterns for the names of files that are read.
    """

    source: str
    revision: str | None
    key: str
    advice: str
    files: tuple[str, ...] = WEIGHT_FILES

    def fingerprint(self, memo: Store | None = None) -> dict[str, Any]:
        """Return a small JSON object that identifies the model. Raises WeightsError.

        For a local directory {"content"}, a hash over the xxh3 of its files; for a repository {"repo", "commit"}, for
        which only its config is fetched. memo: store for the hashes of large files, so that each file is read once.
        """
        if (folder := self._local_folder()) is None:
            return {"repo": self.source, "commit": self.config_file().parent.name}
        return {"content": hash_json([[path.name, hash_file(path, memo)] for path in self._list_files(folder)])}

    def config_file(self) -> Path:
        """Return the path of config.json. For a repository, the file is taken at the revision's current commit or,
        offline, at the commit in the local cache, and its folder has the name of the commit. A process looks up the
        commit once, so that a branch that moves during the process does not change the fingerprint. For a local
        directory, the file may be missing."""
        folder = self._local_folder()
        return _fetch_config(self.source, self.revision, self.key) if folder is None else folder / CONFIG_FILE

    def fetch(self) -> Path:
        """Return the directory of the files; the files of a repository are fetched first. Raises WeightsError."""
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
        visible = [path for path in folder.iterdir() if not path.name.startswith(".")]
        return sorted(path for path in visible if any(map(path.match, self.files)))


@cache
def _fetch_config(repo: str, revision: str | None, key: str) -> Path:
    from huggingface_hub import hf_hub_download

    config = Path(call_hub(hf_hub_download, repo, revision, key=key, filename=CONFIG_FILE))
    if not COMMIT_PATTERN.fullmatch(config.parent.name):
        raise WeightsError(
            f"{key}: the installed huggingface_hub stores {config} in a folder that is not named by its commit",
            f"set {key} to a local folder, or install the huggingface_hub version in constraints.txt",
        )
    return config
