"""The parts of a configured checkpoint, each from its place: a folder in diffusers' layout, a repository, or one file.

A file is converted once to a folder in diffusers' layout, in the folder `latentpress` of the Hugging Face cache
(HF_HOME), and again if the file changes. Parts of several places are linked into one folder there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cache.models import weights
from cache.store.files import make_folders, replacing
from cache.store.store import Store
from schemas.checkpoint import Place, WeightFile
from schemas.config.encoding import PART_OPTIONS, Model
from schemas.identity import hash_json

CONVERSION = 1  # version of the converted folders


def locate(model: Model, parts: Sequence[str]) -> Place:
    """The folder in diffusers' layout, or the repository, that has these parts of a checkpoint. A file is converted
    first; if the parts have several places, all of them are fetched. Raises WeightsError."""
    groups = _group(model, parts)
    if len(groups) == 1:
        return next(iter(groups))
    paths = dict[str, Path]()
    for place, own_parts in groups.items():
        folder = weights.fetch_components(*place, own_parts)
        paths |= {part: folder / part for part in own_parts}
    return _link(paths)


def read_part_config(model: Model, part: str) -> dict[str, Any]:
    """Return the config.json of one part. From a repository, only this file is fetched; for a file, the published
    values that differ from the defaults of the model's class are returned. Raises WeightsError."""
    place = model.place(part)
    if isinstance(place, WeightFile):
        key = "_class_name" if place.class_name[0].isupper() else "model_type"
        return {key: place.class_name, **place.shape}
    return weights.read_component_config(*place, part)


def fingerprint_parts(model: Model, parts: Sequence[str], memo: Store | None = None) -> dict[str, Any]:
    """`weights.fingerprint_weights` of parts of a checkpoint. For parts of several places: {"places"}, the list of
    their fingerprints. A file has the fingerprint of its converted folder, so two files with the same weights are the
    same checkpoint."""
    groups = sorted((own_parts, place) for place, own_parts in _group(model, parts).items())
    found = [weights.fingerprint_weights(place.source, own, place.revision, memo) for own, place in groups]
    return found[0] if len(found) == 1 else {"places": found}


def is_local(model: Model, part: str) -> bool:
    """Whether the place of a part is a file or a folder on this machine. Raises CheckpointNotFound if the place is
    neither, nor a repository id."""
    place = model.place(part)
    return isinstance(place, WeightFile) or weights.local_folder(place.source) is not None


def _group(model: Model, parts: Sequence[str]) -> dict[Place, list[str]]:
    """Place in diffusers' layout -> the parts that are read from it."""
    groups: dict[Place, list[str]] = {}
    for part in parts:
        place = model.place(part)
        if isinstance(place, WeightFile):
            place = _convert(place, part)
            if part in model.family_spec.tokenizers:
                place = _add_tokenizer(model, place, part)
        elif part in PART_OPTIONS and getattr(model, part):
            weights.local_folder(
                place.source, f"set model.{part} to a folder or repository that has {part}, or remove it"
            )
        groups.setdefault(place, []).append(part)
    return groups


def _convert(file: WeightFile, part: str) -> Place:
    """A folder in diffusers' layout with one part, converted from a file."""
    path = Path(file.path).expanduser().resolve()
    if not path.is_file():
        raise weights.CheckpointNotFound(f"{file.path} is not a file", f"correct model.path or model.{part}")
    file, about = replace(file, path=str(path)), path.stat()

    def write(folder: Path) -> None:
        from cache.models.conversion import convert_file

        convert_file(file, folder / part)

    made_of = [CONVERSION, part, about.st_size, about.st_mtime_ns, asdict(file)]
    return _make_once(f"{path.stem}-{hash_json(made_of)[:16]}", write)


def _add_tokenizer(model: Model, converted: Place, part: str) -> Place:
    """A folder with a converted text encoder and the checkpoint's tokenizer, for families that have both in one
    sub-folder."""
    base = weights.fetch_components(model.source, model.revision, [part], weights.TOKENIZER_PATTERNS) / part
    files = {path.name: path for pattern in weights.TOKENIZER_PATTERNS for path in base.glob(pattern)}
    files = {name: path for name, path in files.items() if not name.endswith(".index.json")}
    files |= {path.name: path for path in Path(converted.source, part).iterdir()}
    return _link({f"{part}/{name}": path for name, path in files.items()})


def _link(paths: Mapping[str, Path]) -> Place:
    """A folder of links. paths: name in the folder -> file or folder."""

    def write(folder: Path) -> None:
        for name, path in paths.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).symlink_to(path.absolute())

    return _make_once(f"joined-{hash_json(sorted((name, str(path)) for name, path in paths.items()))[:16]}", write)


def _make_once(name: str, write: Callable[[Path], None]) -> Place:
    """A folder in `latentpress` of the Hugging Face cache, which `write` fills the first time. The processes of a
    machine, such as ranks, wait for the one that writes."""
    from huggingface_hub.constants import HF_HOME
    from huggingface_hub.utils import WeakFileLock

    folder = Path(HF_HOME) / "latentpress" / name
    if not folder.is_dir():
        make_folders(folder.parent)
        with WeakFileLock(folder.with_name(f"{name}.lock")):
            if not folder.is_dir():
                with replacing(folder) as made:
                    made.mkdir()
                    write(made)
    return Place(str(folder))
