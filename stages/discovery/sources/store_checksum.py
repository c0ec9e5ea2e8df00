"""The checksums that a store gives of an object's content, in the words of each fsspec file system."""

import base64
import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StoreChecksum:
    """A statement of a store about an object's content. md5: 32 hex digits if that is, or may be, the content's MD5;
    is_certain: whether it is. scoped_to_url: identifies the content only together with the URL."""

    kind: str
    value: str
    md5: str | None = None
    is_certain: bool = False
    scoped_to_url: bool = False


def best_checksum(info: dict[str, Any], s3: bool) -> StoreChecksum | None:
    """The best checksum in fsspec's `info`, None if it has none. A weak ETag ("W/...") is no checksum.

    An S3 ETag changes with the content: it is computed from it, or random where the object is encrypted with KMS. It is
    the content's MD5 if the object was uploaded in one piece and is not encrypted with a key of KMS or the client's
    (https://docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html). The tag does not tell, so it is not certain.
    """
    settings = info.get("content_settings") or {}
    for key in ("md5", "md5Hash", "content_md5", "Content-MD5"):
        if digest := _md5_hex(info.get(key) or (settings.get(key) if isinstance(settings, dict) else None)):
            return StoreChecksum("md5", digest, digest, is_certain=True)
    if sha := info.get("sha256"):
        return StoreChecksum("sha256", str(sha))
    tag = str(info.get("ETag") or info.get("etag") or info.get("e_tag") or "")
    if tag and not tag.startswith("W/"):
        tag = tag.strip('"')
        md5 = tag if s3 and re.fullmatch(r"[0-9a-f]{32}", tag) else None
        return StoreChecksum("etag", tag, md5, scoped_to_url=not s3)
    for key in ("generation", "checksum", "crc32c"):
        if info.get(key):
            return StoreChecksum(key, str(info[key]), scoped_to_url=True)
    return None


def _md5_hex(value: Any) -> str | None:
    """32 hex digits from an MD5 in hex, base64 or 16 bytes."""
    if isinstance(value, (bytes, bytearray)) and len(value) == 16:
        return bytes(value).hex()
    text = str(value or "")
    if re.fullmatch(r"[0-9a-fA-F]{32}", text):
        return text.lower()
    return base64.b64decode(text).hex() if re.fullmatch(r"[A-Za-z0-9+/]{22}==", text) else None
