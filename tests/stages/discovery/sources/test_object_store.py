"""Objects behind fsspec URLs: an S3 server and an HTTP server on loopback, and memory://."""

import hashlib
import io
import pickle
import sys

import obstore
import pytest

from cache.store.buckets import Buckets
from cache.store.store import Store
from schemas.errors import LatentpressError
from stages.discovery.sources.object_store import READ_AHEAD_BYTES, RemoteFile, best_checksum
from stages.media import files
from stages.media.files import MediaError
from tests.stages.discovery.tars import picture, read
from tests.stages.media_files import reason, refusal

SECRET = "wJalrXUtnFEMI-not-a-real-key"


def test_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cache.store.buckets", None)
    with pytest.raises(LatentpressError) as caught:
        RemoteFile("gs://bucket/a.jpg").size()
    assert caught.value.next_step == "pip install 'latentpress[gcs]'"


# -- S3 -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_s3_is_read_in_ranges_and_survives_pickling(media) -> None:
    data = bytes(range(256)) * 4096 * 5  # 5 MiB
    media.put("a.bin", data, bucket="media")
    blob = pickle.loads(pickle.dumps(RemoteFile("s3://media/a.bin")))
    assert blob.size() == len(data)
    with blob.open() as file:
        file.seek(-10, io.SEEK_END)
        assert file.read() == data[-10:]
        file.seek(1000)
        assert file.read(5) == data[1000:1005]
    assert files.hash_file(blob) == files.hash_file(RemoteFile("s3://media/a.bin"))
    assert str(blob.name) == "s3://media/a.bin"


@pytest.mark.slow
def test_a_check_asks_the_store_again(media) -> None:
    media.put("a.jpg", b"one", bucket="media")
    blob = RemoteFile("s3://media/a.jpg", identity="store")
    planned_id = files.compute_media_id(blob)
    files.require_unchanged(blob, planned_id)
    media.put("a.jpg", b"two", bucket="media")
    assert reason(lambda blob: files.require_unchanged(blob, planned_id), blob) == "changed"
    Store("s3://media").remove("a.jpg")
    assert reason(lambda blob: files.require_unchanged(blob, planned_id), blob) == "missing"


@pytest.mark.slow
def test_an_object_put_in_parts_has_an_identity_too(media) -> None:
    data = bytes(6 << 20)
    with obstore.open_writer(Store("s3://media").place.writer, "big.bin", buffer_size=5 << 20) as file:
        file.write(data)
    blob = RemoteFile("s3://media/big.bin", identity="store")
    assert "-" in blob.info()["e_tag"]
    files.require_unchanged(blob, files.compute_media_id(blob))


class Stated(RemoteFile):
    """An object with an ETag that does not match the bytes read, because of KMS or damage on the way."""

    def __init__(self, url: str, contents: list[bytes], stated: dict) -> None:
        super().__init__(url, identity="store")
        self.contents, self.stated = contents, stated

    def info(self) -> dict:
        return {"size": 3, **self.stated}

    def open(self):
        return io.BytesIO(self.contents.pop(0))


def test_an_etag_that_is_no_md5_is_not_taken_for_damage() -> None:
    stated = {"ETag": '"9dd4e461268c8034f5c8564e155c67a6"'}  # the MD5 of b"x"
    Stated("s3://b/x", [b"x"], stated).verify()
    Stated("s3://b/kms", [b"one", b"one"], stated).verify()
    with pytest.raises(MediaError, match="checksum"):
        Stated("s3://b/damaged", [b"one", b"two"], stated).verify()
    with pytest.raises(MediaError, match="checksum"):
        Stated("gs://b/damaged", [b"one"], {"md5Hash": "nd3i5Zz0wqM3yBdNvA0oFA=="}).verify()


@pytest.mark.slow
def test_s3_that_refuses_or_is_not_there(media, monkeypatch: pytest.MonkeyPatch) -> None:
    for action in (RemoteFile.size, RemoteFile.open):
        assert reason(action, RemoteFile("s3://media/none.jpg")) == "missing"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    Buckets.clear_instance_cache()
    error = refusal(RemoteFile.open, RemoteFile("s3://media/a.jpg"))
    assert error.reason == "unreadable" and SECRET not in str(error)


