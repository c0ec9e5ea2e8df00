"""What only Sana has: steps in float32 of a model in bfloat16; and schedulers that can not be used."""

import json

import pytest
import torch
from diffusers import AutoencoderDC

from tests.trainer.pipelines import make_batch, pipeline, random
from trainer.families.sana import Sana
from trainer.validation import Denoising, load_scheduler

KIND = "sana"
pytestmark = pytest.mark.usefixtures("one_thread")


def row_by_row(transformer) -> None:
    """Guidance makes a batch of two, which bfloat16 rounds otherwise than two batches of one, and padding too."""
    whole = transformer.forward

    def forward(hidden_states, encoder_hidden_states, encoder_attention_mask, timestep, **options):
        rows = zip(hidden_states, encoder_hidden_states, encoder_attention_mask.bool(), timestep, strict=True)
        parts = [
            whole(x[None], text[mask][None], t[None], encoder_attention_mask=mask[mask][None], **options)
            for x, text, mask, t in rows
        ]
        return (torch.cat([part[0] for part in parts]),)

    transformer.forward = forward


@pytest.mark.slow
def test_samples_in_bfloat16_are_the_pipelines_in_every_bit(tiny) -> None:
    """Guided and stepped in float32, once the pipeline's transformer is called as ours is: row by row, unpadded."""
    folder, half = tiny(KIND), torch.bfloat16
    model, texts = Sana().load(str(folder), dtype=half), {}
    batches = [make_batch(KIND, model, [length], side=3, seed=length) for length in (9, 4)]
    for prefix, batch in zip(("", "negative_"), batches, strict=True):
        padded = torch.nn.functional.pad(batch.text_BLD, (0, 0, 0, 300 - batch.text_BLD.shape[1]))
        texts[f"{prefix}prompt_embeds"] = padded.to(half)
        texts[f"{prefix}prompt_attention_mask"] = (torch.arange(300)[None] < batch.lengths[0]).long()
    pipe = pipeline(KIND, folder)
    transformer = type(pipe.transformer).from_pretrained(folder / "transformer", torch_dtype=half)
    row_by_row(transformer)
    pipe = type(pipe)(
        None, None, AutoencoderDC.from_pretrained(folder / "vae"), transformer, load_scheduler(str(folder))
    )
    noise, shared = random(1, 32, 1, 3, 3, seed=5), {"output_type": "latent", "return_dict": False}
    wanted = pipe(**texts, negative_prompt=None, height=96, width=96, num_inference_steps=5, guidance_scale=4.5,
                  latents=noise[:, :, 0], use_resolution_binning=False, **shared)[0]  # fmt: skip
    denoising = Denoising(model, Sana(), "t2i", *batches, noise, load_scheduler(str(folder)), 5)
    denoising.take_steps(model, 4.5)
    assert wanted.std() > 0.1 and torch.equal(denoising.finish()[:, :, 0], wanted)


@pytest.mark.parametrize(("name", "message"), [("FutureScheduler", "does not have"), ("DDIMScheduler", "no shift")])
def test_a_scheduler_that_cannot_be_used_is_named(tmp_path, name, message):
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "scheduler_config.json").write_text(json.dumps({"_class_name": name}))
    with pytest.raises(ValueError, match=f"{name}.*{message}"):
        load_scheduler(str(tmp_path), shift=2.0)
