"""The classes of families: nothing is missing, and blocks are called as their methods say."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from schemas.catalog import FAMILIES
from trainer.families.base import BlockTokens, KeptTokens, change_arguments, module_of
from trainer.methods.tread import begin, end


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_each_family_has_one_class_that_lacks_nothing(name: str) -> None:
    """An abstract method that a class does not define raises when an object is helpers."""
    family = module_of(FAMILIES[name])
    assert module_of(FAMILIES[name]) is family and family.LORA_TARGETS and family.QUANTIZED and family.TRANSFORMER


# --- where blocks have their visual tokens ---


class JointBlock(torch.nn.Module):
    """Doubles the image and adds its mean to the text; one tensor [text | image], or two."""

    def forward(self, hidden_states, encoder_hidden_states=None, marks=None):
        image = hidden_states if encoder_hidden_states is not None else hidden_states[:, TEXT:]
        text = hidden_states[:, :TEXT] if encoder_hidden_states is None else encoder_hidden_states
        assert image.shape[1] == marks.shape[1], "what belongs to a token goes with it"
        text, image = text + image.mean(1, keepdim=True), 2 * image + marks[..., None]
        return (text, image) if encoder_hidden_states is not None else torch.cat([text, image], 1)


TEXT, IMAGE = 2, 6
PLACES = {False: BlockTokens(output=1), True: BlockTokens(is_text_first=True)}  # whether the text is in the same tensor


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("joint", [(False, False), (False, True), (True, True)])
def test_a_route_finds_tokens_by_name_in_tuples_and_behind_a_text(joint, by_name) -> None:
    """A route over two blocks, one or both of which have the text in the same tensor: the tokens that are left out wait
    as they are."""
    image, text, marks = torch.randn(2, IMAGE, 3), torch.randn(2, TEXT, 3), torch.randn(2, IMAGE)
    positions = torch.tensor([[0, 2, 5], [1, 2, 3]])
    kept, blocks = KeptTokens(positions, IMAGE), [JointBlock(), JointBlock()]
    first, last = (PLACES[each] for each in joint)
    change_arguments(blocks[0], partial(begin, kept, first))
    blocks[1].register_forward_hook(partial(end, kept, last))
    found_text, found = run_blocks(blocks, joint, image, text, kept.take(marks), by_name)
    rows = torch.arange(2)[:, None]
    taken_text, taken = run_blocks(
        [JointBlock(), JointBlock()], joint, image[rows, positions], text, marks[rows, positions]
    )
    expected = image.clone()
    expected[rows, positions] = taken
    assert torch.equal(found, expected) and torch.equal(found_text, taken_text)


def run_blocks(blocks, joint, image, text, marks, by_name=False):
    for block, joined in zip(blocks, joint, strict=True):
        hidden = torch.cat([text, image], 1) if joined else image
        given = {"hidden_states": hidden, "encoder_hidden_states": None if joined else text, "marks": marks}
        output = block(**given) if by_name else block(*given.values())
        text, image = (output[:, :TEXT], output[:, TEXT:]) if joined else output
    return text, image


SHAPE = {"in_channels": 16, "out_channels": 16}
TRAINABLE = {"guidance_embeds": False, "image_dim": None, "siglip_feat_dim": None, **SHAPE}


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("sana", {"guidance_embeds": True}, "Sprint"),
        ("qwen-image", {"guidance_embeds": True}, "guidance-distilled"),
        ("wan2.1", {"in_channels": 36}, "encoded image"),
        ("wan2.2-a14b", {"image_dim": 8}, "encoded image"),
        ("z-image", {"siglip_feat_dim": 8}, "Omni"),
    ],
)
def test_a_transformer_that_can_not_be_trained_is_refused(name: str, settings: dict, said: str) -> None:
    family = module_of(FAMILIES[name])
    family.check("it", SimpleNamespace(**TRAINABLE))
    with pytest.raises(ValueError, match=said):
        family.check("it", SimpleNamespace(**TRAINABLE | settings))
