"""A checkpoint that lacks a weight is refused by name: the libraries would draw it at random and go on. So is one with
weights of other shapes or, of what diffusers loads, with more of them: its config.json is another model's."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from cache.models.weights import WeightsError
from schemas.config.encoding import Latents, Model, Text
from schemas.errors import LatentpressError
from stages.encoding.text.base import load_text_encoder
from stages.encoding.vae.base import load_autoencoder
from tests.forms import long
from tests.project import SETTINGS
from trainer.families.base import module_of

KINDS = [
    "kandinsky5-video-i2v",
    "z-image",
    "wan2.1-t2v",
    *map(long, ("sana", "qwen-image", "flux2-klein", "krea2", "flux3")),
]


def load(folder: Path, kind: str, part: str) -> None:
    model = Model(path=str(folder), precision="float32", **SETTINGS[kind])
    config = SimpleNamespace(model=model, text=Text(), latents=Latents())
    if part.startswith("text_encoder"):
        load_text_encoder(config.model, config.text, torch.device("cpu"))
    elif part == "vae":
        load_autoencoder(config.model, config.latents, torch.device("cpu"))
    else:
        module_of(model.family_spec).load(model.source, part=part)


def with_weights(whole: Path, folder: Path, part: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy of a checkpoint with other weights of one part."""
    shutil.copytree(whole, folder, symlinks=True)
    file = next((folder / part).glob("*.safetensors"))
    weights = load_file(file)
    change(weights)
    file.unlink()
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def choose_weight(weights: dict[str, torch.Tensor]) -> str:
    """One that is neither tied to another nor unneeded."""
    others = re.compile("embed|lm_head|visual")
    return max(key for key, value in weights.items() if value.ndim > 1 and not others.search(key))


@pytest.mark.parametrize("kind", KINDS)
def test_each_part_without_one_of_its_weights(tiny: Callable[[str], Path], tmp_path: Path, kind: str) -> None:
    whole = tiny(kind)
    parts = sorted({path.parent.name for path in whole.glob("*/*.safetensors")})
    assert {"text_encoder", "transformer", "vae"} <= {*parts}
    for part in parts:
        remove = lambda weights: weights.pop(choose_weight(weights))  # noqa: E731
        folder = with_weights(whole, tmp_path / part, part, remove)
        with pytest.raises(LatentpressError, match="lacks ") as caught:
            load(folder, kind, part)
        assert isinstance(caught.value, WeightsError) and caught.value.next_step == "replace it with a whole copy", part


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["z-image", *map(long, ("kandinsky5-video-i2v", "wan2.1-t2v", "sana", "qwen-image"))])
def test_each_part_with_weights_of_another_model(tiny: Callable[[str], Path], tmp_path: Path, kind: str) -> None:
    def enlarge(weights: dict[str, torch.Tensor]) -> None:
        name = choose_weight(weights)
        weights[name] = torch.cat([weights[name], weights[name][:1]])

    whole = tiny(kind)
    for part in sorted({path.parent.name for path in whole.glob("*/*.safetensors")}):
        with pytest.raises(WeightsError, match=r"has shape \[.*\], .*config\.json requires \[") as caught:
            load(with_weights(whole, tmp_path / f"{part} larger", part, enlarge), kind, part)
        assert "from one checkpoint" in caught.value.next_step
    for part in ("transformer", "vae"):
        add = lambda weights: weights.update({"blocks.99.weight": torch.zeros(3)})  # noqa: E731
        with pytest.raises(WeightsError, match=r"has weights that .* does not have: blocks\.99\.weight"):
            load(with_weights(whole, tmp_path / f"{part} more", part, add), kind, part)


def test_a_tokenizer_with_more_tokens_than_the_text_encoder_knows(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Its last tokens would be found to be missing in the middle of encoding."""

    def shorten(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if "embed_tokens" in name]:
            weights[name] = weights[name][:100].clone()

    folder = with_weights(tiny("z-image"), tmp_path / "model", "text_encoder", shorten)
    file = folder / "text_encoder" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 100}))
    with pytest.raises(WeightsError, match="tokens, and its text encoder") as caught:
        load(folder, "z-image", "text_encoder")
    assert "tokenizer/" in caught.value.next_step
