"""The CLIP score, compared with torchmetrics and with its definition."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cache.models.weights import WeightsError
from stages.follow.clip_score import ClipScore
from tests.stages.clip import load_clip

pytestmark = pytest.mark.slow

TEXTS = ("A small grey cat looks at the camera.", "a cup of coffee", "the moon over the sea", "red flowers", "a man")


@pytest.fixture(scope="module")
def clip(tiny: Any) -> ClipScore:
    return load_clip(tiny("clip"))


def random_frames(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 48, 80, 3), dtype=np.uint8)


@pytest.mark.long  # it imports torchmetrics; the next but one computes the score by hand
def test_a_score_is_that_of_torchmetrics(clip: ClipScore, tiny: Any) -> None:
    """The functional form of torchmetrics, with the model and processor that it would load from the same folder."""
    metrics = pytest.importorskip("torchmetrics.functional.multimodal.clip_score")
    from transformers import AutoTokenizer, CLIPModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    folder = tiny("clip")
    model, images, tokens = (kind.from_pretrained(folder) for kind in (CLIPModel, CLIPImageProcessorPil, AutoTokenizer))

    class Model:
        """transformers 5 wraps features in an object, which torchmetrics 1.9 does not support."""

        config = model.config

        def to(self, device: Any) -> "Model":
            return self

        def get_image_features(self, pixels: torch.Tensor) -> torch.Tensor:
            return model.get_image_features(pixel_values=pixels).pooler_output

        def get_text_features(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return model.get_text_features(input_ids=ids, attention_mask=mask).pooler_output

    def process(text: Any = None, images_: Any = None, **options: Any) -> Any:
        return tokens(text, **options) if text is not None else images(options.pop("images"), return_tensors="pt")

    frames = random_frames(len(TEXTS))
    with torch.no_grad():
        theirs, _ = metrics._clip_score_update(
            [torch.from_numpy(frame).permute(2, 0, 1) for frame in frames], list(TEXTS), Model(), process
        )
    ours = [clip.score(frame[None], text) for frame, text in zip(frames, TEXTS, strict=True)]
    assert np.allclose(ours, theirs.clamp(min=0), atol=1e-4)
    assert min(theirs) < 0 < max(theirs) and len({round(value, 3) for value in ours}) > 2, "both signs are tried"


def test_a_clips_score_is_the_mean_of_its_frames(clip: ClipScore) -> None:
    frames = random_frames(4, seed=3)
    alone = [clip.score(frame[None], TEXTS[0]) for frame in frames]
    assert clip.score(frames, TEXTS[0]) == pytest.approx(np.mean(alone), abs=1e-4)
    assert np.std(alone) > 0.1


def test_pixels_are_prepared_as_clip_does_and_large_pictures_are_cropped(clip: ClipScore, tiny: Any) -> None:
    """By hand: the shorter side to 64 pixels, bicubic, the middle, OpenAI's means."""
    from PIL import Image
    from transformers import AutoTokenizer, CLIPModel

    frame = random_frames(1)[0]
    small = Image.fromarray(frame).resize((106, 64), Image.Resampling.BICUBIC).crop((21, 0, 85, 64))
    mean, deviation = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    pixels_1CHW = torch.from_numpy((np.asarray(small) / 255 - mean) / deviation).float().permute(2, 0, 1)[None]
    model, tokenizer = CLIPModel.from_pretrained(tiny("clip")), AutoTokenizer.from_pretrained(tiny("clip"))
    cosines = []
    for text in TEXTS:
        with torch.no_grad():
            output = model(**tokenizer(text, return_tensors="pt"), pixel_values=pixels_1CHW)
        cosines.append(float(torch.cosine_similarity(output.image_embeds, output.text_embeds)))
    assert max(cosines) > 0
    expected = [max(0, 100 * cosine) for cosine in cosines]
    assert [clip.score(frame[None], text) for text in TEXTS] == pytest.approx(expected, abs=1e-4)


def test_a_long_text_is_cut_as_clip_cuts_it(clip: ClipScore) -> None:
    """77 tokens including the end token: the remaining text has no effect."""
    long = "cat " * 75
    longer = long + "dog moon flower " * 30
    frames = random_frames(8, seed=1)
    alone = [frame[None] for frame in frames]
    assert (clip.find_cut(long), clip.find_cut(longer)) == (None, (257, 77))
    scores, cut, other_scores = ([clip.score(frame, text) for frame in alone] for text in (long, longer, "dog " + long))
    assert max(scores) > 0 and scores == cut
    assert other_scores != pytest.approx(scores, abs=1e-3)


def test_damaged_weights_and_missing_ones_are_named(tiny: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny("clip"), tmp_path / "clip"))
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(WeightsError, match="can't be loaded") as caught:
        load_clip(folder)
    assert "whole copy" in caught.value.next_step
    from safetensors.torch import load, save_file

    tensors = load(content)
    del tensors["visual_projection.weight"]
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(WeightsError, match=r"lacks visual_projection\.weight"):
        load_clip(folder)
