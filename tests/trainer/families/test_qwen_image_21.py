"""What only Qwen-Image-2.1 has: positions and masks of texts with references between their tokens, and Turbo's noise
levels."""

import json
import logging
import shutil
from logging.handlers import BufferingHandler

import diffusers
import pytest
import torch
from safetensors.torch import load_file

from tests.conformance.flavours import ROWS
from tests.conformance.made import load_pipeline
from tests.trainer.pipelines import make_batch
from tests.trainer.runs import moved, opened
from trainer.batch import IMAGE_PLACES
from trainer.families.qwen_image_21 import FAMILY, Layout, QwenImage21, pack
from trainer.validation import draw_inputs, list_samples, write_validation_latents

KIND, SIGMA, CPU = "qwen-image-2.1-i2i", torch.tensor([0.3, 0.8]), torch.device("cpu")
#: `sample_sigmas` in model_index.json of Qwen/Qwen-Image-2.1-Turbo.
TURBO_SIGMAS = [1.0, 0.978453, 0.95418, 0.926626, 0.89508, 0.845148, 0.704534, 0.414568]
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


@pytest.mark.parametrize("is_shifted", [False, True])
def test_turbos_samples_are_the_pipelines(ready, tiny, tmp_path, request, record_property, is_shifted: bool) -> None:
    """With the defaults of the flavour and of the pipeline; with the scheduler of Turbo, and with one that shifts the
    noise levels by the number of tokens."""
    folder = shutil.copytree(tiny(FAMILY.name), tmp_path / "turbo")
    scheduler = {} if is_shifted else {"use_dynamic_shifting": False, "shift": 1.0, "shift_terminal": None}
    for name, changes in (
        ("model_index.json", {"sample_sigmas": TURBO_SIGMAS}),
        ("scheduler/scheduler_config.json", scheduler),
    ):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | changes))
    config = moved(ready(FAMILY.name, adapter={"rank": 2}, validation={"steps": None}), folder)
    config = config.model_copy(update={"model": config.model.model_copy(update={"flavour": "qwen-image-2.1-turbo"})})
    data, family = opened(config), QwenImage21()
    model = family.load(str(folder)).eval()
    warnings, logger = BufferingHandler(1000), logging.getLogger("diffusers")
    logger.addHandler(warnings)
    request.addfinalizer(lambda: logger.removeHandler(warnings))
    write_validation_latents(model, family, config, data, tmp_path / "latents", CPU)
    (sample,) = list_samples(config, data)
    assert sample.steps == len(TURBO_SIGMAS)
    assert not any("sample_sigmas" in record.getMessage() for record in warnings.buffer)
    latent = load_file(tmp_path / "latents" / f"{sample.name}.safetensors")["latent"]
    batch, _, noise = draw_inputs(FAMILY, data.validation[0], sample, CPU)
    pipe = load_pipeline(ROWS[FAMILY.name], folder, texts=False)
    wanted = pipe(
        prompt_embeds=batch.text_BLD,
        latents=pack(noise),
        height=noise.shape[-2] * FAMILY.spatial_stride,
        width=noise.shape[-1] * FAMILY.spatial_stride,
        output_type="latent",
        return_dict=False,
    )[0]
    difference = (pack(latent[None]) - wanted).abs().max().item()
    record_property("largest difference", difference)
    assert len(pipe.scheduler.timesteps) == sample.steps and wanted.std() > 0.1 and difference <= 2e-5
    if not is_shifted:
        assert torch.allclose(pipe.scheduler.sigmas[:-1], torch.tensor(TURBO_SIGMAS))


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
