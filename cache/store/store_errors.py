"""What the libraries of object stores raise, in words: the reason, and the next step."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from cache.store.files import StoreError
from schemas.errors import LatentpressError

AGAIN = "run the same command again: what is finished is kept"
_RIGHTS = (
    "give credentials in the environment (for S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; for "
    "Google: GOOGLE_APPLICATION_CREDENTIALS, or gcloud auth application-default login; for the Hub: HF_TOKEN) that "
    f"may list, read, write and delete there, and {AGAIN}"
)
#: Codes of S3, or HTTP's of Google and the Hub -> reason and next step.
_EXPIRED = ("the credentials have expired", f"renew them (for S3: AWS_SESSION_TOKEN or the login) and {AGAIN}")
_THROTTLED = (
    "the store is asked too often, also after retries with longer and longer pauses",
    f"use fewer workers, or raise AWS_MAX_ATTEMPTS, and {AGAIN}",
)
NO_BUCKET = ("there is no such bucket", "make the bucket, or correct the URL")
_EXPLANATIONS = {
    **dict.fromkeys(("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"), _EXPIRED),
    **dict.fromkeys(("SlowDown", "ServiceUnavailable", "RequestLimitExceeded", "503", "429"), _THROTTLED),
    "401": ("the credentials are missing or have expired", _RIGHTS),
    "403": ("access is denied", _RIGHTS),
    **dict.fromkeys(("404", "NoSuchBucket"), NO_BUCKET),
    # An answer to HEAD has no body, so its reason is not known.
    "400": ("the request is refused, as with credentials that have expired", _EXPIRED[1]),
}


@contextmanager
def explained_object(url: str) -> Iterator[None]:
    """Turn what a store's library raises into a StoreError about `url`. A missing object stays FileNotFoundError. Each
    library has exceptions of its own, which can't be imported here: hence all of `Exception`."""
    try:
        yield
    except (LatentpressError, MemoryError, AssertionError):
        raise
    except Exception as error:
        _raise_explained(url, error)


def _raise_explained(url: str, error: Exception) -> NoReturn:
    cause: Any = error if hasattr(error, "response") else error.__cause__
    answer = getattr(cause, "response", None)
    code = str(answer.get("Error", {}).get("Code", "")) if isinstance(answer, Mapping) else error_code(error)
    if isinstance(error, FileNotFoundError) and code != "NoSuchBucket":
        raise error
    text = str(error).replace("\n", " ")
    said = text or type(error).__name__
    if code and not re.search(rf"\b{re.escape(code)}\b", said):  # as a word: a port, too, may have the digits 403
        said = f"{code}: {text}"
    reason, step = _EXPLANATIONS.get(code, ("", ""))
    if reason:
        reason = f"{reason} ({said})"
    elif isinstance(error, PermissionError):
        reason, step = f"access is denied ({said})", _RIGHTS
    elif "credentials" in said.lower():
        reason, step = said, _RIGHTS
    elif type(error).__name__ in ("FileExpired", "FileReplaced"):
        reason, step = "another process replaced it while it was read", AGAIN
    else:
        reason = f"the store can't be reached or broke off ({said})"
        step = f"check the network and the URL, and {AGAIN}"
    raise StoreError(url, reason, step) from error


def error_code(error: BaseException) -> str:
    """The HTTP status of an error of gcsfs, huggingface_hub or hf_xet; "" of others."""
    if str(error).startswith("Forbidden"):
        return "403"
    if of_xet := re.search(r"HTTP status \w+ error \((\d{3})", str(error)):
        return of_xet[1]
    code = getattr(error, "code", None) or getattr(getattr(error, "response", None), "status_code", None)
    return str(code) if isinstance(code, int | str) else ""
