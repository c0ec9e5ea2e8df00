"""Pictures, clips and captions that a browser sends, one file in a request, into the folder of a new project.

The page only stores their bytes: programs that read them later decode them in a sandbox. The server closes a request
that takes too long.
"""

import os
import re
import secrets
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request

from cache.store.files import explained, make_folders
from stages.media.files import IMAGE_EXTENSIONS, VIDEO_EXTENSIONS
from stages.pages.ui.child_programs import Refused

ENDINGS = (*IMAGE_EXTENSIONS, *VIDEO_EXTENSIONS, ".txt")
MAX_FILES, MAX_FILE_BYTES, MAX_BYTES = 1000, 200 << 20, 20 << 30  # files, bytes of a file, bytes of the folder
_NAME = re.compile(r"[^./\\\0][^/\\\0]{0,199}")


async def receive_file(request: Request, folder: Path, name: str) -> None:
    """Store the body of a request as a new file. Raises Refused if the name is not valid, the file exists already, or
    a limit is reached."""
    if not _NAME.fullmatch(name) or not name.isprintable() or not name.lower().endswith(ENDINGS):
        raise Refused(f"{name!a} is not the name of a picture, a clip or a caption", f"valid: {', '.join(ENDINGS)}")
    with explained(str(folder)):
        await run_in_threadpool(make_folders, folder)
        sizes = [entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder)]
        left = min(MAX_FILE_BYTES, MAX_BYTES - sum(sizes))
        if len(sizes) >= MAX_FILES:
            raise Refused(f"{folder} has {len(sizes)} files already", "copy more files into the folder yourself")
        temporary = folder / f".{secrets.token_hex(8)}"
        try:
            with temporary.open("xb") as file:
                async for piece in request.stream():
                    left -= len(piece)
                    if left < 0:
                        raise Refused(f"{name} is too large", "copy it into the folder yourself")
                    file.write(piece)
            os.link(temporary, folder / name)  # unlike a renaming, this does not replace a file
        except FileExistsError as error:
            raise Refused(f"{name} exists already in {folder}", "rename one of the two files") from error
        except ClientDisconnect as error:
            raise Refused(f"{name} was not received completely", "send it again") from error
        finally:
            temporary.unlink(missing_ok=True)
