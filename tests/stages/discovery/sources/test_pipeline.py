"""The same pictures, captions, source images and masks from every source: equal media tables and shards, and the
cost of a change."""

import csv
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache.store.store import Store
from schemas.config.datasets import Dataset
from schemas.errors import LatentpressError
from stages import bucket, discover, encode_latents
from stages.discovery.media_table import read_media_table
from stages.discovery.sources import huggingface
from stages.discovery.sources.base import open_source
from stages.engines import sandbox
from tests.forms import long
from tests.processes import other_forkserver
from tests.stages.discovery.missing_files import unloaded
from tests.stages.discovery.sources.conftest import PASSWORD

pytestmark = pytest.mark.slow

wds = pytest.importorskip("webdataset")
hf = pytest.importorskip("datasets")


@dataclass(frozen=True)
class Item:
    stem: str
    target: bytes
    source: bytes
    mask: bytes
    captions: tuple[str, ...]
    score: int = 0


@pytest.fixture(scope="module")
def items(photo) -> list[Item]:
    sizes = [(64, 64), (96, 64)]
    parts = [(photo(n, sizes[n % 2]), photo(20 + n), photo(40 + n)) for n in range(4)]
    items = [Item(f"p{n}", *part, (f"picture {n}",), n) for n, part in enumerate(parts)]
    return [*items[:2], replace(items[2], captions=("picture 2", "the second, said otherwise")), items[3]]


# -- the forms of the data ------------------------------------------------------------------------------------------


@dataclass
class Place:
    """A folder of this test, a prefix in S3, and a web server that shows the folder (with a password in its URL)."""

    folder: Path
    web: str
    prefix: str = "media/set"

    def local(self, files: dict[str, bytes]) -> Path:
        """Files that are the same stay as they are, and those that are no longer offered are removed."""
        for path in [path for path in self.folder.rglob("*") if path.is_file()]:
            if files.get(str(path.relative_to(self.folder))) != path.read_bytes():
                path.unlink()
        for name, data in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.write_bytes(data)
        return self.folder

    def remote(self, files: dict[str, bytes]) -> str:
        store = Store(f"s3://{self.prefix}")
        for name in set(store.list_names()) - files.keys():
            store.remove(name)
        for name, data in files.items():
            store.publish_bytes(name, data)
        return store.url


def files_of(items: list[Item]) -> dict[str, bytes]:
    files = {f"media/{item.stem}.jpg": item.target for item in items}
    files |= {f"media/{item.stem}.txt": "\n".join(item.captions).encode() for item in items}
    files |= {f"sources/{item.stem}.jpg": item.source for item in items}
    return files | {f"masks/{item.stem}.jpg": item.mask for item in items}


def by_name(root: str) -> dict:
    return {
        "instance_data_dir": f"{root}/media",
        "conditioning_data": f"{root}/sources",
        "mask_data": f"{root}/masks",
    }


def table(items: list[Item], name: Callable[[str], str]) -> dict[str, list]:
    """Columns of a table: files, and a caption column; items with a second caption have a second column."""
    columns: dict[str, list] = {
        role: [name(f"{folder}/{item.stem}.jpg") for item in items]
        for role, folder in (("path", "media"), ("source", "sources"), ("mask", "masks"))
    }
    columns["caption"] = [item.captions[0] for item in items]
    columns["second"] = [item.captions[1] if len(item.captions) > 1 else "" for item in items]
    return columns | {"score": [item.score for item in items]}


def as_csv(columns: dict[str, list]) -> bytes:
    out = io.StringIO()
    csv.writer(out).writerows([[*columns], *zip(*columns.values(), strict=True)])
    return out.getvalue().encode()


def as_parquet(columns: dict[str, list]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out)
    return out.getvalue()


IN_COLUMNS = {"conditioning_column": "source", "mask_column": "mask", "caption_column": ["caption", "second"]}


def offer_folder(place: Place, items: list[Item]) -> dict:
    return by_name(str(place.local(files_of(items))))


def offer_s3(place: Place, items: list[Item]) -> dict:
    return by_name(place.remote(files_of(items)))


