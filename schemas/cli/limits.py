"""Limits of the system (`ulimit`) that are too low for a program: explained, where libraries end in a traceback."""

import errno
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from schemas.errors import LatentpressError

LEAST_FILES = 64  # without which processes can't be started; a stage with many shards opens more
USUAL_FILES = 4096
#: Programs that import torch, and what that takes of addresses, with little more than half of which threads of its
#: libraries abort or hang.
TORCH_PROGRAMS = (
    *("caption", "features", "masks", "encode-text", "encode-latents", "encode-vision", "decode", "score", "train"),
)
TORCH_BYTES = 7 << 29
MEMORY_ADVICE = (
    "raise the limit where you start it (ulimit -v, or that of the job): torch alone needs 4 GiB of addresses, and a "
    "model comes on top"
)
_MEMORY = re.compile(r"memory|allocat|map segment|start new thread", re.IGNORECASE)


@contextmanager
def limits_explained(program: str, dry_run: bool) -> Iterator[None]:
    """LatentpressError where a limit is too low for the program, before the body or for an error in it."""
    _raise_open_files()
    addresses = resource.getrlimit(resource.RLIMIT_AS)[0]
    if program in TORCH_PROGRAMS and not dry_run and addresses != resource.RLIM_INFINITY and addresses < TORCH_BYTES:
        raise LatentpressError(f"this process is limited to {addresses / 2**30:.1f} GiB of memory", MEMORY_ADVICE)
    try:
        yield
    except LatentpressError:
        raise
    except Exception as error:
        if (limit := explain_limit(error)) is None:
            raise
        raise limit from error


def _raise_open_files() -> None:
    """Raise this process' limit of open files to USUAL_FILES, as far as the system lets it. LatentpressError where it
    stays below LEAST_FILES."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= USUAL_FILES:
        return
    soft = USUAL_FILES if hard == resource.RLIM_INFINITY else min(USUAL_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < LEAST_FILES:
        raise LatentpressError(
            f"this process may open {soft} files, and at least {LEAST_FILES} are needed",
            f"raise the limit where you start it: ulimit -n {USUAL_FILES}",
        )


def explain_limit(error: Exception) -> LatentpressError | None:
    """Advice about an error that a limit of open files or of memory explains; None for any other."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        step = f"raise the limit where you start it (ulimit -n), above {limit}"
        return LatentpressError(f"too many open files: this process may open {limit}", step)
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    limits = [limit for limit in limits if limit != resource.RLIM_INFINITY]
    if limits and (isinstance(error, MemoryError | SystemError) or _MEMORY.search(str(error))):
        return LatentpressError(
            f"memory ran out: this process is limited to {min(limits) / 2**30:.1f} GiB ({error})",
            MEMORY_ADVICE,
        )
    return None
