"""URLs: open them with fsspec, join them, and remove their secrets (user information and queries) from URLs and from
messages of libraries."""

import os
import re
from typing import Any
from urllib.parse import unquote

import fsspec

from schemas.errors import LatentpressError

_HOST_AND_PORT = re.compile(r"[^:@]*(:\d*)?")
_URL = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
_QUERY = re.compile(r"\?[^\s'\"<>?]*=[^\s'\"<>]*")
#: Query parameters of signatures: for S3 and Google Cloud by prefix, else by the parameter with the signature.
_SIGNATURE_PARAMETER = re.compile(r"x-(amz|goog)-.*", re.IGNORECASE)
_SIGNATURE_PARAMETERS = {
    "signature": {"signature", "expires", "policy", "key-pair-id", "awsaccesskeyid", "googleaccessid"},
    "sig": {"sig", "se", "st", "sp", "sr", "sv", "spr", "sip", "ske", "skt", "sks", "skv", "skoid", "sktid"},
}
_SECRET_NAME = re.compile(r"SECRET|TOKEN|PASSW|ACCESS_KEY|API_KEY|ACCOUNT_KEY|CREDENTIAL", re.IGNORECASE)
#: Limits for the time without a connection, and without data, of an HTTP request.
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10.0, 15.0


def strip_secrets(url: str) -> str:
    """`url` without user information, query and fragment, in each part of a chain."""
    if "::" in url:
        return "::".join(map(strip_secrets, url.split("::")))
    scheme, separator, address = url.partition("://")
    if not separator:
        return url
    host, slash, path = address.partition("/")
    if "@" in host:
        address = host.rpartition("@")[2] + slash + path
    elif "@" in path and not _HOST_AND_PORT.fullmatch(host):  # a password with a "/" that should have been escaped
        address = path.rpartition("@")[2]
    address = address.partition("?")[0]
    return f"{scheme}://{address.partition('#')[0] if scheme.startswith('http') else address}"


def display_location(location: str) -> str:
    """The text to show for a path or URL: a path is unchanged, a URL loses its secrets."""
    return strip_secrets(location) if "://" in location else location


def strip_signature(url: str) -> str:
    """`url` without user information and signature, so that signing a URL again does not change the result."""
    head, mark, query = url.partition("?")
    parameters = [(part.partition("=")[0].lower(), part) for part in query.split("&")] if mark else []
    signing = set().union(*(_SIGNATURE_PARAMETERS.get(name, ()) for name, _ in parameters))
    unsigned = [part for name, part in parameters if name not in signing and not _SIGNATURE_PARAMETER.fullmatch(name)]
    return strip_secrets(head) + ("?" + "&".join(unsigned) if unsigned else "")


def scrub_secrets(text: str, url: str = "") -> str:
    """A library's message without the secrets of `url`, of other URLs in it, and of the environment."""
    text = text.replace(url, strip_secrets(url)) if url else text
    text = _URL.sub(lambda match: strip_secrets(match.group()), text)
    secrets = {value for name, value in os.environ.items() if _SECRET_NAME.search(name) and len(value) >= 8}
    for part in url.split("::"):
        host = part.partition("://")[2].partition("/")[0]
        password = host.rpartition("@")[0].partition(":")[2]
        query = part.partition("?")[2]
        secrets |= {password, unquote(password), query, unquote(query)}
        secrets |= {value for pair in query.split("&") if len(value := pair.partition("=")[2]) >= 16}
    for secret in sorted(secrets - {""}, key=len, reverse=True):
        text = text.replace(secret, "***")
    return _QUERY.sub("", text)


def join_url(url: str, name: str) -> str:
    """The URL of `name` below `url`. In a chained URL ("::"), the first part is extended. A query stays at the end."""
    head, separator, chain = url.partition("::")
    query = ""
    if head.startswith(("http://", "https://")):
        head, mark, query = head.partition("?")
        query = mark + query
    return f"{head.rstrip('/')}/{name}{query}{separator}{chain}"


class UnknownLocation(LatentpressError):
    """Raised for a URL whose scheme fsspec does not support, or can't open without further arguments."""


def open_filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path within it. fsspec caches file systems for each process: after a
    fork, the child gets its own file system with its own event loop, so file systems are not stored.

    Raises UnknownLocation if fsspec can't open the URL, LatentpressError if the library for it is missing.
    """
    try:
        if url.partition("://")[0] in ("s3", "s3a", "gs", "gcs", "az"):
            from cache.store.buckets import open_buckets

            return open_buckets(url)
        options: dict[str, Any] = {}  # by scheme of the URL's parts
        for part in re.findall(r"(?:^|::)(https?)(?=://)", url):
            from aiohttp import ClientTimeout  # by default it limits a whole file to 5 minutes

            timeout = ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S)
            options[part] = {"client_kwargs": {"timeout": timeout}}
        return fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        extra = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http"}
        name = extra.get(url.partition("://")[0])
        step = f"pip install 'latentpress[{name}]'" if name else "install the library in this message"
        problem = f"a library is missing ({scrub_secrets(str(error), url)})"
    except (ValueError, TypeError, AttributeError, IsADirectoryError, FileNotFoundError) as error:  # needs arguments
        step = "choose a URL that fsspec opens without arguments, such as s3://bucket/folder, or a local folder"
        problem = f"{strip_secrets(url)}: can't be opened ({scrub_secrets(str(error), url)})"
        raise UnknownLocation(problem, step) from error
    except OSError as error:  # caused by the network or a system library, not by the URL
        step = "check the network and the requirements of the library for this URL, then run again"
        problem = f"can't be opened ({scrub_secrets(str(error), url)})"
    raise LatentpressError(f"{strip_secrets(url)}: {problem}", step)
