"""import-config: another trainer's configuration becomes a pipeline.yaml that loads, and every key has an answer."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from schemas.config.loading import load_config
from schemas.config.pipeline import Config
from schemas.config.yaml_reader import parse_yaml
from schemas.errors import INCOMPLETE, OK, USAGE
from stages import bucket, discover, encode_latents, encode_text, import_config, index
from tests.foreign_examples import EXAMPLES
from tests.forms import long
from tests.project import Project

FIRST = {name: next(iter(files)) for name, (files, _, _) in EXAMPLES.items()}


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "media").mkdir(exist_ok=True)


def program(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and report; pipeline.yaml is beside the files."""
    given = [str(folder / word) if (folder / word).is_file() else word for word in arguments]
    ended = CliRunner().invoke(import_config.app, [*given, "--config", str(folder / "pipeline.yaml"), "--json"])
    assert ended.stdout, ended.stderr or ended.exception
    return ended.exit_code, json.loads(ended.stdout)


def imported(folder: Path, files: dict[str, str], *arguments: str) -> tuple[Config, dict[str, Any]]:
    write(folder, files)
    code, report = program(folder, next(iter(files)), *arguments)
    assert code in (OK, INCOMPLETE), report
    return load_config(folder / "pipeline.yaml"), report


def arguments(folder: Path, **given: Any) -> tuple[Config, dict[str, str]]:
    """A SimpleTuner configuration with these arguments, and what became of each: key -> outcome."""
    base = {"model_family": "sana", "max_train_steps": 100, **given}
    backends = json.dumps([{"id": "photos", "instance_data_dir": "media", "type": "local"}])
    config, report = imported(
        folder, {"config.json": json.dumps(base | {"data_backend_config": "b.json"}), "b.json": backends}
    )
    outcomes = {row["key"]: "carried over" for row in report["details"]["carried_over"]}
    outcomes |= {row["key"]: "not needed" for row in report["details"]["not_needed"]}
    return config, outcomes | {row["item"]: row["reason"] for row in report["failed"]}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_each_trainer_becomes_a_configuration_that_loads(name: str, tmp_path: Path) -> None:
    files, _, code = EXAMPLES[name]
    write(tmp_path, files)
    ended, report = program(tmp_path, FIRST[name])
    assert ended == code, report["failed"]
    config = load_config(tmp_path / "pipeline.yaml")
    dataset = config.datasets[0]
    assert dataset.instance_data_dir == str(tmp_path / "media")
    assert dataset.resolution == 64 and dataset.resolution_type == "pixel_area"
    assert config.train.adapter.rank == 4 and config.train.steps in (1, 2)
    text = (tmp_path / "pipeline.yaml").read_text()
    assert report["details"]["pipeline"] == text
    assert "hf_0123456789" not in text + json.dumps(report)
    ended, again = program(tmp_path, FIRST[name])
    assert ended == USAGE and "is there already" in again["error"]["message"]
    assert program(tmp_path, FIRST[name], "--overwrite")[0] == code


def test_values_have_the_meaning_that_they_have_there(tmp_path: Path) -> None:
    made = {name: imported(tmp_path / name, EXAMPLES[name][0])[0] for name in EXAMPLES}
    train = {name: config.train for name, config in made.items()}
    assert {name: config.model.family for name, config in made.items()} == {
        "simpletuner": "kandinsky5-image",
        "musubi-tuner": "wan2.1",
        "ai-toolkit": "z-image",
    }
    # repeats: extra passes there for SimpleTuner alone
    assert [config.datasets[0].repeats for config in made.values()] == [10, 2, 1]
    # without an alpha musubi's is 1
    assert [section.adapter.alpha for section in train.values()] == [None, 1.0, 4.0]
    # diffusers' constant schedule has no warm-up
    assert [section.optimizer.warmup for section in train.values()] == [0, 0, 0]
    assert [section.caption_dropout for section in train.values()] == [0.1, 0.0, 0.05]
    assert [section.shift for section in train.values()] == [1.5, 3.0, 1.0]
    assert [section.batch_size * section.accumulate for section in train.values()] == [2, 1, 2]
    assert train["musubi-tuner"].optimizer.weight_decay == 0.05
    assert made["musubi-tuner"].datasets[0].video.num_frames == 9
    assert made["simpletuner"].datasets[0].crop_style == "random"  # its default
    assert made["ai-toolkit"].datasets[0].prepend == "p3r5on, "
    prompt = made["musubi-tuner"].validation.prompts[0]
    assert (prompt.prompt, prompt.size, prompt.seed, prompt.steps, prompt.guidance, prompt.negative_prompt) == (
        "a clip of the sea", "64x64@9", 7, 2, 5.0, "blurry",
    )  # fmt: skip
    assert made["simpletuner"].validation.prompts[0].prompt == "a photo of <token>"