# -- HTTP and memory ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_http_with_ranges(http) -> None:
    place, handler = http
    handler.content = bytes(range(256)) * 4 * 4096  # 4 MiB
    blob = RemoteFile(f"http://{place}/a.bin?X-Amz-Signature=0123456789abcdef")
    assert blob.name == f"http://{place}/a.bin"
    with blob.open() as file:
        file.seek(-3, io.SEEK_END)
        assert file.read() == handler.content[-3:]
    assert handler.served < 2 * READ_AHEAD_BYTES
    assert read(blob) == handler.content


@pytest.mark.slow
@pytest.mark.parametrize("length", [True, False])
def test_http_without_ranges_is_read_once(http, length: bool) -> None:
    place, handler = http
    handler.content, handler.ranges, handler.length = bytes(range(256)) * 4 * 3000, False, length
    blob = RemoteFile(f"http://{place}/a.bin")
    assert blob.size() == len(handler.content)
    with blob.open() as file:
        file.seek(2_000_000)
        assert file.read(10) == handler.content[2_000_000:2_000_010]
        file.seek(0)
        assert file.read() == handler.content


@pytest.mark.slow
def test_credentials_stay_out_of_http_errors(http) -> None:
    place, handler = http
    handler.content, handler.authorization = b"abc", "Basic bWU6c2VjcmV0d29yZA=="  # me:secretword
    assert read(RemoteFile(f"http://me:secretword@{place}/a.jpg")) == b"abc"
    for url in (f"http://me:wrongword@{place}/a.jpg", f"http://{place}/a.jpg?X-Amz-Signature=wrongword"):
        with pytest.raises(MediaError) as caught:
            RemoteFile(url).open()
        assert (caught.value.reason, "access is denied" in str(caught.value)) == ("unreadable", True)
        assert "wrongword" not in f"{caught.value!r} {caught.value} {RemoteFile(url)!r}"


def test_a_server_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    with pytest.raises(MediaError) as caught:
        RemoteFile("http://me:secretword@127.0.0.1:9/a.jpg?sig=signedsignedsigned").open()
    assert caught.value.reason == "unreadable"
    assert "secretword" not in str(caught.value) and "signedsigned" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_memory_has_no_checksum(memory) -> None:
    memory.pipe_file("/media/a.png", picture(0))
    blob = RemoteFile("memory://media/a.png", identity="store")
    assert read(blob) == picture(0)
    error = refusal(RemoteFile.media_id, blob)
    assert error.reason == "no-checksum" and "identity: content" in error.advice
    content = RemoteFile("memory://media/a.png")
    files.require_unchanged(content, files.compute_media_id(content))


# -- checksums -------------------------------------------------------------------------------------------------------

MD5 = hashlib.md5(b"x").hexdigest()


@pytest.mark.parametrize(
    ("info", "s3", "kind", "md5", "local"),
    [
        ({"e_tag": f'"{MD5}"'}, True, "etag", MD5, False),
        ({"ETag": f'"{MD5}-3"'}, True, "etag", None, False),
        ({"ETag": f'"{MD5}"'}, False, "etag", None, True),
        (
            {"md5Hash": "nd3i5Zz0wqM3yBdNvA0oFA==", "etag": "CJ"},
            False,
            "md5",
            "9ddde2e59cf4c2a337c8174dbc0d2814",
            False,
        ),
        ({"content_settings": {"content_md5": bytes.fromhex(MD5)}, "etag": "0x8D"}, False, "md5", MD5, False),
        ({"generation": "17"}, False, "generation", None, True),
    ],
)
def test_checksum(info: dict, s3: bool, kind: str, md5: str | None, local: bool) -> None:
    assert best_checksum({"size": 3, "ETag": 'W/"abc"'}, s3) is None
    checksum = best_checksum(info, s3)
    assert checksum is not None
    assert (checksum.kind, checksum.md5, checksum.scoped_to_url) == (kind, md5, local)
