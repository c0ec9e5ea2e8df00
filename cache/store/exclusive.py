"""Files that are created only where none is there, so that of several processes one wins."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from cache.store import files, object_store
from cache.store.files import explained
from cache.store.store import Store
from cache.store.store_errors import explained_object

#: What file systems without hard links say.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
#: What a store without conditional puts says of one.
_NO_CONDITIONS = ("NotImplemented", "501", "not implemented", "Unsupported", "unexpected keyword")


def create_new(store: Store, rel: str, write: Callable[[BinaryIO], object]) -> bool:
    """Publish what `write` writes as `rel`, whole; False where that is there already, which is left as it is. By a hard
    link, or a put with If-None-Match. Where there is neither, what is there is looked at first, and of two processes at
    the same moment the later one wins: whoever must know reads the file again."""
    file = store.open_temp(rel)
    try:
        with explained(file.name), file:
            write(file)
        local = store.local(rel)
        if local is not None:
            with explained(store.path(rel)):
                return _link(Path(file.name), local)
        with explained_object(store.path(rel)):
            return _put(store.fs, file.name, store.key(rel), lambda: store.exists(rel))
    finally:
        store.discard_temp(file)


def _link(temp: Path, path: Path) -> bool:
    files.sync(temp)
    try:
        os.link(temp, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if path.exists():
            return False
        files.replace(str(temp), str(path))
    files.sync(path.parent)
    return True


def _put(fs: Any, source: str, path: str, exists: Callable[[], bool]) -> bool:
    if object_store.is_hub(fs):
        return _put_unconditionally(fs, source, path, exists)
    try:
        fs.put_file(source, path, mode="create")
    except FileExistsError:
        return False
    except Exception as error:  # each library has its own
        if not any(words in f"{type(error).__name__} {error}" for words in _NO_CONDITIONS):
            raise
        return _put_unconditionally(fs, source, path, exists)
    return True


def _put_unconditionally(fs: Any, source: str, path: str, exists: Callable[[], bool]) -> bool:
    if exists():
        return False
    object_store.put_object(fs, Path(source), path)
    return True