def test_a_key_that_is_unknown_or_has_no_counterpart_is_named_and_the_rest_carried_over(tmp_path: Path) -> None:
    config, outcomes = arguments(
        tmp_path,
        learning_rte=1,
        validation_external_script="touch ran",
        hub_token="hf_secret",
        base_model_precision="int4-quanto",
        flow_beta_schedule_alpha=3,
        lora_dropout=7,
        seed=5,
    )
    assert config.train.seed == 5 and config.train.base_precision == "no_change"
    expected = {
        "learning_rte": "unknown",
        "validation_external_script": "refused",
        "hub_token": "not needed",
        "base_model_precision": "refused",
        "flow_beta_schedule_alpha": "not needed",  # of another distribution
        "lora_dropout": "refused",  # the configuration allows less than 1
        "seed": "carried over",
    }
    assert {key: outcomes[key] for key in expected} == expected
    text = (tmp_path / "pipeline.yaml").read_text()
    assert "learning_rte: unknown" in text and "hf_secret" not in text


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"lr_scheduler": "cosine", "lr_warmup_steps": 0.1}, {"schedule": "cosine", "warmup": 10}),
        ({"lr_scheduler": "polynomial", "lr_power": 1, "lr_end": 1e-6, "learning_rate": "1e-4"}, {"power": 1.0}),
        ({"lr_scheduler": "cosine_with_restarts", "lr_num_cycles": 3}, {"schedule": "cosine", "cycles": 3}),
        ({"optimizer": "adamw_bf16"}, {"name": "adamw", "betas": (0.9, 0.999)}),
        ({"optimizer_beta1": 0.8, "optimizer": "bnb-adamw8bit"}, {"betas": (0.8, 0.999), "name": "bnb-adamw8bit"}),
        ({"optimizer": "prodigy", "optimizer_config": "d_coef=0.1"}, {"arguments": {"d_coef": 0.1}}),
        ({"optimizer": "optimi-ranger"}, {"name": "optimi.Ranger"}),
    ],
)
def test_optimizers(given: dict[str, Any], found: dict[str, Any], tmp_path: Path) -> None:
    optimizer = arguments(tmp_path, **given)[0].train.optimizer
    assert {key: getattr(optimizer, key) for key in found} == found


def test_epochs_are_counted_in_steps_where_the_files_are_there(tmp_path: Path) -> None:
    write(tmp_path, {})
    for number in range(5):
        (tmp_path / "media" / f"{number}.png").write_bytes(b"")
    given = {"max_train_steps": 0, "num_train_epochs": 3, "train_batch_size": 2, "gradient_accumulation_steps": 2}
    config, outcomes = arguments(tmp_path, **given)
    assert config.train.steps == 4 and outcomes["num_train_epochs"] == "carried over"  # 3 x 5 / 4, rounded up
    for file in (tmp_path / "media").iterdir():
        file.unlink()
    (tmp_path / "pipeline.yaml").unlink()
    config, outcomes = arguments(tmp_path, **given)
    assert config.train.steps == 1000 and outcomes["num_train_epochs"] == "refused"


def test_masks_and_source_images_join_the_dataset_that_names_them(tmp_path: Path) -> None:
    backends = [
        {"id": "photos", "type": "local", "instance_data_dir": "media", "conditioning_data": ["m", "r"]},
        {"id": "m", "dataset_type": "conditioning", "conditioning_type": "mask", "instance_data_dir": "masks"},
        {
            "id": "r",
            "dataset_type": "conditioning",
            "conditioning_type": "reference_strict",
            "instance_data_dir": "from",
        },
    ]
    given = {"model_family": "kandinsky5-image", "model_flavour": "i2i-lite-sft", "data_backend_config": "b.json"}
    files = {"config.json": json.dumps(given | {"masked_loss_probability": 0.75}), "b.json": json.dumps(backends)}
    config, _ = imported(tmp_path, files)
    (dataset,) = config.datasets
    assert (dataset.mask_data, dataset.conditioning_data) == (str(tmp_path / "masks"), str(tmp_path / "from"))
    assert config.train.methods.masked_loss and config.train.methods.masked_loss.unmasked_probability == 0.25


