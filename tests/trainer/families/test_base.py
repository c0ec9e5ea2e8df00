"""The families' classes: no method is missing, and blocks are called as their methods describe."""

import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from cache.order.schedule import BatchSchedule
from schemas.catalog import FAMILIES
from schemas.geometry import Bucket
from tests.forms import long
from tests.trainer.conftest import KINDS
from tests.trainer.runs import opened, prepared
from trainer.data import BatchLoader
from trainer.families.base import BlockTokens, KeptTokens, change_arguments, module_of
from trainer.methods.tread import begin, end
from trainer.train import train_step


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_each_family_has_one_class_that_lacks_nothing(name: str) -> None:
    """An abstract method that a class does not define raises when an object is made."""
    family = module_of(FAMILIES[name])
    assert module_of(FAMILIES[name]) is family and family.LORA_TARGETS and family.QUANTIZED and family.TRANSFORMER


# the last block has the text or references next to the visual tokens
JOINT = ("z-image", "flux2-klein", "klein-i2i", "edit-i2i", "edit-plus-i2i")
REPEATED = re.compile(r"(^|_)(blocks|refiner|layers)\.\d+\.")


def note(called, number, block, inputs, named) -> None:
    """The number of the block, and the shape of its visual tokens; a text block has text tokens there."""
    called.append((number, next(iter((*inputs, *named.values()))).shape))


#: Tasks of one transformer's class are alike: one task of each in the short form, and the tasks with references.
ALIKE = ("i2i", "t2v", "i2v", "wan-i2v", "wan-a14b", "wan-a14b-i2v", "edit-i2i")
EACH = [long(kind) if kind in ALIKE else kind for kind in KINDS]


@pytest.mark.slow
@pytest.mark.parametrize("kind", EACH)
def test_blocks_are_called_in_their_order_with_the_tokens_of_the_grid(ready, kind) -> None:
    config = ready(kind)
    data = opened(config)
    [part] = BatchLoader(data, BatchSchedule(data.spans, 0, 2, 2), 0.0).step(0).micro_batches
    family, called = module_of(config.model.family_spec), []
    model = family.load(config.model.source).eval()
    blocks = family.blocks(model)
    for number, block in enumerate(blocks):
        block.register_forward_pre_hook(partial(note, called, number), with_kwargs=True)
    with torch.no_grad():
        family.predict(model, part.batch.latents_BCTHW, torch.full((2,), 0.5), part.batch, config.model.task)
    assert [number for number, _ in called] == [*range(len(blocks))]
    grid = family.token_grid(model, part.batch)
    tokens = called[-1][1][:-1].numel()
    assert tokens > 2 * grid.tokens if kind in JOINT else tokens == 2 * grid.tokens
    size, edge = Bucket.parse(part.batch.bucket), config.model.family_spec.side_multiple
    assert (grid.rows, grid.columns) == (size.height // edge, size.width // edge), "side_multiple is a token's edge"
    length = part.batch.text_BLD.shape[1] if not kind.startswith("wan") else 512  # length to which texts are padded
    assert grid.frames == part.batch.latents_BCTHW.shape[2] and grid.text_length == length
    visual = family.visual_blocks(model)
    assert [block for block in blocks if block in visual] == visual and called[-1][1][-1] == family.hidden_size(model)
    listed = {id(weight) for block in blocks for weight in block.parameters()}
    repeated = {id(weight) for name, weight in model.named_parameters() if REPEATED.search(name)}
    assert listed == repeated


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [{"rank": 2}, long({"type": "full"})], ids=["lora", "full"])
@pytest.mark.parametrize("kind", EACH)
def test_every_trained_weight_gets_a_gradient(ready, kind, adapter) -> None:
    """DistributedDataParallel waits for each gradient. In full rank, all weights except the family's `without_gradient`
    are trained."""
    run, without = prepared(ready(kind, adapter=adapter, batch_size=2)), []
    run.optimizer.step = lambda: without.extend(name for name, weight in run.trainable.items() if weight.grad is None)
    train_step(run, run.loader.step(0))
    assert run.trainable and without == []
    left_out = {id(weight) for part in run.family.without_gradient(run.model) for weight in part.parameters()}
    trained = {id(weight) for weight in run.trainable.values()}
    assert not left_out & trained
    if adapter.get("type") == "full":
        assert left_out | trained == {id(weight) for weight in run.model.parameters()}


