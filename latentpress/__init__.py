"""What an installed latentpress is found by. The wheel has the repository's packages in this folder, so that none with
a common name, such as `cache` or `schemas`, is put among other libraries; here they are found by their own names.
"""

import os
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def add_packages() -> None:
    """Put the packages in this folder, if there are any, on the import path of this process and of those it starts."""
    if not (FOLDER / "schemas").is_dir():  # a clone
        return
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(entry)]
    if str(FOLDER) not in entries:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(FOLDER), *entries])
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))


def main() -> None:
    """The command `latentpress`."""
    if sys.platform == "win32":  # which has no locks of files, limits of memory and forks as programs here use them
        print(
            "error: latentpress does not run on Windows itself\nUse WSL 2 or a container: docs/install.md",
            file=sys.stderr,
        )
        sys.exit(2)
    add_packages()
    from stages.cli import main

    main()
