"""Effects of the rows of FLUX.2 klein."""

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


def make_config(family: str = "flux2-klein", flavour: str | None = None, **sections) -> Config:
    model = {"family": family, "flavour": flavour} | sections.pop("model", {})
    dataset = {"id": "a", "instance_data_dir": "a"}
    return Config.model_validate({"root": "work", "model": model, "datasets": [dataset], **sections})


@pytest.mark.parametrize("size", ["4b", "9b"])
def test_distilled_flavours_and_repositories_are_refused(size):
    distilled, base = (FAMILY.flavours[f"klein-{infix}{size}"] for infix in ("", "base-"))
    for model in (make_config(flavour=distilled.name).model, make_config(model={"path": distilled.repo}).model):
        with pytest.raises(CheckpointMismatch, match=f"{distilled.name} was distilled") as caught:
            check_distilled(model, print)
        assert f"train {base.name} ({base.repo})" in caught.value.next_step
    check_distilled(make_config(flavour=base.name).model, pytest.fail)


def test_model_index_states_whether_a_folder_is_distilled(tmp_path):
    """As in the pipeline, a missing key means that it is not distilled."""
    index, remarks = tmp_path / "model_index.json", list[str]()
    model = make_config(model={"path": str(tmp_path)}).model
    assisted = make_config(model={"path": str(tmp_path), "assistant": "file.safetensors"}).model
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
    with pytest.raises(ValueError, match=r"flux2-klein.* remove it from prompt 'one'"):
        make_config(validation={"prompts": [prompt | {"negative_prompt": "blurred"}]})
    make_config(validation={"prompts": [prompt | {"negative_prompt": ""}]})
    make_config("z-image", validation={"prompts": [prompt | {"negative_prompt": "blurred"}]})


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


def test_every_text_has_the_maximum_length():
    """Also an empty one, in estimates."""
    config = make_config(text={"precision": "bfloat16"})
    texts = pa.Table.from_pylist([{"text": text} for text in ("", "a cat", "word " * 3000)], TEXTS_SCHEMA)
    assert text_tensor_bytes(config.model, config.text, texts).tolist() == [2 * 512 * 7680] * 3
    shorter = make_config(text={"precision": "bfloat16", "max_length": 128})
    assert text_tensor_bytes(shorter.model, shorter.text, texts).tolist() == [2 * 128 * 7680] * 3
    z_image = make_config("z-image")
    sizes = text_tensor_bytes(z_image.model, z_image.text, texts).tolist()
    assert sizes[0] < sizes[1] < sizes[2]


def test_stored_padding_is_in_the_fingerprint():
    flux = make_config()
    assert text_settings(flux.model, flux.text)["padded"] is True
    for config in map(make_config, ("z-image", "qwen-image", "sana")):
        assert not text_settings(config.model, config.text)["padded"]