# --- positions of the visual tokens in blocks ---


class JointBlock(torch.nn.Module):
    """Doubles the image and adds its mean to the text; one tensor [text | image], or two."""

    def forward(self, hidden_states, encoder_hidden_states=None, marks=None):
        image = hidden_states if encoder_hidden_states is not None else hidden_states[:, TEXT:]
        text = hidden_states[:, :TEXT] if encoder_hidden_states is None else encoder_hidden_states
        assert image.shape[1] == marks.shape[1], "the values of a token are selected with it"
        text, image = text + image.mean(1, keepdim=True), 2 * image + marks[..., None]
        return (text, image) if encoder_hidden_states is not None else torch.cat([text, image], 1)


TEXT, IMAGE = 2, 6
PLACES = {False: BlockTokens(output=1), True: BlockTokens(is_text_first=True)}  # whether the text is in the same tensor


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("joint", [(False, False), (False, True), (True, True)])
def test_a_route_finds_tokens_by_name_in_tuples_and_behind_a_text(joint, by_name) -> None:
    """A route over two blocks, one or both of which have the text in the same tensor: the dropped tokens wait
    unchanged."""
    image, text, marks = torch.randn(2, IMAGE, 3), torch.randn(2, TEXT, 3), torch.randn(2, IMAGE)
    positions = torch.tensor([[0, 2, 5], [1, 2, 3]])
    kept_tokens, blocks = KeptTokens(positions, IMAGE), [JointBlock(), JointBlock()]
    first, last = (PLACES[each] for each in joint)
    change_arguments(blocks[0], partial(begin, kept_tokens, first))
    blocks[1].register_forward_hook(partial(end, kept_tokens, last))
    found_text, result = run_blocks(blocks, joint, image, text, kept_tokens.take(marks), by_name)
    rows = torch.arange(2)[:, None]
    taken_text, kept_result = run_blocks(
        [JointBlock(), JointBlock()], joint, image[rows, positions], text, marks[rows, positions]
    )
    expected = image.clone()
    expected[rows, positions] = kept_result
    assert torch.equal(result, expected) and torch.equal(found_text, taken_text)


def run_blocks(blocks, joint, image, text, marks, by_name=False):
    for block, joined in zip(blocks, joint, strict=True):
        hidden = torch.cat([text, image], 1) if joined else image
        options = {"hidden_states": hidden, "encoder_hidden_states": None if joined else text, "marks": marks}
        output = block(**options) if by_name else block(*options.values())
        text, image = (output[:, :TEXT], output[:, TEXT:]) if joined else output
    return text, image


SHAPE = {"in_channels": 16, "out_channels": 16}
TRAINABLE = {"guidance_embeds": False, "image_dim": None, "siglip_feat_dim": None, **SHAPE}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("sana", {"guidance_embeds": True}, "Sprint"),
        ("qwen-image", {"guidance_embeds": True}, "guidance-distilled"),
        ("wan2.1", {"in_channels": 36}, "encoded image"),
        ("wan2.2-a14b", {"image_dim": 8}, "encoded image"),
        ("z-image", {"siglip_feat_dim": 8}, "Omni"),
    ],
)
def test_a_transformer_that_can_not_be_trained_is_refused(name: str, settings: dict, message: str) -> None:
    family = module_of(FAMILIES[name])
    family.check("it", SimpleNamespace(**TRAINABLE))
    with pytest.raises(ValueError, match=message):
        family.check("it", SimpleNamespace(**TRAINABLE | settings))
