"""A prefix as a source: S3 and HTTP servers on loopback, and memory://."""

import hashlib
import io
import pickle
import socket
import tarfile
from pathlib import Path

import pyarrow as pa
import pytest

from cache.store.buckets import Buckets
from schemas.config.datasets import Dataset
from schemas.errors import LatentpressError
from stages.discovery.sources.base import open_source
from stages.discovery.sources.object_store import RemoteFile
from stages.media import files
from stages.media.files import MediaError
from tests.stages.discovery.tars import read, scan

SECRET = "wJalrXUtnFEMI-not-a-real-key"


def dataset(place: str, **options) -> Dataset:
    return Dataset(id="set", instance_data_dir=place, **options)


NAMES = ("a b.png", "a b.txt", "a?#1.JPG", "sub/deep/c.png", "sub/deep/c.txt", ".hidden.png", ".git/x.png", "x.md")


@pytest.mark.slow
def test_a_prefix_in_s3(media) -> None:
    for name in NAMES:
        media.put(f"set/{name}", name.encode(), bucket="media")
    media.put("set/empty/", bucket="media")  # consoles create this object for a folder
    source = pickle.loads(pickle.dumps(open_source(dataset("s3://media/set/"))))
    rows = scan(source)
    assert [row["path"] for row in rows] == ["a b.png", "a?#1.JPG", "sub/deep/c.png"]
    assert [row["captions_at"] for row in rows] == ["a b.txt", None, "sub/deep/c.txt"]
    assert [(row["problem"] or "").partition(":")[0] for row in rows] == ["", "no-caption", ""]
    digest = hashlib.md5(b"a b.png").hexdigest()
    assert (rows[0]["size"], rows[0]["version"]) == (7, f'7:"{digest}"')
    assert rows[0]["captions_version"] == f'7:"{hashlib.md5(b"a b.txt").hexdigest()}"'
    assert source.ignored == {".md": 1}
    assert source.read_captions("sub/deep/c.txt") == ["sub/deep/c.txt"]
    for row in rows:
        assert read(source.open(row["path"])) == row["path"].encode()
    assert str(source.open("a?#1.JPG").name) == "s3://media/set/a?#1.JPG"
    media.put("set/a b.txt", b"corrected", bucket="media")
    second_scan = scan(source)
    assert second_scan[0]["captions_version"] != rows[0]["captions_version"]
    assert [row["version"] for row in second_scan] == [row["version"] for row in rows]


