"""Weights that the encoding stages do not load: pickled weights, and checkpoints whose parts do not fit together."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from cache.models.weights import WeightsError
from schemas.catalog import FAMILIES
from schemas.errors import LatentpressError
from stages import bucket, discover, encode_latents, encode_text
from stages.encoding.text import kandinsky5
from stages.encoding.vae import flux
from tests.forms import long

CPU = torch.device("cpu")
TEXT, IMAGE = "kandinsky5-image-t2i", FAMILIES["kandinsky5-image"].templates["t2i"]


@pytest.fixture
def altered(project, tiny, tmp_path):
    """altered(kind) -> a planned project with its own copy of the checkpoint, and the folder of the copy."""

    def make(kind: str):
        home, folder = project(kind), tmp_path / "model"
        shutil.copytree(tiny(kind), folder)
        home.settings["model"]["path"] = str(folder)
        for number in range(2):
            home.image(f"{number}.png", seed=number)
        home.run(discover.run)
        home.run(bucket.run)
        return home, folder

    return make


def shorten(tokenizer: Path, text: str) -> None:
    """Add `text` as one token."""
    changed = AutoTokenizer.from_pretrained(tokenizer)
    changed.add_tokens([text])
    changed.save_pretrained(tokenizer)


def test_a_tokenizer_whose_template_is_shorter_than_the_crop_is_refused(altered):
    home, folder = altered("kandinsky5-image-t2i")
    shorten(folder / "tokenizer", "Describe the image by detailing the color, shape, size, texture, quantity,")
    with pytest.raises(LatentpressError, match=r"template kandinsky5-t2i .* the first 40") as caught:
        home.run(encode_text.run)
    assert "use tokenizer/ of" in caught.value.next_step
    assert not home.shards("text")


FOREIGN, UNUSABLE = "take vae/ from the repository", "replace it"


@pytest.mark.parametrize(
    ("kind", "part", "values", "message", "step"),
    [
        (TEXT, "vae", {"latent_channels": 4}, "latent_channels = 4", FOREIGN),
        long("sana", "vae", {"latent_channels": 16}, "latent_channels = 16", FOREIGN),
        (TEXT, "vae", {"norm_num_groups": 0}, "vae/config.json has a value", UNUSABLE),
        long(TEXT, "vae", {"scaling_factor": {}}, "vae/config.json has a value", UNUSABLE),
        (TEXT, "text_encoder_2", {"hidden_size": "x"}, "text_encoder_2/config.json has a value", UNUSABLE),
    ],
)
def test_a_part_that_does_not_fit_or_cant_be_made_is_refused_by_name(altered, kind, part, values, message, step):
    """Before anything is encoded."""
    home, folder = altered(kind)
    file = folder / part / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    with pytest.raises(LatentpressError) as caught:
        home.run(encode_latents.run if part == "vae" else encode_text.run)
    assert message in caught.value.message and step in caught.value.next_step and "\n" not in caught.value.message
    assert not home.shards("latents") and not home.shards("text")


@pytest.fixture
def pickled(tiny: Callable[[str], Path], tmp_path: Path) -> Callable[[str, str], Path]:
    """pickled(kind, part): a copy of the checkpoint with the part's weights as a pickle."""

    def copy(kind: str, part: str) -> Path:
        for source in tiny(kind).iterdir():
            if source.name != part:
                (tmp_path / source.name).symlink_to(source)
        (tmp_path / part).mkdir()
        for file in (tiny(kind) / part).iterdir():
            if file.suffix != ".safetensors":
                (tmp_path / part / file.name).symlink_to(file)
                continue
            name = {"model": "pytorch_model"}.get(file.stem, file.stem)
            torch.save(load_file(file), tmp_path / part / f"{name}.bin")
        return tmp_path

    return copy


@pytest.mark.parametrize("part", ["vae", "text_encoder", "text_encoder_2"])
def test_pickled_weights_are_refused(pickled, part) -> None:
    folder = pickled(TEXT, part)
    with pytest.raises(WeightsError, match=rf"{folder}/{part}/\w+\.bin") as caught:
        if part == "vae":
            flux.Autoencoder(str(folder), None, torch.float32, CPU)
        else:
            kandinsky5.Encoder(str(folder), None, IMAGE, 64, torch.float32, CPU)
    assert "safe_serialization=True" in caught.value.next_step
