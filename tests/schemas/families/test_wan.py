"""Effects of the rows of Wan."""

import json
import re

import pytest

from cache.models.compatibility import CheckpointMismatch, check_component, check_task, check_transformer
from schemas.catalog import FAMILIES
from schemas.config.pipeline import Config
from schemas.recipe import latents_settings, plan_key
from tests.forms import long


def make_config(family: str, flavour: str | None = None, video: dict | None = None, **sections) -> Config:
    dataset = {"id": "clips", "instance_data_dir": "clips", "dataset_type": "video", "video": video or {}}
    model = {"family": family, "flavour": flavour} | sections.pop("model", {})
    return Config.model_validate({"root": "work", "model": model, "datasets": [dataset], **sections})


@pytest.mark.parametrize(("family", "rate"), [("wan2.1", 16.0), ("wan2.2-5b", 24.0), ("kandinsky5-video", 24.0)])
def test_the_rate_of_frames_is_the_familys_where_none_is_given(family, rate):
    config = make_config(family)
    assert config.datasets[0].video.frame_rate == config.clip_rate == rate == FAMILIES[family].frame_rate
    configured = make_config(family, video={"frame_rate": 12.0})
    assert configured.datasets[0].video.frame_rate == configured.clip_rate == 12.0
    assert make_config(family, validation={"fps": 8.0}).clip_rate == 8.0
    assert (
        plan_key(make_config(family, video={"frame_rate": rate}), 16)
        == plan_key(config, 16)
        != plan_key(configured, 16)
    )


def test_more_tokens_than_the_transformer_reads_are_refused():
    assert make_config("wan2.1", text={"max_length": 256}).text.max_length == 256
    with pytest.raises(ValueError, match=re.escape("wan2.1 reads at most 512 tokens")):
        make_config("wan2.1", text={"max_length": 1024})


def test_only_a_condition_with_the_mean_is_in_the_fingerprint():
    config = make_config("wan2.2-5b", "i2v-5b")
    assert latents_settings(config.model, config.latents)["condition_posterior"] == "mode"
    for config in (make_config("wan2.2-5b", "t2v-5b"), make_config("kandinsky5-video", "i2v-lite-5s")):
        assert "condition_posterior" not in latents_settings(config.model, config.latents)


def model_of(folder, family, flavour):
    return make_config(family, flavour, model={"path": str(folder)}).model


@pytest.mark.slow
def test_one_checkpoint_is_valid_for_both_tasks_and_no_other_family(tiny):
    """5B's model_index.json names the pipeline of t2v."""
    folder = tiny("wan2.2-5b-t2v")
    for flavour in ("t2v-5b", "i2v-5b"):
        model = model_of(folder, "wan2.2-5b", flavour)
        check_task(model)
        check_transformer(model)
        check_component(model, "vae")
    wan_2_1 = model_of(folder, "wan2.1", "t2v-1.3b")
    with pytest.raises(CheckpointMismatch, match=r"the pipeline of wan2\.1 needs false"):
        check_task(wan_2_1)
    with pytest.raises(CheckpointMismatch, match=r"wan2\.1 t2v needs 16"):
        check_transformer(wan_2_1)
    with pytest.raises(CheckpointMismatch, match="z_dim = 48"):
        check_component(wan_2_1, "vae")
    with pytest.raises(CheckpointMismatch, match=r"checkpoint for wan2\.1 t2v, wan2\.2-5b t2v"):
        check_task(model_of(folder, "kandinsky5-video", "t2v-lite-sft-5s"))


@pytest.mark.parametrize("second", ["transformer_2", long("transformer_3")])
def test_a_checkpoint_of_two_experts_is_refused(tmp_path, second):
    """Trained as the first alone, it would learn noise levels that it never predicts."""
    index = {"_class_name": FAMILIES["wan2.1"].pipelines["t2v"], "transformer": ["diffusers", "WanTransformer3DModel"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index | {second: ["diffusers", "WanTransformer3DModel"]}))
    model = model_of(tmp_path, "wan2.1", "t2v-14b")
    with pytest.raises(CheckpointMismatch, match=second):
        check_task(model)
    (tmp_path / "model_index.json").write_text(json.dumps(index | {second: [None, None]}))
    check_task(model)


@pytest.mark.parametrize(
    ("stated", "message"), [({"expand_timesteps": False}, "expand_timesteps: false"), ({}, "no expand")]
)
def test_a_pipeline_with_one_noise_level_for_all_frames_is_refused(tmp_path, stated, message):
    """With it diffusers would give 5B's first frame noise, and encode it as a checkpoint of 2.1 does."""
    index = {"_class_name": FAMILIES["wan2.2-5b"].pipelines["t2v"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index | stated))
    with pytest.raises(CheckpointMismatch, match=f"has {message}.* needs true"):
        check_task(model_of(tmp_path, "wan2.2-5b", "t2v-5b"))
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"expand_timesteps": True}))
    check_task(model_of(tmp_path, "wan2.2-5b", "t2v-5b"))
