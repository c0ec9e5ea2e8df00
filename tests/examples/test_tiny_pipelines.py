"""The real pipelines generate with the tiny checkpoints, whose configurations say what the flavours need."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.examples.test_tiny_models import PIPELINES, load_part, pipeline_class
from tests.forms import long

pytestmark = pytest.mark.usefixtures("one_thread")


class Processor:
    """Text and images in, ids, mask and patches out: the part of Qwen2VLProcessor that the pipelines use."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self.tokenizer = AutoTokenizer.from_pretrained(folder, subfolder="tokenizer")
        self.images = Qwen2VLImageProcessorPil.from_pretrained(folder, subfolder="tokenizer")
        self.image_token_id = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")

    def __call__(self, text: list[str], images: Any = None, videos: None = None, **options: Any) -> Any:
        if images is None:
            return self.tokenizer(text, **options)
        seen = self.images(images=images, return_tensors="pt")
        counts = (seen["image_grid_thw"].prod(-1) // self.images.merge_size**2).tolist()
        expanded = [one.replace("<|image_pad|>", "<|image_pad|>" * n) for one, n in zip(text, counts, strict=True)]
        encoded = self.tokenizer(expanded, **options)
        encoded["mm_token_type_ids"] = (encoded["input_ids"] == self.image_token_id).int()
        encoded.update(seen)
        return encoded


def _pipeline(models: Path, kind: str) -> Any:
    from transformers import AutoTokenizer

    index = json.loads((models / kind / "model_index.json").read_text())
    names = [name for name, entry in index.items() if isinstance(entry, list) and entry[0] is not None]
    parts = {name: load_part(models, kind, name) for name in names if not name.startswith(("tokenizer", "processor"))}
    if "processor" in index:
        parts["processor"] = Processor(models / kind)
    if "tokenizer_2" in index:
        parts["tokenizer"] = Processor(models / kind)
        parts["tokenizer_2"] = AutoTokenizer.from_pretrained(models / kind, subfolder="tokenizer_2")
    else:
        parts["tokenizer"] = AutoTokenizer.from_pretrained(models / kind, subfolder="tokenizer")
    settings = {name: index[name] for name in ("expand_timesteps",) if name in index}
    pipe = pipeline_class(kind)(**parts, **settings)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in ("sana", "kandinsky5-image-i2i", "kandinsky5-video-i2v") else long(kind)
        for kind in PIPELINES
        if not kind.endswith("nabla") and kind != "wan2.2-5b-i2v"  # the checkpoint of t2v
    ],
)
def test_the_real_pipeline_generates(models: Path, kind: str) -> None:
    pipe = _pipeline(models, kind)
    call = {"num_inference_steps": 2, "height": 64, "width": 64, "output_type": "pt"}
    if kind == "sana":
        call["use_resolution_binning"] = False
    elif kind.startswith("kandinsky5-image"):
        pipe.resolutions = [(64, 64)]
    elif kind.startswith("wan"):
        call |= {"width": 96, "num_frames": 9, "max_sequence_length": 32}
    elif "video" in kind:
        # The i2v pipeline fits its first four latent frames to later ones: with none it gives NaN.
        call |= {"width": 96, "num_frames": 17 if kind.endswith("i2v") else 9}
    if "i2" in kind or "edit" in kind:
        call["image"] = Image.effect_mandelbrot((call["width"], 64), (-2, -1, 1, 1), 50).convert("RGB")
    results = []
    for prompt in ("a grey cat on a wall", "two red rockets in the night sky"):
        output = pipe(prompt=prompt, generator=torch.Generator().manual_seed(0), **call)
        results.append(torch.as_tensor(next(iter(output.values()))))
    assert results[0].shape[-2:] == (64, call["width"]) and results[0].isfinite().all()
    assert results[0].shape[-3] == 3 and (results[0].shape[-4] == call.get("num_frames") or "video" not in kind)
    least = 1e-5 if "edit" in kind else 1e-3  # most tokens of an edit's text are its image's, the same for both
    assert results[0].std() > 0.02 and (results[0] - results[1]).abs().mean() > least
