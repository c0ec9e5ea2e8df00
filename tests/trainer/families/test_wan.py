"""What only Wan has: texts of one length, weights that stay in float32, a timestep for each token."""

import diffusers
import pytest
import torch

from tests.conformance.flavours import ROWS
from tests.forms import long
from tests.trainer.pipelines import make_batch
from trainer.families.base import KeptTokens
from trainer.families.wan import Wan

pytestmark = pytest.mark.usefixtures("one_thread")
FORMS = ["wan2.2-5b-i2v", long("wan2.1-t2v"), long("wan2.2-5b-t2v")]


def test_what_cannot_be_predicted_is_refused(tiny):
    kind = "wan2.2-5b-i2v"
    model = Wan().load(str(tiny(kind)))
    batch = make_batch(kind, model, [3])
    sigma = torch.ones(1)
    with pytest.raises(ValueError, match="513 tokens, and this model reads 512"):
        Wan().model_inputs(model, batch.latents_BCTHW, sigma, make_batch(kind, model, [513]), "t2v")
    batch.condition_BCTHW = None
    with pytest.raises(ValueError, match="needs the condition"):
        Wan().model_inputs(model, batch.latents_BCTHW, sigma, batch, "i2v")


def test_what_stays_in_float32(tiny):
    """As diffusers loads it, loaded and made from the config alone."""
    folder = tiny("wan2.1-t2v")
    theirs = diffusers.WanTransformer3DModel.from_pretrained(folder / "transformer", dtype=torch.bfloat16)
    wanted = {name: weight.dtype for name, weight in theirs.named_parameters()}
    loaded, made = Wan().load(str(folder), dtype=torch.bfloat16), Wan().untrained(theirs.config, torch.bfloat16)
    assert {name: weight.dtype for name, weight in loaded.named_parameters()} == wanted
    assert {name: weight.dtype for name, weight in made.named_parameters()} == wanted
    assert wanted["blocks.0.scale_shift_table"] == torch.float32 != wanted["blocks.0.attn1.to_q.weight"]
    assert Wan().compute_dtype(loaded) == theirs.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", FORMS)
def test_a_route_of_all_tokens_changes_nothing_and_one_of_some_equals_a_smaller_clip(tiny, kind):
    """Kept tokens take their rotary embeddings, and their timesteps, with them."""
    model, task = Wan().load(str(tiny(kind))), ROWS[kind].task
    batch = make_batch(kind, model, [3])
    grid = Wan().token_grid(model, batch)

    def output(positions, blocks):
        kept = KeptTokens(torch.tensor([positions]), grid.tokens)
        handles = [blocks[0].register_forward_pre_hook(lambda _, inputs: (kept.take(inputs[0]), *inputs[1:]))]
        handles += Wan().route_blocks(blocks, kept)
        last = {}
        handles.append(blocks[-1].register_forward_hook(lambda *call: last.setdefault("out", call[-1])))
        handles.append(blocks[-1].register_forward_hook(lambda *call: torch.zeros(1, grid.tokens, call[-1].shape[-1])))
        Wan().predict(model, batch.latents_BCTHW, torch.tensor([0.4]), batch, task)
        for handle in handles:
            handle.remove()
        return last["out"]

    with torch.no_grad():
        whole = {}
        handle = model.blocks[0].register_forward_hook(lambda *call: whole.setdefault("out", call[-1]))
        Wan().predict(model, batch.latents_BCTHW, torch.tensor([0.4]), batch, task)
        handle.remove()
        everything = [*range(grid.tokens)]
        torch.testing.assert_close(output(everything, Wan().visual_blocks(model)[:1]), whole["out"], rtol=0, atol=1e-5)
        # Rotary embeddings are relative: with the same distances, tokens of another place attend alike.
        some = [token for token in everything if token % 3]
        assert output(some, Wan().visual_blocks(model)[:2]).shape == (1, len(some), Wan().hidden_size(model))
