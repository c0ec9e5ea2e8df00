"""What only FLUX.3 Image has: windows of texts, masks in rotary embeddings, three streams, two kinds of blocks."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_flux3 import Flux3AttnProcessor, Flux3PosEmbed, Flux3Transformer2DModel

from cache.models.compatibility import CheckpointMismatch, check_distilled, check_transformer
from schemas.config.encoding import Model
from schemas.config.training import Adapter
from tests.conformance import modular
from tests.conformance.flavours import tokens
from tests.forms import long
from tests.trainer.families.batches import by_batch_and_alone
from tests.trainer.families.test_flux2 import begin, end
from tests.trainer.pipelines import make_batch, random
from trainer.families import flux3
from trainer.families.base import KeptTokens, change_arguments
from trainer.families.flux3 import Flux3
from trainer.setup.adapters import choose_targets, make_trainable
from trainer.validation import Denoising, load_scheduler

UNEQUAL = [3, 100, 80, 161]  # windows of 80, 160, 80 and 240 tokens
CONFIG = {"family": "flux3"}


def stock(model: Any) -> Any:
    """The model's weights in diffusers' own class."""
    plain = Flux3Transformer2DModel.from_config(model.config)
    plain.load_state_dict(model.state_dict())
    return plain.eval()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [long("flux3"), "flux3-i2i"])
def test_texts_with_different_windows_do_not_change_each_other(tiny, kind) -> None:
    """Losses and gradients, alone by diffusers' own classes, and with blocks that are computed again."""
    task = "i2i" if kind.endswith("i2i") else "t2i"
    model = Flux3().load(str(tiny("flux3"))).eval()
    batch = make_batch(kind, model, UNEQUAL)
    together, single, gradients = by_batch_and_alone(Flux3(), model, batch, task, least=1e-3)
    assert (together - single).abs().max() <= 1e-5 and gradients <= 1e-4
    sigma = torch.tensor([0.1, 0.4, 0.6, 0.9])
    plain = stock(model)
    with torch.no_grad():
        found = Flux3().predict(model, batch.latents_BCTHW, sigma, batch, task)
        for row, length in enumerate(UNEQUAL):
            one = batch.select(torch.tensor([row]))
            one.text_BLD, one.text_mask_BL = one.text_BLD[:, :length], one.text_mask_BL[:, :length]
            inputs = Flux3().model_inputs(plain, one.latents_BCTHW, sigma[[row]], one, task)
            last = one.text_BLD[0, -1]
            assert torch.equal(inputs["encoder_hidden_states"][0, length:], last.expand(-length % 80, -1))
            wanted = plain(**inputs, return_dict=False)[0]
            assert (tokens(found[[row]]) - wanted).abs().max() <= 1e-5

    def step(checkpointed: bool) -> list[torch.Tensor]:
        """A second batch is computed before the backward pass, whose blocks need the masks of the first."""
        model.zero_grad()
        model.gradient_checkpointing = checkpointed
        prediction = Flux3().predict(model, batch.latents_BCTHW, sigma, batch, task)
        with torch.no_grad():
            Flux3().predict(model, batch.latents_BCTHW[:1], sigma[:1], batch.select(torch.tensor([0])), task)
        prediction.square().mean().backward()
        return [weight.grad for weight in model.parameters() if weight.grad is not None]

    plain_gradients = step(False)
    model.enable_gradient_checkpointing()
    assert all(map(torch.equal, plain_gradients, step(True)))


def test_the_windows_of_the_longest_texts() -> None:
    found = [flux3.window_length(length) for length in (1, 80, 81, 8160, 8161, 8192)]
    assert found == [80, 80, 160, 8160, 8192, 8192]


@pytest.mark.slow
@pytest.mark.parametrize("guidance", [1.0, 3.5])
def test_samples_in_bfloat16_are_the_pipelines_in_every_bit(tiny, monkeypatch, guidance) -> None:
    folder = tiny("flux3")
    pipe = modular.Flux3Pipeline.of(folder, texts=False, dtype=torch.bfloat16)
    model = Flux3().load(str(folder), dtype=torch.bfloat16).eval()
    batch, negative = (make_batch("flux3", model, [length], seed=length) for length in (7, 90))
    noise = random(1, 128, 1, 4, 6, seed=9)
    inputs = [Flux3().model_inputs(model, noise, torch.ones(1), each, "t2i") for each in (batch, negative)]
    pipe.encode_prompt = lambda *_: [each["encoder_hidden_states"] for each in inputs]
    monkeypatch.setattr(modular, "randn_tensor", lambda shape, dtype: noise[:, :, 0].to(dtype))
    (theirs,) = pipe("", "", height=64, width=96, guidance_scale=guidance, num_inference_steps=5)
    scheduler = load_scheduler(str(folder), modular=flux3.FAMILY.modular)
    denoising = Denoising(model, Flux3(), "t2i", batch, negative, noise, scheduler, 5)
    denoising.take_steps(model, guidance)
    assert torch.equal(tokens(denoising.finish()), theirs) and theirs.dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flux3", "flux3-i2i"])