def offer_tars(place: Place, items: list[Item]) -> dict:
    """As img2dataset writes them."""
    tars = {}
    for number, part in enumerate((items[:3], items[3:])):
        out = io.BytesIO()
        with wds.TarWriter(out, mtime=0, encoder=False) as sink:
            for item in part:
                sample = {"jpg": item.target, "source.png": item.source, "mask.png": item.mask}
                record = json.dumps({"score": item.score, "status": "success"}).encode()
                sink.write({"__key__": item.stem, **sample, "txt": "\n".join(item.captions).encode(), "json": record})
        tars[f"{number:05d}.tar"] = out.getvalue()
    columns = {"conditioning_column": "source.png", "mask_column": "mask.png"}
    return {"instance_data_dir": f"{place.local(tars)}/{{00000..00001}}.tar", **columns}


def offer_cells(place: Place, items: list[Item]) -> dict:
    """Images as bytes in a parquet file, as on the hub."""
    columns = table(items, str)
    for role, part in (("path", "target"), ("source", "source"), ("mask", "mask")):
        columns[role] = [{"bytes": getattr(item, part), "path": f"{item.stem}.jpg"} for item in items]
    rows = hf.Dataset.from_dict(columns)
    for role in ("path", "source", "mask"):
        rows = rows.cast_column(role, hf.Image(decode=False))
    out = io.BytesIO()
    rows.to_parquet(out)
    return {
        "source": "huggingface",
        "instance_data_dir": str(place.local({"train.parquet": out.getvalue()})),
    } | IN_COLUMNS


def offer_csv(place: Place, items: list[Item]) -> dict:
    folder = place.local(files_of(items) | {"all.csv": as_csv(table(items, str))})
    return {"instance_data_dir": f"{folder}/all.csv"} | IN_COLUMNS


def offer_urls(place: Place, items: list[Item]) -> dict:
    """Pictures in S3, source images behind a URL with a password, masks behind a signed URL."""
    place.remote(files_of(items))
    bucket = Store(f"s3://{place.prefix}").place

    def url(name: str) -> str:
        if name.startswith("media"):
            return f"s3://{place.prefix}/{name}"
        if name.startswith("sources"):
            return f"http://user:{PASSWORD}@{place.web}/{name}"
        return obstore.sign(bucket.reader, "GET", f"{bucket.prefix}/{name}", timedelta(hours=1))

    folder = place.local(files_of(items) | {"all.parquet": as_parquet(table(items, url))})
    return {"instance_data_dir": f"{folder}/all.parquet"} | IN_COLUMNS


OFFERS: dict[str, Callable[[Place, list[Item]], dict]] = {
    "webdataset": offer_tars,
    "manifest-urls": offer_urls,
    "huggingface": offer_cells,
    "manifest-csv": offer_csv,
    "remote": offer_s3,
    "folder": offer_folder,
}
#: Of the others, the bytes are compared in a short test, or the items are read in the same way.
SHORT = ("manifest-urls", "huggingface")


