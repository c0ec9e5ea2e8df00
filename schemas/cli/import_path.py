"""Nothing of the working directory can be imported: a file there that is called like a module must not run.

Python puts the working directory first on the import path for `python -m` and `python -c` (multiprocessing starts its
processes with the latter), and for every empty or relative entry of PYTHONPATH.
"""

import os
import sys


def remove_working_directory() -> None:
    """Of this process, and by the environment of all that it starts. For programs, before their other imports.

    An absolute entry of PYTHONPATH stays. What `python -m` put first is removed by the packages' `__init__`.
    """
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [entry for entry in entries if os.path.isabs(entry)]
    removed = {"", *(os.path.abspath(entry) for entry in entries if entry not in kept)} - {*kept}
    if "PYTHONPATH" in os.environ:
        sys.path[:] = [entry for entry in sys.path if entry not in removed]
        os.environ["PYTHONPATH"] = os.pathsep.join(kept)
        if not kept:  # one empty entry would mean the working directory again
            del os.environ["PYTHONPATH"]
    os.environ["PYTHONSAFEPATH"] = "1"
