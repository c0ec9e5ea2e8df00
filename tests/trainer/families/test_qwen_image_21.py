"""What only Qwen-Image-2.1 has: positions and masks of texts with references between their tokens."""

import diffusers
import pytest
import torch

from tests.trainer.pipelines import make_batch
from trainer.batch import IMAGE_PLACES
from trainer.families.qwen_image_21 import FAMILY, Layout, QwenImage21

KIND, SIGMA = "qwen-image-2.1-i2i", torch.tensor([0.3, 0.8])
pytestmark = pytest.mark.slow


def test_positions_and_blocks_are_the_stock_models() -> None:
    """Of one sample with two references, one directly after the other, with text before and after them."""
    shapes, slots = [(1, 4, 6), (1, 2, 4), (1, 6, 2)], [False] * 3 + [True] * 8 + [False] * 2
    layout = Layout.of(shapes, slots, [len(slots)])
    mask = torch.tensor([False] * 3 + [True] * 32 + [False] * 2 + [True] * 12)
    stock = diffusers.QwenImage21Transformer2DModel(num_layers=1, attention_head_dim=32, axes_dims_rope=(8, 12, 12))
    model = QwenImage21.TRANSFORMER.from_config(stock.config)
    assert torch.equal(model._rotate(layout.positions())[0], stock.pos_embed(shapes, mask, torch.device("cpu")))
    ids, is_noisy = stock.build_token_metadata(mask, shapes)
    for start, end, is_text in layout.segments:
        assert len({*ids[start:end].tolist()}) == 1 and is_text == (ids[start] < 0)
    assert layout.prefix == int((~is_noisy).sum()) and layout.mask() is None


@torch.no_grad()
def test_unequal_texts_are_computed_as_by_the_stock_model_alone(tiny) -> None:
    """The stock model gives other results for the shorter texts of a batch, because padding takes positions there."""
    folder, family = tiny(FAMILY.name), QwenImage21()
    model = family.load(str(folder)).eval()
    stock = diffusers.QwenImage21Transformer2DModel.from_pretrained(folder / "transformer").eval()
    batch, task = make_batch(KIND, model, [5, 9]), "i2i"
    ours = family.predict(model, batch.latents_BCTHW, SIGMA, batch, task)
    padded = family.predict(stock, batch.latents_BCTHW, SIGMA, batch, task)
    for row in range(2):
        one = batch.select(torch.tensor([row]))
        length = batch.lengths[row]
        one.text_BLD, one.text_mask_BL = one.text_BLD[:, :length], one.text_mask_BL[:, :length]
        alone = family.predict(stock, one.latents_BCTHW, SIGMA[[row]], one, task)
        assert (ours[[row]] - alone).abs().max() <= 1e-5
    assert (padded[0] - ours[0]).abs().max() > 1e-2


def test_what_is_refused(tiny) -> None:
    family = QwenImage21()
    model = family.load(str(tiny(FAMILY.name)))
    batch = make_batch(KIND, model)
    with pytest.raises(ValueError, match="t2i with 2 references"):
        family.predict(model, batch.latents_BCTHW, SIGMA, batch, "t2i")
    with pytest.raises(ValueError, match="48x64 pixels: sides must be multiples of 32"):
        family.predict(model, batch.latents_BCTHW[..., :3], SIGMA, batch, "i2i")
    batch.extras[IMAGE_PLACES][1] = torch.tensor([0, 2])
    with pytest.raises(ValueError, match="2 references in different places"):
        family.predict(model, batch.latents_BCTHW, SIGMA, batch, "i2i")
    with pytest.raises(ValueError, match="causally"):
        family.dense_attention(model)
