"""The files of a run's result, under the names by which they are downloaded."""

from pathlib import Path

from schemas.config.pipeline import Config
from schemas.config.training import FILE_NAMES


def list_results(config: Config) -> dict[str, Path]:
    """The files of the run's result: name of the download -> path. The file for ComfyUI is first."""
    names = {file: f"{config.result_name}-{form}.safetensors" for form, file in FILE_NAMES.items()}
    folders = (config.run_folder, config.result_folder)
    paths = [path for folder in folders for path in sorted(folder.glob("*.safetensors")) if path.is_file()]
    inside = [path for path in paths if path.resolve().is_relative_to(config.run_folder.resolve())]
    return {names.get(path.name, path.name): path for path in inside}
