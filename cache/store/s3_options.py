"""How s3fs and botocore reach S3: timeouts, retries, and credentials of the environment."""

import os
from datetime import datetime
from functools import lru_cache
from typing import Any

from cache.store.retry_notes import S3, note_s3_answer, watch_log

#: Tries of one request, unless AWS_MAX_ATTEMPTS says otherwise.
ATTEMPTS = 5


def s3_options(connect_timeout_s: float, read_timeout_s: float) -> dict[str, Any]:
    """Options of s3fs' file system. ImportError where it is not installed."""
    retries = {
        "mode": os.environ.get("AWS_RETRY_MODE", "standard"),
        "total_max_attempts": int(os.environ.get("AWS_MAX_ATTEMPTS", ATTEMPTS)),
    }
    limits = {"connect_timeout": connect_timeout_s, "read_timeout": read_timeout_s}
    watch_log("s3fs", "Retryable error: ", S3)  # of a body that is cut off
    settings = sorted((name, value) for name, value in os.environ.items() if name.startswith("AWS_"))
    # Listings change under other machines. One part at a time: a file takes one part of memory, and one request to
    # read, where s3fs otherwise asks for its size first.
    options = {"config_kwargs": limits | {"retries": retries}, "use_listings_cache": False, "max_concurrency": 1}
    return {**options, "session": _s3_session(os.getpid(), tuple(settings))}


@lru_cache
def _s3_session(process: int, environment: tuple[tuple[str, str], ...]) -> Any:
    """botocore's session of this process and environment. Times are read by Python itself: with botocore's default, a
    listing of 100,000 objects took three times as long."""
    from aiobotocore.session import AioSession
    from botocore.utils import parse_timestamp

    def parse_time(value: Any) -> datetime:
        try:
            return datetime.fromisoformat(value)
        except (TypeError, ValueError):  # in headers, as HTTP has them
            return parse_timestamp(value)

    session = AioSession()
    session.register("needs-retry.s3", note_s3_answer)
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=parse_time)
    return session
