"""The engines: stages.engine names a module of this folder, which is imported when it is chosen.

Each is of the Protocol `Engine` (`jobs.py`); tests/stages/engines/test_contract.py runs all of them.
"""

from importlib import import_module
from typing import cast

from schemas.config.encoding import EngineName
from schemas.errors import USAGE, LatentpressError
from stages.engines.jobs import Engine

LIBRARIES: dict[EngineName, str] = {"local": "", "ray": "ray"}  # what an engine needs; the extra has the same name


class EngineNotInstalled(LatentpressError):
    exit_code = USAGE


def load_engine(name: EngineName) -> Engine:
    """Raises EngineNotInstalled where its library is missing."""
    try:
        return cast(Engine, import_module(f"stages.engines.{name}"))
    except ModuleNotFoundError as error:
        library = LIBRARIES[name]
        if not library or (error.name or "").partition(".")[0] != library:
            raise
        raise EngineNotInstalled(
            f"stages.engine is {name}, and the library {library!r} was not found",
            f"install it: pip install -e '.[{library}]', on every machine of the cluster; or choose --engine local",
        ) from error
