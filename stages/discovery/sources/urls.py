"""URLs put together, and shown without what may be secret in them: user information, queries, and what libraries repeat
of either in their messages."""

import os
import re
from urllib.parse import unquote

_HOST_AND_PORT = re.compile(r"[^:@]*(:\d*)?")
_URL = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
_QUERY = re.compile(r"\?[^\s'\"<>?]*=[^\s'\"<>]*")
#: What a signature adds to a query: of S3 and Google Cloud by prefix, of others beside the parameter that signs.
_SIGNATURE_PARAMETER = re.compile(r"x-(amz|goog)-.*", re.IGNORECASE)
_SIGNATURE_PARAMETERS = {
    "signature": {"signature", "expires", "policy", "key-pair-id", "awsaccesskeyid", "googleaccessid"},
    "sig": {"sig", "se", "st", "sp", "sr", "sv", "spr", "sip", "ske", "skt", "sks", "skv", "skoid", "sktid"},
}
_SECRET_NAME = re.compile(r"SECRET|TOKEN|PASSW|ACCESS_KEY|API_KEY|ACCOUNT_KEY|CREDENTIAL", re.IGNORECASE)


def strip_secrets(url: str) -> str:
    """`url` without what may be secret: user information, query and fragment; each part of a chain by itself."""
    return "::".join(_strip_part(part) for part in url.split("::"))


def display_location(location: str) -> str:
    """A path as it is, a URL without the secrets that it may hold."""
    return strip_secrets(location) if "://" in location else location


def _strip_part(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url
    place, slash, path = rest.partition("/")
    if "@" in place:
        rest = place.rpartition("@")[2] + slash + path
    elif "@" in path and not _HOST_AND_PORT.fullmatch(place):  # a password with a "/" that should have been escaped
        rest = path.rpartition("@")[2]
    rest = rest.partition("?")[0]
    return f"{scheme}://{rest.partition('#')[0] if scheme.startswith('http') else rest}"


def strip_signature(url: str) -> str:
    """`url` without user information and without what signs it: the same for the same object, signed anew."""
    head, mark, query = url.partition("?")
    parts = query.split("&") if mark else []
    names = [part.partition("=")[0].lower() for part in parts]
    signing = set().union(*(_SIGNATURE_PARAMETERS[name] for name in names if name in _SIGNATURE_PARAMETERS))
    rest = [
        part
        for part, name in zip(parts, names, strict=True)
        if name not in signing and not _SIGNATURE_PARAMETER.fullmatch(name)
    ]
    return strip_secrets(head) + ("?" + "&".join(rest) if rest else "")


def scrub_secrets(text: str, url: str = "") -> str:
    """What a library said, without the secrets of `url`, of other URLs in it, and of the environment."""
    text = text.replace(url, strip_secrets(url)) if url else text
    text = _URL.sub(lambda found: strip_secrets(found.group()), text)
    for secret in sorted(_find_secrets(url), key=len, reverse=True):
        text = text.replace(secret, "***")
    return _QUERY.sub("", text)


def _find_secrets(url: str) -> set[str]:
    found = {value for name, value in os.environ.items() if _SECRET_NAME.search(name) and len(value) >= 8}
    for part in url.split("::"):
        place = part.partition("://")[2].partition("/")[0]
        password = place.rpartition("@")[0].partition(":")[2]
        query = part.partition("?")[2]
        found |= {password, unquote(password), query, unquote(query)}
        found |= {value for pair in query.split("&") if len(value := pair.partition("=")[2]) >= 16}
    return found - {""}


def join_url(url: str, name: str) -> str:
    """The URL of `name` below `url`; a chain is extended in its first part, a query stays behind."""
    head, separator, rest = url.partition("::")
    query = ""
    if head.startswith(("http://", "https://")):
        head, mark, query = head.partition("?")
        query = mark + query
    return f"{head.rstrip('/')}/{name}{query}{separator}{rest}"