@pytest.mark.parametrize("lengths", [[5, 6], [5, 100]])
def test_a_route_computes_the_kept_tokens_alone(tiny, kind, lengths) -> None:
    """Through both kinds of blocks, with the mask of different windows: as if the image had only these tokens."""
    task = "i2i" if kind.endswith("i2i") else "t2i"
    model, sigma = Flux3().load(str(tiny("flux3"))).eval(), torch.tensor([0.3, 0.7])
    places, batch = torch.tensor([[0, 3, 5, 6], [1, 2, 10, 15]]), make_batch(kind, model, lengths)
    kept, blocks = KeptTokens(places, 16), Flux3().visual_blocks(model)
    first, last = blocks[0], blocks[-1]
    handles = [
        change_arguments(first, partial(begin, kept, Flux3().block_tokens(first))),
        last.register_forward_hook(partial(end, kept, Flux3().block_tokens(last))),
        *Flux3().route_blocks(blocks, kept),
    ]
    with torch.no_grad():
        made = tokens(Flux3().predict(model, batch.latents_BCTHW, sigma, batch, task))
        for handle in handles:
            handle.remove()
        for row in range(2):
            one = batch.select(torch.tensor([row]))
            one.text_BLD = one.text_BLD[:, : lengths[row]]
            one.text_mask_BL = one.text_mask_BL[:, : lengths[row]]
            inputs = Flux3().model_inputs(model, one.latents_BCTHW, sigma[[row]], one, task)
            inputs |= {
                "hidden_states": inputs["hidden_states"][:, places[row]],
                "img_ids": inputs["img_ids"][places[row]],
            }
            wanted = model(**inputs, return_dict=False)[0]
            torch.testing.assert_close(made[[row]][:, places[row]], wanted, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_without_references_their_layers_are_idle(tiny) -> None:
    """They get no adapter and are not trained, while all other weights get a gradient; with references all compute."""
    model = Flux3().load(str(tiny("flux3")))
    idle = Flux3().idle_blocks(model, "t2i")
    assert idle == [*model.mode_blocks["image_cond"]] and Flux3().idle_blocks(model, "i2i") == []
    assert not {*idle} & {*Flux3().blocks(model, "t2i")}
    every = choose_targets(model, [Flux3.LORA_TARGETS], Flux3().without_gradient(model, "i2i"))
    targets = choose_targets(model, [Flux3.LORA_TARGETS], Flux3().without_gradient(model, "t2i"))
    assert {*every} - {*targets} == {name for name in every if ".image_cond." in name} and len(every) == 30
    make_trainable(model, Flux3(), "t2i", Adapter(type="full"))
    batch = make_batch("flux3", model)
    Flux3().predict(model, batch.latents_BCTHW, torch.tensor([0.3, 0.8]), batch, "t2i").square().sum().backward()
    frozen = {name for name, weight in model.named_parameters() if not weight.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if "image_cond" in name}
    assert all((weight.grad is None) == (name in frozen) for name, weight in model.named_parameters())


def test_the_distilled_flow_map_is_refused_with_the_name_of_the_flavour_to_train(tiny, tmp_path: Path) -> None:
    """By its flavour, its repository, or its config, also with an assistant; and when it is loaded."""
    refused = [CONFIG | {"flavour": "klein"}, CONFIG | {"path": "black-forest-labs/flux-3-image-klein"}]
    transformer = Flux3Transformer2DModel(
        num_layers=1, num_single_layers=1, num_attention_heads=1, attention_head_dim=32, joint_attention_dim=8,
        axes_dims_rope=(8, 8, 8, 8), flow_map=True,
    )  # fmt: skip
    transformer.save_pretrained(tmp_path / "transformer")
    refused += [CONFIG | {"path": str(tmp_path)}]
    for settings in refused:
        for assistant in ({}, {"assistant": "a.safetensors"}):
            with pytest.raises(CheckpointMismatch) as caught:
                check_distilled(Model.model_validate(settings | assistant), lambda _: None, is_guided=not assistant)
            assert "train klein-base (black-forest-labs/flux-3-image-klein-base)" in caught.value.next_step
            assert "assistant" not in caught.value.next_step and "guidance" not in caught.value.next_step
    assert "flow_map in its transformer/config.json" in str(caught.value)
    with pytest.raises(CheckpointMismatch, match="flow_map = True"):
        check_transformer(Model.model_validate(CONFIG | {"path": str(tmp_path)}))
    with pytest.raises(ValueError, match="train klein-base"):
        Flux3().load(str(tmp_path))


@pytest.mark.slow
def test_without_padding_every_bit_equals_the_stock_model(tiny) -> None:
    model = Flux3().load(str(tiny("flux3")), dtype=torch.bfloat16)
    plain = Flux3Transformer2DModel.from_pretrained(tiny("flux3") / "transformer", torch_dtype=torch.bfloat16)
    assert type(plain.pos_embed) is Flux3PosEmbed
    assert type(plain.txt_mode_blocks[0].attn.processor) is Flux3AttnProcessor
    batch = make_batch("flux3-i2i", model, [30, 80])
    inputs = Flux3().model_inputs(model, batch.latents_BCTHW, torch.tensor([0.2, 0.8]), batch, "i2i")
    with torch.no_grad():
        assert torch.equal(*(each(**inputs, return_dict=False)[0] for each in (model, plain)))
