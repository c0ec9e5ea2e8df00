"""Errors of object stores in words: the reason, and the next step."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

from cache.store.files import StoreError
from schemas.errors import LatentpressError
from schemas.text_format import format_duration, shorten

AGAIN = "run the same command again: what is finished is kept"
_RIGHTS = (
    "give credentials in the environment (for S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; for "
    "Google: GOOGLE_APPLICATION_CREDENTIALS, or gcloud auth application-default login) that may list, read, write and "
    f"delete there, and {AGAIN}"
)
_EXPIRED = ("the credentials have expired", f"renew them (for S3: AWS_SESSION_TOKEN or the login) and {AGAIN}")
_THROTTLED = (
    "the store is asked too often, also after retries with longer and longer pauses",
    f"use fewer workers, or raise AWS_MAX_ATTEMPTS, and {AGAIN}",
)
NO_BUCKET = ("there is no such bucket", "make the bucket, or correct the URL")
#: Code of a store, or status of HTTP -> reason and next step.
_EXPLANATIONS = {
    **dict.fromkeys(("ExpiredToken", "TokenRefreshRequired", "RequestExpired"), _EXPIRED),
    **dict.fromkeys(("SlowDown", "ServiceUnavailable", "503", "429"), _THROTTLED),
    "NoSuchBucket": NO_BUCKET,
    "301": ("the bucket is in another region", "set AWS_DEFAULT_REGION to the bucket's region"),
    "401": ("the credentials are missing or have expired", _RIGHTS),
    "403": ("access is denied", _RIGHTS),
    # An answer to HEAD has no body, so its reason is not known.
    "400": ("the request is refused, as with credentials that have expired", _EXPIRED[1]),
}
#: How stores refuse a request for its time: S3 and MinIO, signatures of AWS, Google's login; and certificates.
_CLOCK = re.compile(
    r"RequestTimeTooSkewed|request time and the|Signature (expired|not yet current)|reasonable timeframe|not yet valid"
)
#: What obstore asks last for credentials: the service of a cloud that tells its machines their own.
_NO_CREDENTIALS = re.compile(r"/latest/(api/token|meta-data)|computeMetadata|token request")
_TIME = re.compile(r"\b(\d{8}T\d{6}Z|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)")
_STATUS, _CODE = re.compile(r"status code: (\d{3})"), re.compile(r"<Code>(\w+)</Code>")
_LONGEST = 300  # characters of a store's own words


@contextmanager
def explained_object(url: str) -> Iterator[None]:
    """Turn what obstore raises into a StoreError about `url`. A missing object stays FileNotFoundError."""
    try:
        yield
    except (LatentpressError, MemoryError, AssertionError):
        raise
    except FileNotFoundError as error:
        if error_code(error) == "NoSuchBucket":
            raise StoreError(url, *explain(error)) from error
        if error.errno:
            raise
        raise FileNotFoundError(errno.ENOENT, "there is no such object", url) from error
    except Exception as error:  # obstore's own can't be imported here
        raise StoreError(url, *explain(error)) from error


def error_code(error: BaseException) -> str:
    """The store's code for an error, or the status of HTTP; "" if there is neither."""
    found = _CODE.search(str(error)) or _STATUS.search(str(error))
    return found[1] if found else ""


def explain(error: Exception) -> tuple[str, str]:
    """The reason of an error of obstore in words, and the next step."""
    code = error_code(error)
    text = str(error).partition("Debug source:")[0].rpartition(" - Server returned non-2xx status code: ")[2]
    message = shorten(" ".join(re.sub(r"<[^>]*>", " ", text).split()), _LONGEST)
    message = message or type(error).__name__
    status = _STATUS.search(str(error))
    reason, step = _EXPLANATIONS.get(code) or _EXPLANATIONS.get(status[1] if status else "", ("", ""))
    if _CLOCK.search(str(error)):
        reason = f"this machine's clock is wrong{_clock_lead(str(error))} ({message})"
        step = f"set this machine's clock, as by NTP (timedatectl set-ntp true), and {AGAIN}"
    elif _NO_CREDENTIALS.search(str(error)):
        reason, step = f"there are no credentials ({message})", _RIGHTS
    elif reason:
        reason = f"{reason} ({message})"
    elif isinstance(error, OSError) and error.errno == errno.ESTALE:
        reason, step = "another process replaced it while it was read", AGAIN
    else:
        reason = f"the store can't be reached or broke off ({message})"
        step = f"check the network and the URL, and {AGAIN}"
    return reason, step


def _clock_lead(message: str) -> str:
    """How far this machine's clock is off, by the times of the request and of the store in a refusal."""
    times = [datetime.fromisoformat(time) for time in _TIME.findall(message)]
    lead_s = (times[0] - times[-1]).total_seconds() if times else 0.0
    if abs(lead_s) < 60:
        return ""
    return f": {format_duration(abs(lead_s))} {'ahead of' if lead_s > 0 else 'behind'} the store's"
