"""Joining URLs, and showing them without secrets: user information, queries, and whatever libraries repeat of either in
their messages."""

import os
import re
from urllib.parse import unquote

_HOST_AND_PORT = re.compile(r"[^:@]*(:\d*)?")
_URL = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
_QUERY = re.compile(r"\?[^\s'\"<>?]*=[^\s'\"<>]*")
#: Query parameters that signing adds: S3 and Google Cloud by prefix, others by the parameter that holds the signature.
_SIGNATURE_PARAMETER = re.compile(r"x-(amz|goog)-.*", re.IGNORECASE)
_SIGNATURE_PARAMETERS = {
    "signature": {"signature", "expires", "policy", "key-pair-id", "awsaccesskeyid", "googleaccessid"},
    "sig": {"sig", "se", "st", "sp", "sr", "sv", "spr", "sip", "ske", "skt", "sks", "skv", "skoid", "sktid"},
}
_SECRET_NAME = re.compile(r"SECRET|TOKEN|PASSW|ACCESS_KEY|API_KEY|ACCOUNT_KEY|CREDENTIAL", re.IGNORECASE)


def strip_secrets(url: str) -> str:
    """`url` without user information, query and fragment, in each part of a chain."""
    if "::" in url:
        return "::".join(map(strip_secrets, url.split("::")))
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url
    host, slash, path = rest.partition("/")
    if "@" in host:
        rest = host.rpartition("@")[2] + slash + path
    elif "@" in path and not _HOST_AND_PORT.fullmatch(host):  # a password with a "/" that should have been escaped
        rest = path.rpartition("@")[2]
    rest = rest.partition("?")[0]
    return f"{scheme}://{rest.partition('#')[0] if scheme.startswith('http') else rest}"


def display_location(location: str) -> str:
    """A path as it is, a URL without its secrets."""
    return strip_secrets(location) if "://" in location else location


def strip_signature(url: str) -> str:
    """`url` without user information and signature: the same for the same object, however often it is signed."""
    head, mark, query = url.partition("?")
    parameters = [(part.partition("=")[0].lower(), part) for part in query.split("&")] if mark else []
    signing = set().union(*(_SIGNATURE_PARAMETERS.get(name, ()) for name, _ in parameters))
    rest = [part for name, part in parameters if name not in signing and not _SIGNATURE_PARAMETER.fullmatch(name)]
    return strip_secrets(head) + ("?" + "&".join(rest) if rest else "")


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
    """The URL of `name` below `url`. In a chain the first part is extended; a query stays at the end."""
    head, separator, rest = url.partition("::")
    query = ""
    if head.startswith(("http://", "https://")):
        head, mark, query = head.partition("?")
        query = mark + query
    return f"{head.rstrip('/')}/{name}{query}{separator}{rest}"