def test_a_shell_script_is_read_and_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    script = f"""#!/bin/bash
export MODEL_FAMILY=sana
export MODEL_TYPE='lora'
STEPS=300
export MAX_NUM_STEPS=$STEPS   # a remark
export LEARNING_RATE=$(touch {marker}; echo 1)
export TRAINING_SEED=`touch {marker}`
export OUTPUT_DIR="$HOME/out"
export DATALOADER_CONFIG=b.json
export HF_TOKEN=hf_secret
touch {marker}
export TRAINER_EXTRA_ARGS="--lora_rank=8"
export TRAINER_EXTRA_ARGS="${{TRAINER_EXTRA_ARGS}} --validation_guidance 4.5"
"""
    backends = json.dumps([{"id": "photos", "type": "local", "instance_data_dir": "media"}])
    config, report = imported(tmp_path, {"config.env": script, "b.json": backends})
    assert not marker.exists()
    assert config.train.steps == 300 and config.train.adapter.rank == 8 and config.validation.guidance == 4.5
    reasons = {row["item"]: row["message"] for row in report["failed"]}
    assert "output of a command" in reasons["config.env: LEARNING_RATE"] + reasons["config.env: TRAINING_SEED"]
    assert "$HOME" in reasons["config.env: OUTPUT_DIR"]
    assert any("never run" in reason for reason in reasons.values())
    assert "hf_secret" not in json.dumps(report)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("simpletuner", '"--train_batch_size": 2', '"--train_batch_size": [{}]'),
        ("ai-toolkit", "{type: lora, linear: 4, linear_alpha: 4}", "[4]"),
        long("musubi-tuner", "target_frames = [9]", "target_frames = 'nine'"),
        long("ai-toolkit", "prompts: [a cat on a wall]", "prompts: {a: [1]}"),
    ],
)
def test_a_value_of_another_kind_is_named(name: str, old: str, new: str, tmp_path: Path) -> None:
    files = {file: text.replace(old, new) for file, text in EXAMPLES[name][0].items()}
    assert files != EXAMPLES[name][0]
    write(tmp_path, files)
    code, report = program(tmp_path, FIRST[name])
    assert code in (OK, INCOMPLETE, USAGE), report
    assert code == OK or "error" in report or any(row["reason"] == "refused" for row in report["failed"])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", '{"model_family": "sdxl", "data_backend_config": "b.json"}', "model.family=NAME"),
        ("config.json", '{"model_family": ', "config.json:1: not valid JSON"),
        ("job.yaml", "- 1", "no trainer's configuration is recognized"),
        ("a.toml", "x = [", "not valid TOML"),
    ],
)
def test_what_can_not_be_imported_ends_with_2_and_writes_nothing(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    write(tmp_path, {name: text})
    code, report = program(tmp_path, name)
    assert code == USAGE and message in report["error"]["message"] + report["error"]["next_step"]
    assert not (tmp_path / "pipeline.yaml").exists()


def test_a_dry_run_prints_the_configuration_and_writes_nothing(tmp_path: Path) -> None:
    write(tmp_path, EXAMPLES["ai-toolkit"][0])
    target = tmp_path / "pipeline.yaml"
    ended = CliRunner().invoke(
        import_config.app, [str(tmp_path / "job.yaml"), "--dry-run", "--config", str(target)], env={"COLUMNS": "120"}
    )
    text, report = ended.stdout.split("import-config (dry run)")
    assert not target.exists() and parse_yaml(text).value["model"]["family"] == "z-image"
    assert re.search(r"train\.steps +train\.steps: 2", report)


QUICKSTARTS = """
    model_type model_family model_flavour pretrained_model_name_or_path output_dir train_batch_size
    gradient_accumulation_steps validation_resolution validation_guidance validation_num_inference_steps
    validation_num_video_frames validation_using_datasets eval_dataset_id validation_preview validation_preview_steps
    flow_schedule_shift flow_schedule_auto_shift user_prompt_library base_model_precision text_encoder_1_precision
    text_encoder_2_precision lora_rank lora_type base_model_default_dtype enable_group_offload group_offload_type
    group_offload_blocks_per_group group_offload_use_stream enable_model_cpu_offload offload_during_startup tread_config
    crepa_enabled crepa_block_index crepa_lambda crepa_adjacent_distance crepa_adjacent_tau crepa_model
    crepa_encoder_image_size crepa_drop_vae_encoder vae_enable_patch_conv use_ema optimizer mixed_precision
    gradient_checkpointing gradient_checkpointing_interval data_backend_config vae_batch_size vae_cache_disable
    quantize_via push_to_hub report_to learning_rate framerate
"""


def test_every_key_of_the_quickstarts_of_our_families_is_known(tmp_path: Path) -> None:
    from schemas.foreign.simpletuner import SECTIONS

    assert [key for key in QUICKSTARTS.split() if key not in SECTIONS["arguments"].rows] == []
    dataset = """
        id type dataset_type instance_data_dir caption_strategy resolution crop crop_aspect repeats default cache_dir
        disabled crop_style minimum_image_size maximum_image_size target_downsample_size resolution_type cache_dir_vae
        skip_file_discovery metadata_backend is_regularisation_data instance_prompt write_batch_size"""
    assert [key for key in dataset.split() if key not in SECTIONS["datasets"].rows] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [name if name == "simpletuner" else long(name) for name in EXAMPLES])
def test_an_imported_example_runs_as_a_rehearsal(name: str, tmp_path: Path, tiny: Callable[[str], Path]) -> None:
    from trainer.__main__ import run as train

    files, kind, _ = EXAMPLES[name]
    write(tmp_path, files)
    program(tmp_path, FIRST[name])
    settings = parse_yaml((tmp_path / "pipeline.yaml").read_text()).value
    project = Project(tmp_path, settings)
    settings["model"] |= {"path": str(tiny(kind)), "precision": "float32"}
    settings["datasets"][0] |= {"bucket_step": 1}
    settings["train"]["threads"] = 1
    for number in range(3):
        if kind.startswith("wan"):
            project.video(f"{number}.mp4", size=(64, 64))
        else:
            project.image(f"{number}.png", (64, 64), f"picture {number}, of something", number)
    for stage in (discover.run, bucket.run, encode_text.run, encode_latents.run, index.run, train):
        assert project.run(stage).exit_code == OK
    assert list(tmp_path.rglob("pytorch_lora_weights.safetensors"))
