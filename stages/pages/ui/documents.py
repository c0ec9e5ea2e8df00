"""The pages that programs made (report, plan, preview), as files: the only files that are served.

They show names and captions of strangers, and a report has a script. So a document is shown in a sandbox: a browser
gives it an origin of its own, from which nothing of this site can be read or changed, and its policy allows no request.
As it then has no cookie either, what it embeds is found by a key in the address, which opens documents and nothing
else.
"""

import hmac
from pathlib import Path
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from stages.pages.ui.app import get, site_of
from stages.pages.ui.guard import DOCUMENTS
from stages.pages.ui.site import Site

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".webp": "image/webp",
    ".gif": "image/gif",
    ".mp4": "video/mp4",
    ".webm": "video/webm",
}
POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src 'self' data: blob:; media-src 'self' data: blob:; connect-src 'none'; frame-src 'none'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'self'"
)


def document_url(site: Site, path: Path) -> str:
    return f"{DOCUMENTS}{site.document_key}/{quote(path.relative_to(site.output).as_posix())}"


def find_document(output: Path, name: str) -> Path | None:
    """The file under `output`, unless it is none, is hidden, of another type, or leads out by `..` or a link."""
    try:
        folder = output.resolve(strict=True)
        path = (folder / name).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        return None
    if not path.is_relative_to(folder) or not path.is_file() or path.suffix.lower() not in TYPES:
        return None
    return None if any(part.startswith(".") for part in path.relative_to(folder).parts) else path


def serve(request: Request) -> Response:
    site = site_of(request)
    key = request.path_params["key"].encode("utf-8", "replace")
    path = find_document(site.output, request.path_params["name"])
    if path is None or not hmac.compare_digest(key, site.document_key.encode()):
        raise HTTPException(404, "there is no such document")
    headers = {"content-security-policy": POLICY, "cross-origin-resource-policy": "cross-origin"}
    return FileResponse(path, media_type=TYPES[path.suffix.lower()], headers=headers)


def version(path: Path) -> str:
    """Changes when a document is made again; "" where there is none."""
    try:
        about = path.stat()
    except OSError:
        return ""
    return f"{about.st_mtime_ns:x}-{about.st_size:x}"


ROUTES = (get(DOCUMENTS + "{key}/{name:path}", serve),)
