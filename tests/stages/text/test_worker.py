"""What encode-text stores, against the encoders (which equal the pipelines): the right text, path and image."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cache.shard import reader
from cache.store import Store
from schemas.catalogue import FAMILIES
from schemas.prompts import clean
from stages import bucket, discover, encode_text
from stages.text import gemma, kandinsky5
from stages.text.request import TextRequest

ENCODERS = {"sana": gemma.Encoder, "kandinsky5-image": kandinsky5.Encoder}
CAPTIONS = ["a grey cat", "two red flowers &amp; a wall"]


def stored(home) -> list[dict[str, np.ndarray]]:
    for program in (discover.run, bucket.run, encode_text.run):
        home.run(program)
    readers = [reader(Store(home.root), f"text/{name}") for name in home.shards("text")]
    rows = [shard.read(number).tensors for shard in readers for number in range(len(shard))]
    return [{name: array.numpy() for name, array in row.items() if array is not None} for row in rows]


def same(row: dict[str, np.ndarray], result) -> bool:
    wanted = {"embeds": result.embeds} | ({} if result.pooled is None else {"pooled": result.pooled})
    return row.keys() == wanted.keys() and all(
        row[name].shape == value.shape and np.abs(row[name] - value.numpy()).max() <= 1e-5
        for name, value in wanted.items()
    )


@pytest.mark.parametrize("kind", ["sana", "kandinsky5-image-t2i", "kandinsky5-image-i2i"])
def test_shards_hold_what_the_encoder_gives(project, kind) -> None:
    """Each caption, and the null prompt by the negative path; i2i: each with its source image, cut to its bucket."""
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
        TextRequest(clean(caption, template), image=sources[number] if image else None)
        for number, caption in enumerate(CAPTIONS)
    ]
    requests += [TextRequest("", True, source) for source in sources or [None]]
    rows = stored(home)
    assert len(rows) == len(requests)
    for request in requests:
        (result,) = encoder.encode([encoder.prepare(request)])
        assert sum(same(row, result) for row in rows) == 1, request
