"""The same media from every source, through the pipeline: the shards are the same, and so is what a change costs.

Six images of two shapes (one with two captions) and three short videos are in a folder, in tars, in tables of the
`datasets` library, behind manifests of every kind and in S3, a server on loopback. No text is made of a file of these,
so the same plan gives the same shards of texts, and only the reference encodes them.
"""

import csv
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache.store.store import Store
from schemas.errors import LatentpressError
from stages import bucket, discover, encode_latents, encode_text, index
from tests.forms import long

pytestmark = pytest.mark.slow

wds = pytest.importorskip("webdataset")
hf = pytest.importorskip("datasets")

PROGRAMS = (discover, bucket, encode_text, encode_latents, index)


# -- what is offered ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    """A file and what is said of it; name: without a folder, the videos' ends with .mp4."""

    name: str
    data: bytes
    captions: tuple[str, ...]
    score: int = 0
    licence: str = "cc0"

    @property
    def stem(self) -> str:
        return self.name.partition(".")[0]

    @property
    def is_video(self) -> bool:
        return self.name.endswith(".mp4")


def clip(number: int) -> bytes:
    import av

    out = io.BytesIO()
    with av.open(out, "w", "mp4") as container:
        stream = container.add_stream("libx264", rate=12)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for shade in range(9):
            frame = np.full((64, 64, 3), (shade * 20 + number * 7) % 256, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return out.getvalue()


@pytest.fixture(scope="module")
def items(photo) -> list[Item]:
    sizes = [(64, 64), (96, 64)]
    found = [Item(f"p{n}.jpg", photo(n, sizes[n % 2]), (f"picture {n}",), n, "cc0") for n in range(6)]
    found[2] = replace(found[2], captions=("picture 2", "the second, said otherwise"))
    return found + [Item(f"v{n}.mp4", clip(n), (f"a clip, number {n}",), n + 10, "cc-by") for n in range(3)]


# -- where it is offered --------------------------------------------------------------------------------------------

Offer = Callable[[Any, list[Item]], list[dict]]


def beside(items: list[Item]) -> dict[str, bytes]:
    """Media and, beside each, a text file of its captions."""
    texts = {f"{item.stem}.txt": "\n".join(item.captions).encode() for item in items}
    return {item.name: item.data for item in items} | texts


def facts(items: list[Item]) -> bytes:
    rows = [{"file_name": item.name, "score": item.score, "licence": item.licence} for item in items]
    return table_csv([row | {"caption": item.captions[0]} for row, item in zip(rows, items, strict=True)])


def table_csv(rows: list[dict]) -> bytes:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


def parquet(columns: dict[str, list]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out)
    return out.getvalue()


def offer_folder(place: Any, items: list[Item]) -> list[dict]:
    return [{"instance_data_dir": str(place.local(beside(items)))}]


def offer_s3(place: Any, items: list[Item]) -> list[dict]:
    return [{"instance_data_dir": place.remote(beside(items))}]


def tar(items: list[Item]) -> bytes:
    """As img2dataset and video2dataset write it: <key>.jpg or .mp4, .txt, .json."""
    out = io.BytesIO()
    with wds.TarWriter(out, mtime=0) as sink:
        for item in items:
            record = {"url": f"https://example.org/{item.name}", "key": item.stem, "status": "success"}
            record |= {"score": item.score, "licence": item.licence}
            ending = "mp4" if item.is_video else "jpg"
            sink.write({"__key__": item.stem, ending: item.data, "txt": "\n".join(item.captions), "json": record})
    return out.getvalue()


def offer_tars(place: Any, items: list[Item]) -> list[dict]:
    images, videos = split(items)
    first, second = ([i for i in images if (i.stem in ("p0", "p1", "p2", "p3")) == here] for here in (True, False))
    tars = {"00000.tar": tar(first), "00001.tar": tar(second), "00002.tar": tar(videos)}
    return [{"instance_data_dir": f"{place.local(tars)}/{{00000..00002}}.tar"}]


def split(items: list[Item]) -> tuple[list[Item], list[Item]]:
    return [item for item in items if not item.is_video], [item for item in items if item.is_video]


def columns(items: list[Item]) -> dict[str, list]:
    """A caption column of text and, for what has a second one, another; and what a filter may ask."""
    second = [item.captions[1] if len(item.captions) > 1 else "" for item in items]
    return {
        "caption": [item.captions[0] for item in items],
        "second": second,
        "score": [item.score for item in items],
        "licence": [item.licence for item in items],
    }


def rows(items: list[Item], name: Callable[[Item], str], key: str = "file_name") -> list[dict]:
    return [{key: name(item)} | row for item, row in zip(items, pa.table(columns(items)).to_pylist(), strict=True)]


BOTH = {"caption_column": ["caption", "second"]}


def offer_cells(place: Any, items: list[Item]) -> list[dict]:
    """Images as bytes in a parquet file, as the hub has them; videos as a folder, since those are files there too."""
    images, videos = split(items)
    cells = [{"bytes": item.data, "path": item.name} for item in images]
    made = hf.Dataset.from_dict({"image": cells, **columns(images)}).cast_column("image", hf.Image(decode=False))
    out = io.BytesIO()
    made.to_parquet(out)
    return hugging(place, {"images/train-00000-of-00001.parquet": out.getvalue()}, videos)


def offer_folders(place: Any, items: list[Item]) -> list[dict]:
    images, videos = split(items)
    files = {f"images/{item.name}": item.data for item in images}
    return hugging(place, files | {"images/metadata.csv": table_csv(rows(images, lambda item: item.name))}, videos)


def hugging(place: Any, files: dict[str, bytes], videos: list[Item]) -> list[dict]:
    files = files | {f"videos/{item.name}": item.data for item in videos}
    folder = place.local(files | {"videos/metadata.csv": table_csv(rows(videos, lambda item: item.name))})
    common = {"source": "huggingface", **BOTH}
    return [common | {"id": name, "instance_data_dir": str(folder / name)} for name in ("images", "videos")]


def offer_csv(place: Any, items: list[Item]) -> list[dict]:
    media = {f"media/{item.name}": item.data for item in items}
    table = table_csv(rows(items, lambda item: f"media/{item.name}"))
    return [{"instance_data_dir": str(place.local(media | {"all.csv": table}) / "all.csv"), **BOTH}]


def offer_jsonl(place: Any, items: list[Item]) -> list[dict]:
    lines = rows(items, lambda item: str(place.folder / "media" / item.name), "video")
    lines = [line | {"caption": list(item.captions)} for line, item in zip(lines, items, strict=True)]
    media = {f"media/{item.name}": item.data for item in items}
    table = "\n".join(map(json.dumps, lines)).encode()
    return [{"instance_data_dir": str(place.local(media | {"all.jsonl": table}) / "all.jsonl")}]


def offer_urls(place: Any, items: list[Item]) -> list[dict]:
    """A third of it in S3, a third behind a URL with a password, a third behind one that is signed."""
    place.remote({item.name: item.data for item in items})
    media = {f"media/{item.name}": item.data for item in items}

    def url(item: Item) -> str:
        number = sum(item.name.encode()) % 3
        if number == 0:
            return f"s3://{place.prefix}/{item.name}"
        if number == 1:
            return f"http://{place.web}/media/{item.name}"
        bucket = Store(f"s3://{place.prefix}").bucket
        return obstore.sign(bucket.reader, "GET", f"{bucket.prefix}/{item.name}", timedelta(hours=1))

    table = {"url": [url(item) for item in items], **columns(items), "captions": [list(i.captions) for i in items]}
    folder = place.local(media | {"all.parquet": parquet(table)})
    return [{"instance_data_dir": str(folder / "all.parquet"), "caption_column": ["captions"]}]


OFFERS: dict[str, Offer] = {
    "folder": offer_folder,
    "webdataset": offer_tars,
    "huggingface-parquet": offer_cells,
    "huggingface-folders": offer_folders,
    "manifest-csv": offer_csv,
    "manifest-jsonl": offer_jsonl,
    "manifest-urls": offer_urls,
    "remote": offer_s3,
}


#: Of the others, test_discover.py shows what a change costs in a folder, and test_manifest.py that JSON lines are read
#: as CSV is.
OTHER_SOURCES = [name for name in OFFERS if name not in ("folder", "manifest-jsonl")]


@pytest.fixture(scope="module")
def folder(home_of, place_of, items: list[Item]) -> Any:
    """What the others are held against."""
    home = home_of("reference")
    home.datasets = offer_folder(place_of("reference"), items)
    home.run(*PROGRAMS)
    return home


# -- the same from everywhere ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [OTHER_SOURCES[0], *map(long, OTHER_SOURCES[1:])])
def test_the_shards_are_the_same_and_a_change_costs_itself(
    name: str, folder: Any, home_of, place_of, photo, items: list[Item]
) -> None:
    home, place, offer = home_of(name), place_of(name), OFFERS[name]
    home.datasets = offer(place, items)
    reports = home.run(discover, bucket, encode_latents)
    assert not any(report.set_aside for report in reports) and reports[0].done == len(items)
    assert home.shards("latents") == folder.shards("latents") and home.roles() == folder.roles()
    assert home.plan.units("text") == folder.plan.units("text")

    before, texts = home.files(), home.texts()
    found, planned = home.run(discover, bucket)
    assert sum(row["files_read"] for row in found.details["datasets"]) == 0
    assert (planned.done, planned.details["changes"]) == (0, "none") and home.files() == before

    changed = [replace(items[0], captions=("said otherwise",)), *items[2:]]  # items[1] is gone
    changed[2:2] = [Item("added.jpg", photo(77), ("added",)), Item("later.jpg", photo(78), ("later",))]
    home.datasets = offer(place, changed)
    found, planned = home.run(discover, bucket)
    assert home.news(found) == {"new": 2, "removed": 1, "changed": 0, "captions_changed": 1}
    news = {word: row["items"] for word, row in planned.details["changes"].items()}
    assert news == {"new": 2, "removed": 1, "changed": 1} and len(home.texts() - texts) == 3
    home.datasets = offer(place, [replace(item, data=photo(79)) if item.stem == "later" else item for item in changed])
    [latents] = home.run(encode_latents)
    assert latents.done == 1
    assert [row["reason"] for row in latents.set_aside] == ["changed"]
    home.assert_no_secret()


@pytest.mark.parametrize("name", [*map(long, OTHER_SOURCES[::2]), *OTHER_SOURCES[1::2]])
def test_a_place_that_is_not_there_stops_the_stage_and_changes_nothing(
    name: str, home_of, place_of, items: list[Item]
) -> None:
    """Whatever the source: it is named, and neither a shard nor a list of what was set aside is written."""
    home, place = home_of(f"away-{name}"), place_of(f"away-{name}")
    home.datasets = OFFERS[name](place, items)
    home.run(discover, bucket)
    before = home.files()
    tables = {path.name: path.read_bytes() for path in place.folder.glob("all.*")}
    place.local({})
    place.remote({})
    for table, data in tables.items():  # what is known of the media is there, and they are not
        (place.folder / table).write_bytes(data)
    stage = replace(encode_latents.STAGE, load_worker=lambda job: pytest.fail("loaded a model"))
    with pytest.raises(LatentpressError, match=r"datasets\.(photos|images|videos)\.instance_data_dir") as caught:
        home.run(stage)
    assert caught.value.exit_code == 3 and "media_root" in caught.value.next_step
    assert home.files() == before
    home.said += str(caught.value)
    home.assert_no_secret()


@pytest.mark.long
def test_everything_in_s3_and_nothing_here(
    folder: Any, home_of, place_of, items: list[Item], s3_of_pipelines: Any
) -> None:
    home = home_of("no-disk", root="s3://media/caches")
    home.datasets = offer_s3(place_of("no-disk"), items)
    home.run(*PROGRAMS)
    assert home.shards() == folder.shards()
    before = Store("s3://media/caches").list_files()
    reports = home.run(*PROGRAMS)
    assert Store("s3://media/caches").list_files() == before
    assert all(report.done == 0 for report in reports)
    assert {path.name for path in home.folder.rglob("*")} == {"pipeline.yaml"}
    home.assert_no_secret()


@pytest.mark.long
def test_identities_given_by_a_store(home_of, place_of, photo, items: list[Item]) -> None:
    """identity: store reads nothing to name an item, and what changes behind its back is seen when it is encoded."""
    home, place = home_of("word", settings={"identity": "store"}), place_of("word")
    items = [*items[:2], items[-1]]
    home.datasets = offer_s3(place, items)
    home.run(discover, bucket)
    offer_s3(place, [replace(items[0], data=photo(99)), *items[1:]])
    [latents] = home.run(encode_latents)
    assert (latents.done, [row["reason"] for row in latents.set_aside]) == (len(items) - 1, ["changed"])
    found, _, latents = home.run(discover, bucket, encode_latents)
    assert (home.news(found)["changed"], latents.done) == (1, 1)


# -- options that every source has ----------------------------------------------------------------------------------


def moved(name: str, place: Any, datasets: list[dict]) -> list[dict]:
    """The same datasets, configured for another machine and found here by media_root."""
    [first, *_] = datasets
    if name == "webdataset":
        return [first | {"instance_data_dir": "/elsewhere/{00000..00002}.tar", "media_root": str(place.folder)}]
    if name == "manifest-csv":
        table = place.folder.with_name("moved.csv")
        table.write_bytes(Path(first["instance_data_dir"]).read_bytes())
        return [first | {"instance_data_dir": str(table), "media_root": str(place.folder)}]
    if name.startswith("manifest"):
        return datasets
    where = "s3://elsewhere" if name == "remote" else "/elsewhere"
    return [dataset | {"instance_data_dir": where, "media_root": dataset["instance_data_dir"]} for dataset in datasets]


@pytest.mark.long
def test_filters_held_out_shares_and_other_roots(top: Path, home_of, place_of, items: list[Item]) -> None:
    wanted = {item.stem for item in items if item.score > 2 and item.licence == "cc0"}
    assert len(wanted) == 3
    (top / "facts.csv").write_bytes(facts(items))
    roles = {}
    for name, offer in OFFERS.items():
        options: dict[str, Any] = {"where": "score > 2 and licence == 'cc0'", "eval_fraction": 0.5}
        if name in ("folder", "remote"):  # their facts are in a table
            options |= {"caption_strategy": "csv", "caption_file": str(top / "facts.csv")}
        place, home = place_of(f"{name}-moved"), home_of(f"{name}-moved", settings=options)
        home.datasets = moved(name, place, offer(place, items))
        if name.startswith("huggingface"):
            home.datasets = home.datasets[:1]
        found, planned = home.run(discover, bucket)
        assert not found.set_aside and {row["reason"] for row in planned.set_aside} <= {"filtered"}, name
        paths = home.active()["path"].to_pylist()
        assert len(paths) == 3 and all(any(stem in path for stem in wanted) for path in paths), name
        roles[name] = home.roles()
    assert set(roles["folder"].values()) == {"train", "eval"}
    assert all(found == roles["folder"] for found in roles.values())


@pytest.mark.parametrize("name", ["folder", "webdataset", *map(long, [*OFFERS][2:])])
def test_captions_from_elsewhere(name: str, top: Path, place_of, items: list[Item]) -> None:
    from schemas.config.datasets import Dataset
    from stages.discovery.sources import huggingface
    from stages.discovery.sources.base import open_source

    place = place_of(f"{name}-captions")
    settings = {"id": "set", "dataset_type": "video", **OFFERS[name](place, items)[0]}
    settings |= {"id": "set", "caption_column": ["caption"]}
    huggingface.load_rows.cache_clear()

    def captions(**options: Any) -> dict[str, list[str]]:
        table = pa.concat_tables(open_source(Dataset(**settings | options)).scan(None), promote_options="permissive")
        assert not table["problem"].null_count < len(table), table["problem"]
        return dict(zip(table["path"].to_pylist(), table["captions"].to_pylist(), strict=True))

    prompt = captions(caption_strategy="instanceprompt", instance_prompt="the one")
    assert len(prompt) == (6 if name.startswith("huggingface") else 9)
    assert set(map(tuple, prompt.values())) == {("the one",)}
    words = captions(caption_strategy="filename")
    assert {words[path][0] for path in prompt} == {path.rpartition("/")[2].partition(".")[0] for path in prompt}
    said = [[f"{number}, said in a table", f"{number}, said otherwise"] for number in range(len(prompt))]
    table = {"path": list(prompt), "caption": [one for one, _ in said], "other": [two for _, two in said]}
    lists = {"path": list(prompt), "caption": said}
    lines = pa.table(lists).to_pylist()
    for strategy, data, names in (
        ("csv", table_csv(pa.table(table).to_pylist()), ["caption", "other"]),
        ("jsonl", "\n".join(map(json.dumps, lines)).encode(), ["caption"]),
        ("parquet", parquet(lists), ["caption"]),
    ):
        file = top / f"{name}.{strategy}"
        file.write_bytes(data)
        found = captions(caption_strategy=strategy, caption_file=str(file), caption_column=names, media_column=None)
        assert found == dict(zip(prompt, said, strict=True)), strategy
