"""URLs: joined, shown without secrets, and as names of items."""

import pytest

from stages.discovery.sources.captions import public_path
from stages.discovery.sources.urls import join_url, scrub_secrets, strip_secrets


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/a@b/c.jpg", "s3://bucket/a@b/c.jpg"),
        ("ftp://me:pass@host:21/a.jpg", "ftp://host:21/a.jpg"),
        ("ftp://me:pa/ss@host/a.jpg", "ftp://host/a.jpg"),
        ("https://host/a.jpg?X-Amz-Signature=abc#t", "https://host/a.jpg"),
        ("https://host:8080/a@b.jpg", "https://host:8080/a@b.jpg"),
        ("zip://in.jpg::https://u:p@host/a.zip?sig=1", "zip://in.jpg::https://host/a.zip"),
        ("simplecache::s3://bucket/a#1.jpg", "simplecache::s3://bucket/a#1.jpg"),
    ],
)
def test_public_shows_no_secret(url: str, shown: str) -> None:
    assert strip_secrets(url) == shown
    assert strip_secrets(shown) == shown


def test_scrub_removes_what_libraries_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "session-token-of-somebody")
    url = "https://me:p%40ssword@host/a.jpg?X-Amz-Signature=0123456789abcdef&X-Amz-Date=today"
    said = (
        f"404 for url={url!r}, again {url}, /a.jpg?X-Amz-Signature=0123456789abcdef, password p@ssword, "
        "other https://you:secret@else/b?token=t, session-token-of-somebody, 0123456789abcdef"
    )
    text = scrub_secrets(said, url)
    for secret in ("p%40ssword", "p@ssword", "0123456789abcdef", "you:secret", "token=t", "session-token-of"):
        assert secret not in text
    assert "https://host/a.jpg" in text and "https://else/b" in text


def test_a_url_with_another_signature_is_the_same_item() -> None:
    url = "https://bucket.s3.amazonaws.com/a.jpg"
    one, other = (public_path(f"{url}?X-Amz-Date={day}&X-Amz-Signature={day * 9}&v=1") for day in "ab")
    assert one == other and one.startswith(f"{url}#") and one != public_path(f"{url}?v=2&X-Amz-Date=a")
    assert public_path(f"{url}?Signature=1&Expires=2") == public_path(f"{url}?Signature=3&Expires=4")
    assert public_path(f"{url}?sig=1&se=2&id=1") == public_path(f"{url}?sig=3&se=4&id=1")
    assert public_path(f"{url}?se=2") != public_path(f"{url}?se=4"), "what no signature goes with names the item"
    assert public_path("https://me:one@host/a.jpg") == public_path("https://me:other@host/a.jpg")
    assert public_path(url) == url


def test_join() -> None:
    assert join_url("s3://bucket/x/", "a b?.jpg") == "s3://bucket/x/a b?.jpg"
    assert join_url("https://h/x?sig=1", "a.jpg") == "https://h/x/a.jpg?sig=1"
    assert join_url("zip://x::s3://bucket/a.zip", "b/c.jpg") == "zip://x/b/c.jpg::s3://bucket/a.zip"
