"""Source images and masks from everywhere, through the pipeline."""

import io
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from cache.store.store import Store
from stages import bucket, discover, encode_latents, encode_text

pytestmark = pytest.mark.slow

wds = pytest.importorskip("webdataset")
hf = pytest.importorskip("datasets")


@dataclass(frozen=True)
class Pair:
    stem: str
    target: bytes
    source: bytes
    mask: bytes
    caption: str


@pytest.fixture(scope="module")
def pairs(photo) -> list[Pair]:
    return [Pair(f"i{n}", photo(n), photo(20 + n), photo(40 + n), f"make it {n}") for n in range(2)]


def three(pairs: list[Pair]) -> dict[str, bytes]:
    files = {f"media/{pair.stem}.jpg": pair.target for pair in pairs}
    files |= {f"media/{pair.stem}.txt": pair.caption.encode() for pair in pairs}
    files |= {f"sources/{pair.stem}.jpg": pair.source for pair in pairs}
    return files | {f"masks/{pair.stem}.jpg": pair.mask for pair in pairs}


def by_name(place: Any, pairs: list[Pair], remote: bool) -> dict:
    here, there = str(place.local(three(pairs))), place.remote(three(pairs)) if remote else ""
    where = there or here
    return {
        "instance_data_dir": f"{here}/media",
        "conditioning_data": f"{where}/sources",
        "mask_data": f"{where}/masks",
    }


BY_COLUMN = {"conditioning_column": "source", "mask_column": "mask"}


def in_manifest(place: Any, pairs: list[Pair]) -> dict:
    url = place.remote(three(pairs))
    rows = [f"media/{p.stem}.jpg,{url}/sources/{p.stem}.jpg,masks/{p.stem}.jpg,{p.caption}" for p in pairs]
    table = "\n".join(["path,source,mask,caption", *rows]).encode()
    folder = place.local(three(pairs) | {"all.csv": table})
    return {"instance_data_dir": str(folder / "all.csv"), **BY_COLUMN}


def in_cells(place: Any, pairs: list[Pair]) -> dict:
    images = {
        name: [{"bytes": data, "path": None} if (data := getattr(pair, name)) else None for pair in pairs]
        for name in ("target", "source", "mask")
    }
    made = hf.Dataset.from_dict({**images, "caption": [pair.caption for pair in pairs]})
    for name in images:
        made = made.cast_column(name, hf.Image(decode=False))
    out = io.BytesIO()
    made.to_parquet(out)
    folder = place.local({"train.parquet": out.getvalue()})
    return {"source": "huggingface", "instance_data_dir": str(folder), **BY_COLUMN}


def in_tar(place: Any, pairs: list[Pair]) -> dict:
    out = io.BytesIO()
    with wds.TarWriter(out, mtime=0, encoder=False) as sink:
        for pair in pairs:
            members = {"jpg": pair.target, "source.png": pair.source, "mask.png": pair.mask}
            sink.write(
                {
                    "__key__": pair.stem,
                    **{name: data for name, data in members.items() if data},
                    "txt": pair.caption.encode(),
                }
            )
    place.local({"0.tar": out.getvalue()})
    columns = {"conditioning_column": "source.png", "mask_column": "mask.png"}
    return {"instance_data_dir": f"{place.folder}/0.tar", **columns}


@pytest.mark.long
def test_companions_from_everywhere(home_of, place_of, pairs: list[Pair]) -> None:
    """Sources and masks by name, here and in S3, in columns and in tars: one set of shards."""
    shards, plans, texts = {}, {}, {}
    for name, offer in {
        "folder": partial(by_name, remote=False),
        "s3": partial(by_name, remote=True),
        "manifest": in_manifest,
        "huggingface": in_cells,
        "webdataset": in_tar,
    }.items():
        home = home_of(f"i2i-{name}", "kandinsky5-image-i2i")
        home.datasets = [offer(place_of(f"i2i-{name}"), pairs)]
        reports = home.run(discover, bucket, encode_latents)
        if name in ("folder", "webdataset"):
            reports += home.run(encode_text)
            texts[name] = home.shards("text")
        assert not any(report.set_aside for report in reports), name
        active = home.active()
        assert active["source_path"].null_count == active["mask_path"].null_count == 0, name
        shards[name], plans[name] = home.shards("latents"), (home.roles(), home.plan.units("text"))
        home.assert_no_secret()
    assert all(found == shards["folder"] for found in shards.values()) and shards["folder"]
    assert all(found == plans["folder"] for found in plans.values()) and len(plans["folder"][0]) == 2
    assert texts["webdataset"] == texts["folder"] and texts["folder"]


def references_by_name(place: Any, pairs: list[Pair]) -> dict:
    files = three(pairs)
    del files[f"masks/{pairs[1].stem}.jpg"]
    folder = place.local(files)
    return {"instance_data_dir": f"{folder}/media", "conditioning_data": [f"{folder}/sources", f"{folder}/masks"]}


def references_in_cells(place: Any, pairs: list[Pair]) -> dict:
    given = [replace(pairs[0]), replace(pairs[1], mask=b"")]
    return in_cells(place, given) | {"conditioning_column": ["source", "mask"], "mask_column": None}


def references_in_tar(place: Any, pairs: list[Pair]) -> dict:
    given = [replace(pairs[0]), replace(pairs[1], mask=b"")]
    return in_tar(place, given) | {"conditioning_column": ["source.png", "mask.png"], "mask_column": None}


@pytest.mark.long
def test_references_from_everywhere(home_of, place_of, pairs: list[Pair]) -> None:
    """Two of the first item and one of the second, in the order of the columns: one plan, and one set of shards."""
    shards, plans = {}, {}
    for offer in (references_by_name, references_in_cells, references_in_tar):
        home = home_of(offer.__name__, "flux2-klein-i2i")
        home.datasets = [offer(place_of(offer.__name__), pairs)]
        reports = home.run(discover, bucket, encode_latents)
        assert not any(report.set_aside for report in reports), offer
        shards[offer], plans[offer] = home.shards("latents"), (home.roles(), home.plan.units("text"))
    assert sorted(len(ids) for ids in home.active()["references"].to_pylist() if ids) == [1, 2]
    assert all(found == shards[references_by_name] for found in shards.values()) and len(shards[references_by_name]) > 1
    assert all(found == plans[references_by_name] for found in plans.values())


@pytest.mark.long
def test_companions_that_change_or_go(home_of, place_of, photo, pairs: list[Pair]) -> None:
    home, place = home_of("i2i-changes", "kandinsky5-image-i2i"), place_of("i2i-changes")
    home.datasets = [by_name(place, pairs, remote=True)]
    home.run(discover, bucket)
    by_name(place, [replace(pairs[0], source=photo(90)), pairs[1]], remote=True)
    text, latents = home.run(encode_text, encode_latents)
    assert [row["reason"] for row in latents.set_aside] == ["changed"]
    assert {row["reason"] for row in text.set_aside} == {"changed"}  # the captions of the item and its null prompt
    Store(f"s3://{place.prefix}").remove("masks/i1.jpg")
    found, planned = home.run(discover, bucket)
    assert [row["reason"] for row in found.set_aside] == ["no-mask"]
    assert {word: row["items"] for word, row in planned.details["changes"].items()} == {"changed": 1, "removed": 1}
