"""Adding an adapter to the weights of a checkpoint in diffusers layout, file by file.

No model is built: a file's tensors are in memory at a time, and names, order and dtype of all tensors stay as they are.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open

from cache.models.weights import MODEL_INDEX, PICKLE_SUFFIXES, WEIGHTS_SUFFIX, read_object
from trainer.adapters.files import write_tensors
from trainer.adapters.header import FLOAT_DTYPES, AdapterError
from trainer.adapters.layers import Layer


def read_weight_shapes(checkpoint: Path, part: str) -> dict[str, tuple[int, ...]]:
    """By "<component>.<module path>", from the headers of a component's files. AdapterError where they are damaged or
    quantized."""
    shapes = dict[str, tuple[int, ...]]()
    for path in weight_files(checkpoint / part):
        with _explained(path), safe_open(path, "np") as file:
            for key in file.keys():  # noqa: SIM118
                tensor = file.get_slice(key)
                if tensor.get_dtype() not in FLOAT_DTYPES:
                    raise AdapterError(
                        f"{path}: {key} is of type {tensor.get_dtype()}, to which nothing can be added",
                        "Set model.path to the checkpoint before it was quantized.",
                    )
                if key.endswith(".weight"):
                    shapes[f"{part}.{key.removesuffix('.weight')}"] = tuple(tensor.get_shape())
    return shapes


def weight_files(component: Path) -> list[Path]:
    return sorted(component.glob(f"*{WEIGHTS_SUFFIX}"))


def merge_component(source: Path, target: Path, layers: Mapping[str, Layer], advance: Callable[[], None]) -> int:
    """Write the component `source` to the empty folder `target`, with `layers` (by module path) applied to their
    weights in float32; returns how many. advance: called after each weight file. AdapterError where a weight is then
    beyond its dtype."""
    target.mkdir(parents=True, exist_ok=True)
    merged = set[str]()
    for path in weight_files(source):
        with _explained(path), safe_open(path, "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            header = file.metadata()
        for key in [key for key in tensors if key.removesuffix(".weight") in layers]:
            weight, module = tensors[key], key.removesuffix(".weight")
            tensors[key] = layers[module].apply(weight.float()).to(weight.dtype)
            if not tensors[key].isfinite().all():
                raise AdapterError(
                    f"{path}: with the adapter, {key} has numbers that are not finite in {str(weight.dtype)[6:]}",
                    "Choose a lower --scale, or set model.path to a checkpoint of another dtype.",
                )
            merged.add(module)
        write_tensors(tensors, target / path.name, header)
        advance()
    for path in other_files(source):
        shutil.copyfile(path, target / path.name)  # not its mode: new files have that of the umask
    assert merged == layers.keys(), "checked before by check_fits"
    return len(merged)


def other_files(folder: Path) -> list[Path]:
    """A folder's files that are neither weights nor hidden."""
    unread = (WEIGHTS_SUFFIX, *PICKLE_SUFFIXES)
    files = (path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith("."))
    return [path for path in files if not path.name.endswith(unread)]


def list_parts(checkpoint: Path) -> list[str]:
    """The components that model_index.json names."""
    index = read_object(checkpoint / MODEL_INDEX)
    return [name for name, entry in index.items() if isinstance(entry, list) and entry[:1] != [None]]


def copy_rest(checkpoint: Path, target: Path, merged: list[str]) -> None:
    """Copy what a pipeline's `from_pretrained` reads beside the components `merged`, with the modes of new files."""
    shutil.copyfile(checkpoint / MODEL_INDEX, target / MODEL_INDEX)
    for part in list_parts(checkpoint):
        if part not in merged and (checkpoint / part).is_dir():
            ignored = shutil.ignore_patterns(".*", *(f"*{suffix}" for suffix in PICKLE_SUFFIXES))
            shutil.copytree(checkpoint / part, target / part, ignore=ignored, copy_function=shutil.copyfile)
            for folder in (target / part, *(path for path in (target / part).rglob("*") if path.is_dir())):
                folder.chmod(target.stat().st_mode & 0o777)  # copytree copies the modes of folders


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise AdapterError(f"{path} is damaged: {error}", "Replace the checkpoint with a whole copy.") from error
