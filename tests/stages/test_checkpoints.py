"""Checkpoints whose parts do not belong together are refused by the stage that meets them, with what to do."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from schemas.errors import USAGE, LatentpressError
from stages import bucket, discover, encode_latents, encode_text


@pytest.fixture
def altered(project, tiny, tmp_path):
    """altered(kind) -> a planned project whose checkpoint is a copy of its own, and that folder."""

    def make(kind: str):
        made, folder = project(kind), tmp_path / "model"
        shutil.copytree(tiny(kind), folder)
        made.settings["model"]["path"] = str(folder)
        for number in range(2):
            made.image(f"{number}.png", seed=number)
        made.run(discover.run)
        made.run(bucket.run)
        return made, folder

    return make


def shorten(tokenizer: Path, text: str) -> None:
    """Make one token of `text`."""
    changed = AutoTokenizer.from_pretrained(tokenizer)
    changed.add_tokens([text])
    changed.save_pretrained(tokenizer)


def test_a_tokenizer_whose_template_is_shorter_than_the_crop_is_refused(altered):
    made, folder = altered("kandinsky5-image-t2i")
    shorten(folder / "tokenizer", "Describe the image by detailing the color, shape, size, texture, quantity,")
    with pytest.raises(LatentpressError, match=r"tokens of the template kandinsky5-t2i .* the first 40 off") as caught:
        made.run(encode_text.run)
    assert "use tokenizer/ of" in caught.value.next_step
    assert not made.shards("text")


@pytest.mark.parametrize(
    ("kind", "key", "value", "said"),
    [
        ("kandinsky5-image-t2i", "latent_channels", 4, "latent_channels = 4"),
        ("kandinsky5-image-t2i", "block_out_channels", [8, 16, 16], "3 entries of block_out_channels"),
        ("sana", "latent_channels", 16, "latent_channels = 16"),
    ],
)
def test_an_autoencoder_that_the_transformer_cant_read_is_refused_before_anything_is_encoded(
    altered, kind, key, value, said
):
    made, folder = altered(kind)
    file = folder / "vae" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(LatentpressError) as caught:
        made.run(encode_latents.run)
    assert said in caught.value.message and caught.value.exit_code == USAGE
    assert "take vae/ from the repository" in caught.value.next_step
    assert not made.shards("latents")
