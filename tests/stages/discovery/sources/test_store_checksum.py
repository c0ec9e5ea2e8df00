"""Which of the things that a store says of an object is its checksum."""

import hashlib

import pytest

from stages.discovery.sources.store_checksum import best_checksum

MD5 = hashlib.md5(b"x").hexdigest()


@pytest.mark.parametrize(
    ("info", "s3", "kind", "md5", "sure", "local"),
    [
        ({"ETag": f'"{MD5}"'}, True, "etag", MD5, False, False),
        ({"ETag": f'"{MD5}-3"'}, True, "etag", None, False, False),
        ({"ETag": f'"{MD5}"'}, False, "etag", None, False, True),
        ({"md5Hash": "nd3i5Zz0wqM3yBdNvA0oFA==", "etag": "CJ"}, False, "md5", "9ddde2e59cf4c2a337c8174dbc0d2814", 1, 0),
        ({"content_settings": {"content_md5": bytes.fromhex(MD5)}, "etag": "0x8D"}, False, "md5", MD5, True, False),
        ({"generation": "17"}, False, "generation", None, False, True),
    ],
)
def test_checksum(info: dict, s3: bool, kind: str, md5: str | None, sure: bool, local: bool) -> None:
    found = best_checksum(info, s3)
    assert found is not None
    assert (found.kind, found.md5, found.is_certain, found.scoped_to_url) == (kind, md5, sure, local)


@pytest.mark.parametrize("info", [{}, {"size": 3}, {"ETag": 'W/"abc"'}, {"ETag": ""}])
def test_what_vouches_for_nothing(info: dict) -> None:
    assert best_checksum(info, True) is None
