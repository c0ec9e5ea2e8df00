"""Errors that the libraries of object stores raise, in words: the reason, and the next step."""

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn

from cache.store.files import StoreError
from schemas.errors import LatentpressError
from schemas.text_format import format_duration

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
#: How stores refuse a request for its time: S3 and MinIO, signatures of AWS, Google's login; and certificates.
_CLOCK = re.compile(
    r"RequestTimeTooSkewed|request time and the|Signature (expired|not yet current)|reasonable timeframe|not yet valid"
)
_CLOCK_STEP = f"set this machine's clock, as by NTP (timedatectl set-ntp true), and {AGAIN}"
_LARGEST_SKEW_S = 15 * 60  # that S3 takes; an answer to HEAD says no more than 403 and the store's time


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
    message = text or type(error).__name__
    if code and not re.search(rf"\b{re.escape(code)}\b", message):  # as a word: a port, too, may have the digits 403
        message = f"{code}: {text}"
    reason, step = _EXPLANATIONS.get(code, ("", ""))
    lead_s = _clock_lead(answer, message)
    if _CLOCK.search(message) or (code == "403" and abs(lead_s) > _LARGEST_SKEW_S):
        lead = f": {format_duration(abs(lead_s))} {'ahead of' if lead_s > 0 else 'behind'} the store's"
        reason, step = f"this machine's clock is wrong{lead if abs(lead_s) > 60 else ''} ({message})", _CLOCK_STEP
    elif reason:
        reason = f"{reason} ({message})"
    elif isinstance(error, PermissionError):
        reason, step = f"access is denied ({message})", _RIGHTS
    elif "credentials" in message.lower():
        reason, step = message, _RIGHTS
    elif type(error).__name__ in ("FileExpired", "FileReplaced"):
        reason, step = "another process replaced it while it was read", AGAIN
    else:
        reason = f"the store can't be reached or broke off ({message})"
        step = f"check the network and the URL, and {AGAIN}"
    raise StoreError(url, reason, step) from error


def _clock_lead(answer: Any, message: str) -> float:
    """Seconds that this machine's clock is ahead of the store's, by the times of the request and of the store in a
    refusal, or by the header Date of an answer of S3; 0 where there is neither."""
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}) if isinstance(answer, Mapping) else {}
    named = re.findall(r"\b\d{8}T\d{6}Z", message)
    with suppress(KeyError, TypeError, ValueError):
        if len(named) > 1:
            return (datetime.fromisoformat(named[0]) - datetime.fromisoformat(named[-1])).total_seconds()
        return time.time() - parsedate_to_datetime(headers["date"]).timestamp()
    return 0.0


def error_code(error: BaseException) -> str:
    """The HTTP status of an error of gcsfs, huggingface_hub or hf_xet; "" of others."""
    if str(error).startswith("Forbidden"):
        return "403"
    if of_xet := re.search(r"HTTP status \w+ error \((\d{3})", str(error)):
        return of_xet[1]
    code = getattr(error, "code", None) or getattr(getattr(error, "response", None), "status_code", None)
    return str(code) if isinstance(code, int | str) else ""
