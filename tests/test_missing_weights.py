"""A checkpoint that lacks a weight is refused by name: the libraries would draw it at random and go on."""

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

KINDS = ["kandinsky5-video-i2v", "z-image", "wan2.1-t2v", *map(long, ("sana", "qwen-image", "flux2-klein"))]


@pytest.mark.parametrize("kind", KINDS)
def test_each_part_without_one_of_its_weights(tiny: Callable[[str], Path], tmp_path: Path, kind: str) -> None:
    whole = tiny(kind)
    parts = sorted({path.parent.name for path in whole.glob("*/*.safetensors")})
    assert {"text_encoder", "transformer", "vae"} <= {*parts}
    for part in parts:
        folder = tmp_path / part
        shutil.copytree(whole, folder, symlinks=True)
        file = next((folder / part).glob("*.safetensors"))
        weights = load_file(file)
        others = re.compile("embed|lm_head|visual")  # tied to each other, or not needed
        name = max(key for key, value in weights.items() if value.ndim > 1 and not others.search(key))
        del weights[name]
        file.unlink()
        save_file(weights, file, metadata={"format": "pt"})
        model = Model(path=str(folder), precision="float32", **SETTINGS[kind])
        config = SimpleNamespace(model=model, text=Text(), latents=Latents())
        with pytest.raises(LatentpressError, match="lacks ") as caught:
            if part.startswith("text_encoder"):
                load_text_encoder(config, torch.device("cpu"))
            elif part == "vae":
                load_autoencoder(config, torch.device("cpu"))
            else:
                module_of(model.family_spec).load(model.source, part=part)
        assert isinstance(caught.value, WeightsError) and caught.value.next_step == "replace it with a whole copy", name
