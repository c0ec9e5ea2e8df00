"""Rows of encode-text, compared with the encoders (which equal the pipelines): the right text, path and image; nothing
is computed or read twice, and the device never waits."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cache.shards.shard_io import open_reader
from cache.store.store import Store
from schemas.catalog import FAMILIES
from stages import bucket, discover, encode_text
from stages.encoding.text import base, gemma, kandinsky5, qwen_vl_images
from stages.encoding.text.base import TextRequest
from stages.encoding.text.worker import CLIP_TRUNCATED_REMARK
from stages.engines.sandbox import SandboxPool

ENCODERS = {"sana": gemma.Encoder, "kandinsky5-image": kandinsky5.Encoder}
CAPTIONS = ["a grey cat", "two red flowers &amp; a wall"]


def stored(home) -> list[dict[str, np.ndarray]]:
    for program in (discover.run, bucket.run, encode_text.run):
        home.run(program)
    readers = [open_reader(Store(home.root), f"text/{name}") for name in home.shards("text")]
    rows = [shard.read(number).tensors for shard in readers for number in range(len(shard))]
    return [{name: array.numpy() for name, array in row.items() if array is not None} for row in rows]


def same(row: dict[str, np.ndarray], result) -> bool:
    expected = {"embeds": result.embeds} | ({} if result.pooled is None else {"pooled": result.pooled})
    return row.keys() == expected.keys() and all(
        row[name].shape == value.shape and np.abs(row[name] - value.numpy()).max() <= 1e-5
        for name, value in expected.items()
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sana", "kandinsky5-image-i2i"])
def test_shards_hold_what_the_encoder_gives(project, kind) -> None:
    """Each caption, and the null prompt by the negative path; i2i: each caption with its source image, cropped to its
    bucket."""
    home = project(kind)
    family, image = home.settings["model"]["family"], kind.endswith("i2i")
    for number, caption in enumerate(CAPTIONS):
        home.image(f"{number}.png", (64, 64), caption, number)
        if image:
            home.image(f"../source/{number}.png", (160, 64), "", number + 9)
            home.settings["datasets"][0]["conditioning_data"] = "source"
    template = FAMILIES[family].templates["i2i" if image else "t2i"]
    folder = Path(home.settings["model"]["path"])
    encoder = ENCODERS[family](str(folder), None, template, template.max_length, torch.float32, torch.device("cpu"))
    sources = [Image.open(home.folder / f"source/{i}.png").crop((48, 0, 112, 64)) for i in range(2)] if image else []
    requests = [
        TextRequest(template.cleaner.text(caption), images=(sources[number],) if image else ())
        for number, caption in enumerate(CAPTIONS)
    ]
    requests += [TextRequest("", True, (source,) if source else ()) for source in sources or [None]]
    rows = stored(home)
    assert len(rows) == len(requests)
    for request in requests:
        (result,) = encoder.encode([encoder.prepare(request)])
        assert sum(same(row, result) for row in rows) == 1, request


def rows_of(home, kind: str):
    """Every row of a kind's shards, with its bucket."""
    for name in home.shards(kind):
        shard = open_reader(Store(home.root), f"{kind}/{name}")
        for number in range(len(shard)):
            yield shard.meta.bucket, shard.read(number)


@pytest.fixture
def encoders(monkeypatch) -> list:
    """The encoders that were loaded."""
    result: list = []
    load = base.load_text_encoder

    def loaded(*arguments):
        result.append(load(*arguments))
        return result[-1]

    monkeypatch.setattr(base, "load_text_encoder", loaded)
    return result


@pytest.fixture
def read(monkeypatch) -> list:
    """The requests to the processes that read files."""
    result: list = []
    begin = SandboxPool.begin

    def begin_counted(self, request):
        result.append(request)
        return begin(self, request)

    monkeypatch.setattr(SandboxPool, "begin", begin_counted)
    return result


@pytest.mark.slow
def test_an_image_is_read_and_seen_once_whatever_its_captions(project, monkeypatch, encoders, read) -> None:
    """More images than the cache of features holds; texts in several batches and units."""
    monkeypatch.setattr(qwen_vl_images, "MAX_CACHED_FEATURES", 1)
    monkeypatch.setattr(qwen_vl_images, "MAX_CACHED_IMAGES", 1)
    home = project("kandinsky5-image-i2i", cache={"unit_mib": 0.5}, text={"batch_tokens": 100})
    home.settings["datasets"][0]["conditioning_data"] = "source"
    images = 5
    for number in range(images):
        home.image(
            f"{number}.png", (64, 64), f"make it {number} times as large\nmore of {number}, please, " * 2, number
        )
        home.image(f"../source/{number}.png", (64, 64), "", 50 + number)
    home.run(discover.run)
    home.run(bucket.run)
    read.clear()
    report = home.run(encode_text.run)
    (encoder,) = encoders
    assert (report.done, report.rejects) == (4 * images, [])
    assert (encoder.stats.images, encoder.stats.reused) == (images, 3 * images)
    assert len(read) == images


@pytest.mark.slow
def test_captions_that_clip_cuts_are_counted_and_not_listed(project) -> None:
    """The pipeline truncates the caption, too, and the second encoder reads the whole caption."""
    home = project("kandinsky5-image-t2i")
    for number, words in enumerate((3, 70, 100, 200)):
        home.image(f"{number}.png", (64, 64), "cat " * words, number)
    home.run(discover.run)
    home.run(bucket.run)
    report = home.run(encode_text.run)
    counts = sorted(row.info["clip_tokens"] for _, row in rows_of(home, "text"))
    longer = sum(count > 77 for count in counts)
    assert counts[0] == 2 and 2 <= longer <= 3
    assert report.details["remarks"] == [{"items": longer, "of": 5, "remark": CLIP_TRUNCATED_REMARK}]
    assert report.truncated == []
    assert CLIP_TRUNCATED_REMARK in report.summary()
    sana = project("sana")
    sana.image("0.png", (64, 64), "cat " * 100)
    for program in (discover.run, bucket.run):
        sana.run(program)
    assert "remarks" not in sana.run(encode_text.run).details