@pytest.fixture
def place(media, serve, tmp_path: Path, tmp_path_factory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(hf.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf") / "datasets")
    monkeypatch.setattr(sandbox, "SOURCE_LIBRARIES", ["datasets", "obstore", "aiohttp"])
    (tmp_path / "place").mkdir()
    with other_forkserver():
        yield Place(tmp_path / "place", serve(tmp_path / "place"))


def run(home: Any, program: Any, *overrides: str) -> Any:
    huggingface.load_rows.cache_clear()  # every program is a process of its own
    return home.run(getattr(program, "run", program), "stages.discover.workers=2", *overrides)


def offered(home: Any, name: str, place: Place, items: list[Item]) -> Any:
    dataset_options = {
        key: home.settings["datasets"][0][key] for key in ("id", "resolution", "bucket_step", "allow_upscale")
    }
    home.settings["datasets"] = [dataset_options | OFFERS[name](place, items)]
    return home


def facts(home: Any) -> list[tuple]:
    columns = ("media_id", "kind", "width", "height", "captions", "source_id", "mask_id", "mask_kind")
    rows = read_media_table(Store(home.root), "photos").to_pylist()
    return sorted(tuple(map(str, (row[name] for name in columns))) for row in rows)


@pytest.mark.parametrize("name", [name if name in SHORT else long(name) for name in OFFERS])
def test_the_media_table_is_the_same_and_a_change_costs_itself(
    name: str, project, place: Place, photo, items: list[Item]
) -> None:
    home = offered(project("kandinsky5-image-i2i"), name, place, items)
    assert run(home, discover).rejects == []
    results = facts(home)
    assert run(home, discover).details["datasets"][0]["files_read"] == 0
    content = b"".join(path.read_bytes() for path in home.root.rglob("*") if path.is_file())
    for secret in (PASSWORD, "Signature=", "wJalrXUtnFEMI"):
        assert secret.encode() not in content and secret not in home.said
    reference = offered(project("kandinsky5-image-i2i"), "folder", place, items)
    run(reference, discover)
    assert facts(reference) == results

    changed = [replace(items[0], captions=("said otherwise",)), *items[2:]]  # items[1] is gone
    changed.insert(2, Item("added", photo(77), photo(78), photo(79), ("added",)))
    counts = run(offered(home, name, place, changed), discover).details["datasets"][0]
    counts = {key: counts[key] for key in ("new", "removed", "changed", "captions_changed")}
    assert counts == {"new": 1, "removed": 1, "changed": 0, "captions_changed": 1}


@pytest.mark.parametrize("name", ["webdataset", *map(long, [name for name in OFFERS if name != "webdataset"])])
def test_shards_are_the_same_and_a_place_that_is_missing_stops_the_stage(
    name: str, project, place: Place, items: list[Item]
) -> None:
    """Neither a shard nor a list of rejects is written then."""
    home = offered(project("kandinsky5-image-i2i"), name, place, items)
    for program in (discover, bucket):
        run(home, program)
    before = {path: path.read_bytes() for path in home.root.rglob("*") if path.is_file()}
    tables = {path.name: path.read_bytes() for path in place.folder.glob("all.*")}
    place.local(tables)
    place.remote({})
    with pytest.raises(LatentpressError, match=r"datasets\.photos\.instance_data_dir") as caught:
        run(home, unloaded(encode_latents))
    assert caught.value.exit_code == 3 and "media_root" in caught.value.next_step and PASSWORD not in str(caught.value)
    assert {path: path.read_bytes() for path in home.root.rglob("*") if path.is_file()} == before
    offered(home, name, place, items)
    run(home, encode_latents)
    reference = offered(project("kandinsky5-image-i2i"), "folder", place, items)
    for program in (discover, bucket, encode_latents):
        run(reference, program)
    assert home.shards("latents") == reference.shards("latents") != {}


@pytest.mark.parametrize("name", ["webdataset", *map(long, [name for name in OFFERS if name != "webdataset"])])
def test_captions_from_elsewhere(name: str, tmp_path: Path, place: Place, items: list[Item]) -> None:
    settings = {"id": "set", **OFFERS[name](place, items), "caption_column": ["caption"]}
    huggingface.load_rows.cache_clear()

    def captions(**options: Any) -> dict[str, list[str]]:
        listing = pa.concat_tables(open_source(Dataset(**settings | options)).scan(), promote_options="permissive")
        assert listing["problem"].null_count == len(listing)
        return dict(zip(listing["path"].to_pylist(), listing["captions"].to_pylist(), strict=True))

    prompt = captions(caption_strategy="instanceprompt", instance_prompt="the one")
    assert len(prompt) == 4 and set(map(tuple, prompt.values())) == {("the one",)}
    words = captions(caption_strategy="filename")
    assert {words[path][0] for path in prompt} == {path.rpartition("/")[2].partition(".")[0] for path in prompt}
    texts = [[f"{number}, said in a table", f"{number}, said otherwise"] for number in range(len(prompt))]
    file = tmp_path / "captions.jsonl"
    rows = pa.table({"path": list(prompt), "caption": texts}).to_pylist()
    file.write_text("\n".join(map(json.dumps, rows)))
    results = captions(caption_strategy="jsonl", caption_file=str(file), media_column=None)
    assert results == dict(zip(prompt, texts, strict=True))
