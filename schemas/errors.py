"""Errors that a user can correct, and the exit codes of every program.

A LatentpressError is shown as its message and its next step, without a traceback. Any other exception of a program
is a bug in latentpress and keeps its traceback.
"""

from typing import Any, ClassVar

OK = 0  # everything is done
USAGE = 2  # wrong usage or configuration
INCOMPLETE = 3  # work remains, or failed
DAMAGE = 4  # damaged data was found
INTERRUPTED = 130  # the exit code that a shell reports for Ctrl-C
EXIT_CODES = (
    "Exit codes: 0 everything done; 2 wrong usage or configuration; 3 work remains or failed; 4 damage; "
    "130 interrupted."
)
#: Valid for every program, since files are written completely or not at all.
RERUN_HINT = "Finished work is stored, and incomplete files are discarded. Run the same command again to continue."


class LatentpressError(Exception):
    """message: the problem, with the valid choices. next_step: a sentence or a command. exit_code: the exit code."""

    exit_code: ClassVar[int] = INCOMPLETE

    def __init__(self, message: str, next_step: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step

    def __str__(self) -> str:
        return f"{self.message}\n{self.next_step}" if self.next_step else self.message

    def to_dict(self) -> dict[str, Any]:
        """The value of "error" in a JSON report; subclasses add their attributes."""
        return {"type": type(self).__name__, "message": self.message, "next_step": self.next_step}


class UsageError(LatentpressError):
    """Raised if the options or the configuration are not valid for the program."""

    exit_code = USAGE


class Interrupted(LatentpressError):
    """Raised for Ctrl-C."""

    exit_code = INTERRUPTED
