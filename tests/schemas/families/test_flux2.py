"""What the rows of FLUX.2 klein say, where it is in force."""

import json

import pyarrow as pa
import pytest

from cache.models.compatibility import CheckpointMismatch, check_distilled
from schemas.catalog import FAMILIES
from schemas.config.pipeline import Config
from schemas.recipe import text_settings
from schemas.tables import TEXTS_SCHEMA
from stages.planning.units import text_tensor_bytes

FAMILY = FAMILIES["flux2-klein"]


def made(family: str = "flux2-klein", flavour: str | None = None, **sections) -> Config:
    model = {"family": family, "flavour": flavour} | sections.pop("model", {})
    dataset = {"id": "a", "instance_data_dir": "a"}
    return Config.model_validate({"root": "work", "model": model, "datasets": [dataset], **sections})


@pytest.mark.parametrize("size", ["4b", "9b"])
def test_distilled_flavours_and_repositories_are_refused(size):
    distilled, base = (FAMILY.flavours[f"klein-{infix}{size}"] for infix in ("", "base-"))
    for model in (made(flavour=distilled.name).model, made(model={"path": distilled.repo}).model):
        with pytest.raises(CheckpointMismatch, match=f"{distilled.name} was distilled") as caught:
            check_distilled(model, print)
        assert f"train {base.name} ({base.repo})" in caught.value.next_step
    check_distilled(made(flavour=base.name).model, pytest.fail)


def test_model_index_says_whether_a_folder_is_distilled(tmp_path):
    """As the pipeline reads it: a missing key means that it is not."""
    index, remarks = tmp_path / "model_index.json", list[str]()
    model = made(model={"path": str(tmp_path)}).model
    assisted = made(model={"path": str(tmp_path), "assistant": "file.safetensors"}).model
    check_distilled(model, remarks.append)
    assert "nothing in" in remarks.pop() and not remarks, "without a model_index.json"
    index.write_text(json.dumps({"_class_name": FAMILY.pipelines["t2i"], "is_distilled": True}))
    with pytest.raises(
        CheckpointMismatch, match=r"by is_distilled in its model_index\.json it was distilled"
    ) as caught:
        check_distilled(model, pytest.fail)
    assert "train klein-base-4b" in caught.value.next_step
    check_distilled(assisted, pytest.fail)
    for settings in ({"is_distilled": False}, {}):
        index.write_text(json.dumps({"_class_name": FAMILY.pipelines["t2i"], **settings}))
        check_distilled(model, pytest.fail)
        with pytest.raises(CheckpointMismatch, match=r"model\.assistant: .* is not distilled"):
            check_distilled(assisted, pytest.fail)


def test_a_negative_prompt_is_refused():
    prompt = {"name": "one", "prompt": "a cat"}
    with pytest.raises(ValueError, match="takes no negative prompt, and guides with an empty one; remove it"):
        made(validation={"prompts": [prompt | {"negative_prompt": "blurred"}]})
    made(validation={"prompts": [prompt | {"negative_prompt": ""}]})
    made("z-image", validation={"prompts": [prompt | {"negative_prompt": "blurred"}]})


def test_blocks_are_counted_of_both_kinds():
    assert FAMILY.count_layers({"num_layers": 5, "num_single_layers": 20}) == 25
    assert FAMILY.count_layers({"num_layers": 5}) is None
    assert FAMILIES["sana"].count_layers({"num_layers": 20}) == 20


def test_both_sizes_have_the_widths_of_their_encoders():
    for name, width in (("klein-base-4b", 7680), ("klein-base-9b", 12288)):
        flavour = FAMILY.flavours[name]
        encoder = FAMILY.published_shape("text_encoder", flavour)
        assert FAMILY.published_text_width(flavour) == width == 3 * encoder["hidden_size"]
        assert FAMILY.published_shape("transformer", flavour)["joint_attention_dim"] == width
    image = FAMILIES["kandinsky5-image"]
    assert image.published_text_width(image.flavours["t2i-lite-sft"]) == image.text_width


def test_every_text_takes_the_whole_length():
    """Also an empty one, in estimates."""
    config = made(text={"precision": "bfloat16"})
    texts = pa.Table.from_pylist([{"text": text} for text in ("", "a cat", "word " * 3000)], TEXTS_SCHEMA)
    assert text_tensor_bytes(config.model, config.text, texts).tolist() == [2 * 512 * 7680] * 3
    shorter = made(text={"precision": "bfloat16", "max_length": 128})
    assert text_tensor_bytes(shorter.model, shorter.text, texts).tolist() == [2 * 128 * 7680] * 3
    other = made("z-image")
    others = text_tensor_bytes(other.model, other.text, texts).tolist()
    assert others[0] < others[1] < others[2]


def test_padding_is_in_the_name_of_a_cache_where_it_is_stored():
    flux = made()
    assert text_settings(flux.model, flux.text)["padded"] is True
    for other in map(made, ("z-image", "qwen-image", "sana")):
        assert not text_settings(other.model, other.text)["padded"]