@pytest.mark.slow
def test_tars_in_s3(media, tmp_path: Path) -> None:
    """Members are read in ranges of their tar, and named by the store's word for it."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, content in (("0.jpg", b"j" * 3_000_000), ("0.txt", b"x"), ("1.jpg", b"k"), ("1.txt", b"y")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    media.put("wds/00000.tar", data.getvalue(), bucket="media")
    place = dataset("s3://media/wds/{00000..00000}.tar", source="webdataset", identity="store")
    source = open_source(place)
    rows = scan(source)
    assert [(row["path"], row["captions"]) for row in rows] == [
        ("00000.tar/0.jpg", ["x"]),
        ("00000.tar/1.jpg", ["y"]),
    ]
    assert rows[0]["version"] == f'{len(data.getvalue())}:"{hashlib.md5(data.getvalue()).hexdigest()}"'
    first, second = (pickle.loads(pickle.dumps(source.open(row["path"]))) for row in rows)
    assert read(second) == b"k" and files.media_size(first) == 3_000_000
    assert files.compute_media_id(first) != files.compute_media_id(second)
    files.require_unchanged(second, files.compute_media_id(second))
    media.put("wds/00000.tar", data.getvalue() + bytes(512), bucket="media")
    with pytest.raises(MediaError, match="differs from the discovered file"):
        files.require_unchanged(second, second.media_id() and files.compute_media_id(first))
    media = pa.concat_tables(source.scan(None)).sort_by("path")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stages.discovery.sources.webdataset.open_media", lambda path: pytest.fail(f"{path} was opened"))
        assert scan(open_source(place), media) == media.to_pylist()


@pytest.mark.slow
def test_a_prefix_that_is_not_there(media) -> None:
    for place in ("s3://media/none", "s3://no-such-bucket/x"):
        with pytest.raises(LatentpressError, match="does not exist") as caught:
            scan(open_source(dataset(place)))
        assert SECRET not in str(caught.value)


def test_media_root_takes_the_place_of_the_url(memory) -> None:
    memory.pipe_file("/here/a.png", b"x")
    source = open_source(dataset("s3://elsewhere/set", media_root="memory://here", source="remote"))
    assert [row["path"] for row in scan(source)] == ["a.png"]
    assert read(source.open("a.png")) == b"x"


def test_other_captions_and_companions(memory, tmp_path: Path) -> None:
    for name in ("m/red_cat.png", "m/blue-dog.mp4", "m/red_cat.txt", "sources/red_cat.jpg"):
        memory.pipe_file(f"/{name}", name.encode())
    options = {"dataset_type": "video", "conditioning_data": "memory://sources"}
    source = open_source(dataset("memory://m", caption_strategy="filename", **options))
    rows = scan(source)
    assert [(row["kind"], row["captions"]) for row in rows] == [("video", ["blue dog"]), ("image", ["red cat"])]
    assert [row["source"] for row in rows] == [None, "red_cat.jpg"] and rows[0]["problem"].startswith("no-source")
    assert read(source.open_companion("source", "red_cat.jpg")) == b"sources/red_cat.jpg"
    assert source.ignored == {".txt": 1}
    (tmp_path / "t.csv").write_text("path,caption,score\nred_cat.png,a cat,3\nmemory://m/blue-dog.mp4,a dog,4\n")
    table = {"caption_strategy": "csv", "caption_file": str(tmp_path / "t.csv")}
    rows = scan(open_source(dataset("memory://m", dataset_type="video", **table)))
    assert [(row["captions"], row["extra.score"]) for row in rows] == [(["a dog"], 4), (["a cat"], 3)]
    rows = scan(open_source(dataset("memory://m", caption_strategy="instanceprompt", instance_prompt="a pet")))
    assert [row["captions"] for row in rows] == [["a pet"]]


@pytest.mark.slow
def test_a_page_of_links(tmp_path: Path, serve) -> None:
    """A web server's listing has only names: sizes and versions are requested."""
    (tmp_path / "set/sub").mkdir(parents=True)
    for name in ("a.png", "a.txt", "sub/b.png"):
        (tmp_path / "set" / name).write_bytes(name.encode())

    place = serve(tmp_path)
    source = open_source(dataset(f"http://{place}/set"))
    rows = scan(source)
    assert [(row["path"], row["size"], row["captions_at"]) for row in rows] == [
        ("a.png", 5, "a.txt"),
        ("sub/b.png", 9, None),
    ]
    assert all(row["version"] for row in rows)
    assert source.read_captions("a.txt") == ["a.txt"]


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_a_server_that_never_answers(scheme: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CONNECT_TIMEOUT_S", "READ_TIMEOUT_S"):
        for module in ("stages.discovery.sources.urls", "cache.store.object_store"):
            monkeypatch.setattr(f"{module}.{name}", 0.2)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        environment = {"AWS_ENDPOINT_URL": f"http://{place}", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
        for name, value in (environment | {"AWS_DEFAULT_REGION": "us-east-1", "NO_PROXY": "*"}).items():
            monkeypatch.setenv(name, value)
        Buckets.clear_instance_cache()
        base_url = "s3://media" if scheme == "s3" else f"http://{place}"
        with pytest.raises(LatentpressError, match="can't be read"):
            scan(open_source(dataset(f"{base_url}/set", source="remote")))
        with pytest.raises(MediaError, match="can't be read"):
            RemoteFile(f"{base_url}/a.jpg").size()
        (tmp_path / "all.csv").write_text(f"path,caption\n{base_url}/a.jpg,x\n")
        [row] = scan(open_source(dataset(str(tmp_path / "all.csv"))))
        assert row["problem"].startswith("unreadable: can't be read")
        Buckets.clear_instance_cache()
