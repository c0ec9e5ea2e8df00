"""import-config: another trainer's configuration becomes a valid pipeline.yaml, and each key has an outcome."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from schemas.config.loading import load_config
from schemas.config.pipeline import Config
from schemas.config.yaml_reader import parse_yaml
from schemas.errors import INCOMPLETE, OK, USAGE
from schemas.geometry import resolution_buckets
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
    """Returns (exit code, report). pipeline.yaml is written next to the files."""
    words = [str(folder / word) if (folder / word).is_file() else word for word in arguments]
    ended = CliRunner().invoke(import_config.app, [*words, "--config", str(folder / "pipeline.yaml"), "--json"])
    assert ended.stdout, ended.stderr or ended.exception
    return ended.exit_code, json.loads(ended.stdout)


def imported(folder: Path, files: dict[str, str], *arguments: str) -> tuple[Config, dict[str, str]]:
    """Returns (configuration, outcome of each key)."""
    write(folder, files)
    code, report = program(folder, next(iter(files)), *arguments)
    assert code in (OK, INCOMPLETE), report
    details = report["details"]
    outcomes = {row["key"]: "needs nothing" for row in details["not_needed"]}
    outcomes |= {row["key"]: row["becomes"] for row in details["carried_over"]}
    outcomes |= {row["item"]: f"not carried over: {row['message']}" for row in report["failed"]}
    return load_config(folder / "pipeline.yaml"), outcomes


def simpletuner(folder: Path, dataset: dict[str, Any] | None = None, **options: Any) -> tuple[Config, dict[str, str]]:
    base = {"model_family": "kandinsky5-image", "model_type": "lora", "max_train_steps": 100, **options}
    backends = [{"id": "photos", "instance_data_dir": "media", "type": "local", **(dataset or {})}]
    config = json.dumps(base | {"data_backend_config": "b.json"})
    return imported(folder, {"config.json": config, "b.json": json.dumps(backends)})


VIDEO = 'video_directory = "media"\n'


def musubi(folder: Path, words: str, program: str = "wan_train_network.py", data: str = VIDEO) -> Config:
    data = f"[general]\n[[datasets]]\n{data}\n"
    network = "" if "network" in words else "--network_module networks.lora_wan"
    script = f"python {program} --dataset_config d.toml --dit wan.safetensors {network} {words}"
    return imported(folder, {"train.sh": script, "d.toml": data})[0]


def ai_toolkit(folder: Path, **sections: Any) -> tuple[Config, dict[str, str]]:
    process: dict[str, Any] = {"type": "sd_trainer", "datasets": [{"folder_path": "media"}]}
    process |= {"model": {"name_or_path": "Tongyi-MAI/Z-Image", "arch": "zimage"}, "network": {"type": "lora"}}
    job = {"job": "extension", "config": {"name": "a", "process": [process | sections]}}
    return imported(folder, {"job.yaml": json.dumps(job)})


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
    ended, second_report = program(tmp_path, FIRST[name])
    assert (
        ended == USAGE
        and "pipeline.yaml" in second_report["error"]["message"]
        and "--overwrite" in second_report["error"]["next_step"]
    )
    assert program(tmp_path, FIRST[name], "--overwrite")[0] == code


def test_values_have_the_meaning_that_they_have_there(tmp_path: Path) -> None:
    configs = {name: imported(tmp_path / name, EXAMPLES[name][0])[0] for name in EXAMPLES}
    train = {name: config.train for name, config in configs.items()}
    # repeats: extra passes only for SimpleTuner
    assert [config.datasets[0].repeats for config in configs.values()] == [10, 2, 1]
    # alpha: by default 1 for musubi-tuner; always the rank for ai-toolkit
    assert [section.adapter.alpha for section in train.values()] == [None, 1.0, None]
    # diffusers' constant schedule has no warm-up
    assert [section.optimizer.warmup for section in train.values()] == [0, 0, 0]
    assert [section.caption_dropout for section in train.values()] == [0.1, 0.0, 0.05]
    assert [section.shift for section in train.values()] == [1.5, 3.0, 1.0]
    assert [section.batch_size * section.accumulate for section in train.values()] == [2, 1, 2]
    assert train["musubi-tuner"].optimizer.weight_decay == 0.05
    # a caption file has one caption, except for SimpleTuner, which splits it into lines
    assert [config.datasets[0].captions_per_file for config in configs.values()] == ["lines", "one", "one"]
    assert configs["musubi-tuner"].datasets[0].video.num_frames == 9
    assert configs["simpletuner"].datasets[0].crop_style == "random"  # SimpleTuner's default
    prompt = configs["musubi-tuner"].validation.prompts[0]
    assert (prompt.prompt, prompt.size, prompt.seed, prompt.steps, prompt.guidance, prompt.negative_prompt) == (
        "a clip of the sea", "64x64@9", 7, 2, 5.0, "blurry",
    )  # fmt: skip
    assert configs["simpletuner"].validation.prompts[0].prompt == "a photo of <token>"


def test_zero_means_never_and_all_as_in_the_other_trainers(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
    first = simpletuner(tmp_path / "a", validation_step_interval=0, checkpoints_total_limit=0)[0]
    second = musubi(tmp_path / "b", "--task t2v-1.3B --sample_every_n_steps 0")
    third = ai_toolkit(tmp_path / "c", sample={"sample_every": 0}, save={"max_step_saves_to_keep": 0})[0]
    assert [config.validation.every for config in (first, second, third)] == [0, 0, 0]
    assert min(first.train.keep_checkpoints, third.train.keep_checkpoints) > 10**6


# -- outcomes of keys


def test_a_key_without_counterpart_is_printed_with_its_value(tmp_path: Path) -> None:
    config, outcomes = simpletuner(
        tmp_path,
        learning_rte=1,
        placement="s3://me:word@host/x",
        validation_external_script="touch ran",
        hub_token="hf_secret",
        flow_beta_schedule_alpha=3,
        seed=5,
        offset_noise=False,
        noise_offset=0.0,
        webhook_config="",
        some_list=[],
    )
    assert config.train.seed == 5
    assert outcomes["learning_rte"] == "not carried over: 1"
    assert outcomes["validation_external_script"] == "not carried over: touch ran"
    idle = ("hub_token", "flow_beta_schedule_alpha", "offset_noise", "noise_offset", "webhook_config", "some_list")
    assert {outcomes[key] for key in idle} == {"needs nothing"}
    text = (tmp_path / "pipeline.yaml").read_text()
    assert "#   learning_rte: 1\n" in text and "hf_secret" not in text and "word@" not in text


def test_a_value_that_is_not_possible_becomes_the_nearest_with_a_comment(tmp_path: Path) -> None:
    config, outcomes = simpletuner(
        tmp_path, base_model_precision="int4-quanto", lora_dropout=7, train_batch_size=[{}], loss_type="wavelet"
    )
    assert config.train.base_precision == "nf4-bnb" and config.train.loss.type == "smooth_l1"
    assert config.train.adapter.dropout == 0.99 and config.train.batch_size == 4  # musubi-tuner's default
    text = (tmp_path / "pipeline.yaml").read_text()
    assert re.search(r"base_precision: nf4-bnb +# base_model_precision, nearest to int4-quanto", text)
    assert re.search(r"batch_size: 4 +# train_batch_size, SimpleTuner's default", text)
    assert outcomes["train_batch_size"].startswith("not carried over: [{}]")


def test_a_file_of_datasets_brings_no_defaults_of_training(tmp_path: Path) -> None:
    backends = json.dumps([{"id": "photos", "instance_data_dir": "media", "type": "local"}])
    config, _ = imported(tmp_path, {"b.json": backends}, "--set", "model.family=sana")
    assert config.train.model_fields_set == set()
    config, _ = imported(
        tmp_path / "b", {"d.toml": '[[datasets]]\nimage_directory = "media"\n'}, "--set", "model.family=sana"
    )
    assert config.train.model_fields_set == {"batch_size"}  # of the dataset


def test_output_folders_are_not_looked_for_and_windows_paths_are_named(tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    folder = tmp_path / "config"
    config, outcomes = simpletuner(folder, {"instance_data_dir": "D:/photos"}, output_dir="output")
    assert config.output == str(folder / "output")
    assert outcomes["photos: instance_data_dir"].startswith("not carried over: D:/photos")
    assert "instance_data_dir: D:/photos" in (folder / "pipeline.yaml").read_text()


# -- SimpleTuner


def test_simpletuner_has_other_defaults(tmp_path: Path) -> None:
    config, _ = simpletuner(tmp_path, validation_prompt="a cat")
    train, optimizer = config.train, config.train.optimizer
    assert (train.batch_size, train.shift, train.caption_dropout, train.gradient_checkpointing) == (4, 3.0, 0.1, True)
    assert (train.adapter.rank, train.adapter.dropout, train.keep_checkpoints) == (16, 0.1, 5)
    assert (optimizer.name, optimizer.lr, optimizer.betas, optimizer.eps) == ("adamw", 4e-7, (0.9, 0.999), 1e-6)
    assert (optimizer.schedule, optimizer.warmup) == ("constant", 0)
    assert optimizer.max_grad_norm == 1e9, "this trainer clips gradients by value"
    assert config.datasets[0].caption_strategy == "filename" and config.datasets[0].resolution == 1024
    assert (config.validation.guidance, config.validation.steps, config.validation.size) == (7.5, 30, "256x256")
    assert config.validation.prompts[0].negative_prompt == "blurry, cropped, ugly"
    assert simpletuner(tmp_path / "full", model_type="")[0].train.adapter.type == "full"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # half a period is lr_warmup_steps, without a warm-up
        ({"lr_scheduler": "cosine", "lr_warmup_steps": 100}, {"schedule": "cosine", "warmup": 0, "cycles": 1}),
        ({"lr_scheduler": "cosine", "lr_warmup_steps": 10}, {"warmup": 0, "cycles": 5, "lr_end": 4e-7}),
        ({"lr_scheduler": "polynomial", "learning_rate": "1e-4", "lr_warmup_steps": 9}, {"power": 0.8, "warmup": 9}),
        ({"lr_scheduler": "polynomial", "lr_power": 1, "lr_end": 1e-7}, {"power": 1.0, "lr_end": 1e-7}),
        ({"lr_scheduler": "cosine_with_restarts", "lr_warmup_steps": 25}, {"schedule": "cosine", "cycles": 4}),
        ({"lr_warmup_steps": 7}, {"schedule": "constant", "warmup": 7}),
        ({"optimizer_beta1": 0.8, "optimizer": "bnb-adamw8bit"}, {"betas": (0.8, 0.999), "name": "bnb-adamw8bit"}),
        ({"optimizer": "prodigy", "optimizer_config": "d_coef=0.1"}, {"arguments": {"d_coef": 0.1}}),
        ({"optimizer": "optimi-ranger"}, {"name": "optimi.Ranger"}),
        ({"grad_clip_method": "norm", "max_grad_norm": 0.5}, {"max_grad_norm": 0.5}),
    ],
)
def test_optimizers(options: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    optimizer = simpletuner(tmp_path, **options)[0].train.optimizer
    assert {key: getattr(optimizer, key) for key in expected} == expected


def test_the_rank_and_alpha_of_a_lora_do_not_apply_with_lycoris(tmp_path: Path) -> None:
    lycoris = {"algo": "lokr", "linear_dim": 10000, "linear_alpha": 1, "factor": 12}
    options = {"lora_type": "lycoris", "lora_rank": 4, "lora_alpha": 2, "lycoris_config": lycoris}
    adapter = simpletuner(tmp_path, **options)[0].train.adapter
    assert (adapter.type, adapter.rank, adapter.alpha, adapter.decompose_factor) == ("lokr", 10000, None, 12)
    options["lycoris_config"] = {"algo": "lora"}
    adapter = simpletuner(tmp_path / "lora", **options)[0].train.adapter
    assert (adapter.type, adapter.rank, adapter.alpha, adapter.dropout) == ("lora", 4, 1.0, 0.0)  # LyCORIS' defaults


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"model_family": "sana", "flow_schedule_shift": 7}, ("uniform", 3.0, False)),
        ({"flow_schedule_auto_shift": True}, ("logit_normal", 3.0, False)),  # a shift comes first
        ({"flow_schedule_auto_shift": True, "flow_schedule_shift": 0}, ("logit_normal", None, True)),
        ({"flow_schedule_shift": 0}, ("logit_normal", 1.0, False)),
        ({"flow_use_beta_schedule": True}, ("beta", 3.0, False)),
    ],
)
def test_noise_levels(options: dict[str, Any], expected: tuple[Any, ...], tmp_path: Path) -> None:
    train = simpletuner(tmp_path, **options)[0].train
    assert (train.timesteps.sampling, train.shift, train.timesteps.auto_shift) == expected


def test_turbo_brings_its_assistant(tmp_path: Path) -> None:
    config, outcomes = simpletuner(tmp_path, model_family="z-image")
    assert config.model.flavour == "z-image-turbo" and config.model.assistant
    assert Path(config.model.assistant).name == "zimage_turbo_training_adapter_v2.safetensors"
    assert "ostris/zimage_turbo_training_adapter/" in outcomes["assistant_lora_path"]
    more = {"disable_assistant_lora": True, "model_flavour": "turbo"}
    assert simpletuner(tmp_path / "off", model_family="z-image", **more)[0].model.assistant is None


def test_krea_2_of_each_trainer(tmp_path: Path) -> None:
    words = "--network_module networks.lora_krea2 --timestep_sampling krea2_shift"
    config = musubi(tmp_path / "musubi", words, "krea2_train_network.py", 'image_directory = "media"')
    assert (config.model.family, config.model.flavour_spec.name) == (
        "krea2",
        "krea-2-raw",
    ) and config.train.timesteps.auto_shift
    for name, flavour in (("krea/Krea-2-Raw", "krea-2-raw"), ("krea/Krea-2-Turbo", "krea-2-turbo")):
        model = {"name_or_path": name, "arch": "krea2"}
        config, _ = ai_toolkit(tmp_path / flavour, model=model)
        assert (config.model.family, config.model.flavour_spec.name) == ("krea2", flavour)
    config, _ = simpletuner(tmp_path / "simpletuner", model_family="krea2")
    assert (config.model.family, config.model.flavour_spec.name) == ("krea2", "krea-2-raw")


def test_qwen_image_21_of_each_trainer(tmp_path: Path) -> None:
    data, words = 'image_directory = "media"', "--network_module networks.lora_qwen_image"
    for name, script in (("lora", "qwen_image_21_train_network.py"), ("full", "qwen_image_21_train.py")):
        config = musubi(tmp_path / name, f"{words}_21 --timestep_sampling qwen_shift", script, data)
        assert (config.model.family, config.train.adapter.type) == ("qwen-image-2.1", name)
        assert config.model.flavour_spec.name == "qwen-image-2.1" and config.train.timesteps.auto_shift
    earlier = musubi(tmp_path / "earlier", f"{words} --model_version original", "qwen_image_train_network.py", data)
    assert earlier.model.family == "qwen-image"
    for repo, flavour in (
        ("Comfy-Org/Qwen-Image-2.1", "qwen-image-2.1"),
        ("Qwen/Qwen-Image-2.1-Turbo", "qwen-image-2.1-turbo"),
    ):
        model = {"name_or_path": repo, "arch": "qwen_image_2"}
        config, _ = ai_toolkit(tmp_path / flavour, model=model)
        assert (config.model.family, config.model.flavour_spec.name) == ("qwen-image-2.1", flavour)
    config, outcomes = simpletuner(tmp_path / "v2.1", model_family="qwen_image", model_flavour="v2.1")
    assert (config.model.family, config.model.flavour_spec.name) == ("qwen-image-2.1", "qwen-image-2.1")
    assert "SimpleTuner/Qwen-Image-2.1-training-assistant-v3/" in outcomes["assistant_lora_path"]
    config, _ = simpletuner(tmp_path / "default", model_family="qwen_image")  # as in the release that was read
    assert config.model.flavour_spec.name == "qwen-image-2512" and config.model.assistant is None


def test_a_model_of_a_newer_release_is_found_by_its_repository(tmp_path: Path) -> None:
    """FLUX.3 Image, whatever the other trainer's name for it is; SimpleTuner trains it with its pipeline's shift."""
    repo = "black-forest-labs/flux-3-image-klein-base"
    config, outcomes = ai_toolkit(tmp_path / "ai-toolkit", model={"name_or_path": repo, "arch": "of-a-newer-release"})
    assert (config.model.family, config.model.flavour) == ("flux3", "klein-base")
    assert "model.flavour: klein-base" in outcomes["model.arch"]
    for number, more in enumerate(({}, {"model_flavour": "of-a-newer-release"})):
        options = {"model_family": "of-a-newer-release", "pretrained_model_name_or_path": repo, **more}
        config, outcomes = simpletuner(tmp_path / str(number), **options)
        assert (config.model.family, config.model.flavour) == ("flux3", "klein-base")
        assert config.train.shift is None and not any("not carried" in result for result in outcomes.values())


def test_regularization_data_are_their_own_target_with_full_rank(tmp_path: Path) -> None:
    options = {"is_regularisation_data": True}
    regularization = simpletuner(tmp_path, options, model_type="full")[0].train.methods.regularization
    assert regularization and regularization.target == "data"
    config, _ = simpletuner(tmp_path / "lora", options)
    assert config.train.methods.regularization is None and config.datasets[0].is_regularization_data


def test_a_caption_file_is_one_caption_where_it_is_not_split(tmp_path: Path) -> None:
    options = {"caption_strategy": "textfile", "disable_multiline_split": True}
    assert simpletuner(tmp_path, options)[0].datasets[0].captions_per_file == "one"


def test_epochs_are_counted_in_steps_if_the_files_exist(tmp_path: Path) -> None:
    write(tmp_path, {})
    for number in range(5):
        (tmp_path / "media" / f"{number}.png").write_bytes(b"")
    options = {"max_train_steps": 0, "num_train_epochs": 3, "train_batch_size": 2, "gradient_accumulation_steps": 2}
    assert simpletuner(tmp_path, **options)[0].train.steps == 4
    _, outcomes = simpletuner(tmp_path / "empty", **options)
    assert outcomes["num_train_epochs"] == "not carried over: 3"


def test_masks_and_source_images_join_the_dataset_that_names_them(tmp_path: Path) -> None:
    backends = [
        {"id": "a", "type": "local", "instance_data_dir": "media", "conditioning_data": ["m", "s"]},
        {"id": "m", "dataset_type": "conditioning", "conditioning_type": "mask", "instance_data_dir": "masks"},
        {
            "id": "s",
            "dataset_type": "conditioning",
            "conditioning_type": "reference_strict",
            "instance_data_dir": "from",
        },
    ]
    arguments = {"model_family": "qwen_image", "model_flavour": "edit-v1", "model_type": "lora", "max_train_steps": 9}
    arguments |= {"masked_loss_probability": 0.75, "data_backend_config": "b.json"}
    config, _ = imported(tmp_path, {"config.json": json.dumps(arguments), "b.json": json.dumps(backends)})
    (dataset,) = config.datasets
    assert (dataset.mask_data, dataset.conditioning_data) == (str(tmp_path / "masks"), str(tmp_path / "from"))
    assert config.train.methods.masked_loss and config.train.methods.masked_loss.unmasked_probability == 0.25


# -- musubi-tuner


@pytest.mark.parametrize(
    ("words", "script", "kind"),
    [
        ("--task t2v-14B", "wan_train_network.py", "lora"),
        ("--network_dim 8", "zimage_train.py", "full"),  # without a network_module
        ("--network_module networks.lora_zimage", "zimage_train.py", "full"),
        ("--network_module networks.lokr --network_args factor=4", "zimage_train_network.py", "lokr"),
    ],
)
def test_musubis_scripts_train_an_adapter_or_the_model(words: str, script: str, kind: str, tmp_path: Path) -> None:
    data = 'image_directory = "media"' if "zimage" in script else VIDEO
    adapter = musubi(tmp_path, words, script, data).train.adapter
    assert adapter.type == kind and adapter.rank == (16 if kind == "full" else 4), "network_dim is 4 by default"


@pytest.mark.parametrize(
    ("words", "expert", "steps"),
    [
        ("--dit_high_noise high.safetensors", "both", 50),  # the two share the steps
        ("--min_timestep 875 --max_timestep 1000", "high", 100),
        ("--min_timestep 0 --max_timestep 875", "low", 100),
        ("--dit wan2.2_t2v_high_noise_14B.safetensors", "high", 100),
        ("--dit wan2.2_t2v_low_noise_14B.safetensors", "low", 100),
    ],
)
def test_the_expert_follows_from_timesteps_and_names(words: str, expert: str, steps: int, tmp_path: Path) -> None:
    train = musubi(tmp_path, f"--task t2v-A14B --max_train_steps 100 {words}").train
    assert (train.experts, train.steps) == (expert, steps)


def test_a_checkpoint_in_one_file_is_used_if_its_flavour_is_known(tmp_path: Path) -> None:
    for folder in ("musubi", "ai-toolkit"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "one.safetensors").write_bytes(b"")
    assert musubi(tmp_path / "musubi", "--task t2v-1.3B --dit one.safetensors").model.path == str(
        tmp_path / "musubi/one.safetensors"
    )
    assert musubi(tmp_path / "missing", "--task t2v-1.3B --dit one.safetensors").model.path is None
    model = {"name_or_path": "./one.safetensors", "arch": "zimage"}
    config, reasons = ai_toolkit(tmp_path / "ai-toolkit", model=model)
    assert config.model.path is None and "not carried over" in reasons["model.name_or_path"]


def test_musubis_videos_and_buckets(tmp_path: Path) -> None:
    video = f"{VIDEO}target_frames = [25]\nresolution = [960, 544]\n"
    (dataset,) = musubi(tmp_path, "--task t2v-14B", data=video).datasets
    assert dataset.video.frame_rate == "source" and dataset.allow_upscale and dataset.captions_per_file == "one"
    # without enable_bucket there is one bucket, of [width, height]
    settings = {"step": dataset.bucket_step, "max_aspect": dataset.max_aspect}
    buckets = [*resolution_buckets(float(dataset.resolution or 0), "pixel_area", 16, **settings)]  # type: ignore[arg-type]
    assert dataset.crop_aspect == "closest" and (960, 544) in buckets
    assert dataset.crop_aspect_buckets == (pytest.approx(960 / 544),)
    video += "source_fps = 30.0\nenable_bucket = true\nbucket_no_upscale = true\n"
    (dataset,) = musubi(tmp_path / "fps", "--task t2v-14B", data=video).datasets
    assert (dataset.video.frame_rate, dataset.crop_aspect, dataset.allow_upscale) == (16.0, "preserve", False)


# -- ai-toolkit


def test_the_alpha_of_ai_toolkit_is_the_rank_and_a_lokr_has_whole_matrices(tmp_path: Path) -> None:
    network = {"type": "lora", "linear": 8, "linear_alpha": 4}
    adapter = ai_toolkit(tmp_path, network=network)[0].train.adapter
    assert (adapter.rank, adapter.alpha) == (8, None)
    adapter = ai_toolkit(tmp_path / "b", network={**network, "type": "lokr"})[0].train.adapter
    assert (adapter.type, adapter.rank, adapter.alpha) == ("lokr", 65_536, None)
    partial = {**network, "type": "lokr", "lokr_full_rank": False}
    assert ai_toolkit(tmp_path / "c", network=partial)[0].train.adapter.rank == 8
    assert ai_toolkit(tmp_path / "d", network={})[0].train.adapter.type == "full"


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ({"timestep_type": "weighted"}, ("uniform", 1.6, "none")),
        ({"linear_timesteps": True}, ("uniform", 1.0, "bell")),
        ({"timestep_type": "linear"}, ("uniform", 1.0, "none")),
        ({"timestep_type": "linear", "content_or_style": "content"}, ("beta", 1.0, "none")),
        ({"timestep_type": "two_step"}, ("list", None, "none")),
        ({"timestep_type": "lognorm_blend"}, ("logit_normal", 1.0, "none")),
    ],
)
def test_noise_levels_of_ai_toolkit(train: dict[str, Any], expected: tuple[Any, ...], tmp_path: Path) -> None:
    config, outcomes = ai_toolkit(tmp_path, train=train)
    section = config.train
    assert (section.timesteps.sampling, section.shift, section.loss.weighting) == expected
    nearest = train.get("timestep_type") in ("weighted", "lognorm_blend")
    assert ("nearest to" in outcomes["train.timestep_type"]) == nearest


def test_the_steps_of_ai_toolkit(tmp_path: Path) -> None:
    batches = {"steps": 3000, "gradient_accumulation_steps": 4}
    train = ai_toolkit(tmp_path, train=batches, save={"save_every": 250})[0].train
    assert (train.steps, train.accumulate, train.checkpoint_every) == (750, 4, 63)
    train = ai_toolkit(tmp_path / "b", train={"steps": 3000, "gradient_accumulation": 4})[0].train
    assert (train.steps, train.accumulate) == (3000, 4)
    wan = {"name_or_path": "ai-toolkit/Wan2.2-T2V-A14B-Diffusers-bf16", "arch": "wan22_14b"}
    for number, (kwargs, expected) in enumerate((({}, ("both", 1500)), ({"train_low_noise": False}, ("high", 3000)))):
        model = wan | {"model_kwargs": kwargs}
        train = ai_toolkit(tmp_path / f"wan{number}", model=model, train={"steps": 3000})[0].train
        assert (train.experts, train.steps) == expected, "two experts share the steps"


def test_trigger_words_of_ai_toolkit(tmp_path: Path) -> None:
    datasets = [{"folder_path": "media"}, {"folder_path": "reg", "is_reg": True}]
    sample = {"prompts": ["[trigger] on a wall"]}
    config, _ = ai_toolkit(tmp_path, datasets=datasets, trigger_word="ohwx", sample=sample)
    assert [dataset.trigger for dataset in config.datasets] == ["ohwx", ""]
    assert config.datasets[1].is_regularization_data and config.validation.prompts[0].prompt == "ohwx on a wall"
    regularization = config.train.methods.regularization
    assert regularization and regularization.target == "data"


def test_a_refused_optimizer_takes_its_rate_and_arguments_with_it(tmp_path: Path) -> None:
    train = {"optimizer": "automagic", "lr": 1e-6, "optimizer_params": {"min_lr": 1e-7}}
    config, outcomes = ai_toolkit(tmp_path, train=train)
    optimizer = config.train.optimizer
    assert (optimizer.name, optimizer.lr, optimizer.arguments) == ("adamw", 1e-4, {})
    assert "nearest to automagic" in outcomes["train.optimizer"]
    assert outcomes["train.lr"].startswith("not carried over") and "min_lr" in outcomes["train.optimizer_params"]
    prodigy = ai_toolkit(tmp_path / "b", train={"optimizer": "prodigy", "lr": 1e-4})[0].train.optimizer
    assert (prodigy.name, prodigy.lr) == ("prodigy", 1.0)


# -- its files


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
    config, outcomes = imported(tmp_path, {"config.env": script, "b.json": backends})
    assert not marker.exists()
    assert config.train.steps == 300 and config.train.adapter.rank == 8 and config.validation.guidance == 4.5
    assert "output of a command" in outcomes["config.env: LEARNING_RATE"] + outcomes["config.env: TRAINING_SEED"]
    assert "$HOME" in outcomes["config.env: OUTPUT_DIR"]
    assert any("never run" in outcome for outcome in outcomes.values())
    assert "hf_secret" not in json.dumps(outcomes) + (tmp_path / "pipeline.yaml").read_text()


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("ai-toolkit", "{type: lora, linear: 4, linear_alpha: 4}", "[4]"),
        ("musubi-tuner", "target_frames = [9]", "target_frames = 'nine'"),
        long("ai-toolkit", "prompts: [a cat on a wall]", "prompts: {a: [1]}"),
    ],
)
def test_a_value_of_another_kind_is_named(name: str, old: str, new: str, tmp_path: Path) -> None:
    files = {file: text.replace(old, new) for file, text in EXAMPLES[name][0].items()}
    assert files != EXAMPLES[name][0]
    write(tmp_path, files)
    code, report = program(tmp_path, FIRST[name])
    assert code in (OK, INCOMPLETE, USAGE), report
    assert code == OK or "error" in report or report["failed"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", '{"model_family": "sdxl", "data_backend_config": "b.json"}', "model.family=NAME"),
        ("config.json", '{"model_family": ', "config.json can't be read: Expecting value: line 1"),
        ("job.yaml", "- 1", "--from (simpletuner"),
        # crafted files
        ("a.json", '{"model_family": ' + "9" * 5000 + "}", "a.json can't be read"),
        ("b.json", '{"model_family": ' + "9" * 50 + "}", "more than 19 digits"),
        ("c.json", '{"model_family": "sa\\u0000na"}', "zero byte"),
        ("d.json", "[" * 100_000, "too deep"),
        ("b.toml", ".".join("a" * 3000) + " = 1", "too deep"),
        ("a.env", "A=xxxxxxxxxx\n" + "A=$A$A\n" * 40 + "MODEL_TYPE=lora\n", "the value of A=$A$A is longer than"),
        ("a.sh", "#!/bin/bash\nA=don't\n" + "B=value # some words\n" * 4000, "a quotation is not closed: A=don"),
        ("program", ".py " * 60_000, "--from (simpletuner"),
        ("d.env", 'A="' + "\\a" * 49_000, "a quotation is not closed"),
        ("e.env", "A=" + "a" * 200_000, "longer than 100,000 characters"),
    ],
)  # fmt: skip
def test_what_can_not_be_imported_ends_with_an_error_at_once(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    write(tmp_path, {name: text})
    began = time.monotonic()
    code, report = program(tmp_path, name)
    assert code == USAGE and message in report["error"]["message"] + report["error"]["next_step"]
    assert not (tmp_path / "pipeline.yaml").exists() and time.monotonic() - began < 10


def test_a_target_that_appears_before_the_write_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, EXAMPLES["ai-toolkit"][0])
    target = tmp_path / "pipeline.yaml"
    monkeypatch.setattr(import_config, "parse_config", lambda *_: target.write_text("mine"))
    code, report = program(tmp_path, "job.yaml")
    assert code != OK and "pipeline.yaml" in report["error"]["message"] and target.read_text() == "mine"


def test_a_dry_run_prints_the_configuration_and_writes_nothing(tmp_path: Path) -> None:
    write(tmp_path, EXAMPLES["ai-toolkit"][0])
    target = tmp_path / "pipeline.yaml"
    ended = CliRunner().invoke(
        import_config.app, [str(tmp_path / "job.yaml"), "--dry-run", "--config", str(target)], env={"COLUMNS": "120"}
    )
    text, report = ended.stdout.split("import-config (dry run)")
    assert not target.exists() and parse_yaml(text).value["model"]["family"] == "z-image"
    assert re.search(r"train\.steps +train\.steps: 2", report)


@pytest.mark.slow
@pytest.mark.parametrize("name", [long(name) for name in EXAMPLES])
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
