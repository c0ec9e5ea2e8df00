"""Data that crosses a machine boundary (configuration, families, tables, records), and code shared by all programs."""

import os
import sys


def remove_working_directory() -> None:
    """Keep modules of the working directory from being imported, in this process and, by the environment, in all that
    it starts: a file there with a module's name must not run. Python puts the working directory first on the import
    path for `python -m`, for `python -c` (which multiprocessing uses) and for every empty or relative entry of
    PYTHONPATH. Programs call this before their other imports. Absolute entries stay; the packages' `__init__` remove
    the entry of `python -m`.
    """
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    absolute = [entry for entry in entries if os.path.isabs(entry)]
    removed = {"", *(os.path.abspath(entry) for entry in entries if entry not in absolute)} - {*absolute}
    if "PYTHONPATH" in os.environ:
        sys.path[:] = [entry for entry in sys.path if entry not in removed]
        os.environ["PYTHONPATH"] = os.pathsep.join(absolute)
        if not absolute:  # one empty entry would mean the working directory again
            del os.environ["PYTHONPATH"]
    os.environ["PYTHONSAFEPATH"] = "1"
