"""The files of a run's result, under the names by which they are downloaded."""

from pathlib import Path

from schemas.config.pipeline import Config
from schemas.config.training import FILE_NAMES


def list_results(config: Config) -> dict[str, Path]:
    """The files of the run's result: name of the download -> path. The file for ComfyUI, named after run and family, is
    first."""
    stem = f"{config.run_name}-{config.model.family}"
    names = {FILE_NAMES["comfyui"]: stem, FILE_NAMES["lycoris"]: stem, FILE_NAMES["diffusers"]: f"{stem}-diffusers"}
    paths = [path for path in sorted(config.result_folder.glob("*.safetensors")) if path.is_file()]
    inside = [path for path in paths if path.resolve().is_relative_to(config.run_folder.resolve())]
    return {f"{names.get(path.name, path.stem)}.safetensors": path for path in inside}
