from pathlib import Path

import pytest

from schemas.config.encoding import Caption
from schemas.config.loading import ConfigError, dump_yaml, load_config, type_at
from schemas.config.pipeline import Config

BASE = """\
root: work
model:
  family: sana
datasets:
  - id: photos
    instance_data_dir: pictures
  - id: more.of-them
    instance_data_dir: /data/more
train:
  optimizer:
    lr: 1e-4
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text=BASE, name="pipeline.yaml"):
        (tmp_path / name).write_text(text)
        return Path(name)

    return write


def errors(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert str(caught.value).startswith("\n".join(caught.value.errors))
    assert caught.value.exit_code == 2
    return caught.value.errors


# ------------------------------------------------------------------------------------- valid files


def test_numbers_are_numbers_and_paths_start_at_the_file(write, tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    write(name="sub/c.yaml")
    config = load_config("sub/c.yaml")
    assert config.train.optimizer.lr == 1e-4
    assert config.root == str(tmp_path / "sub" / "work")
    assert config.output == str(tmp_path / "sub" / "output")
    assert [d.root for d in config.datasets] == [str(tmp_path / "sub" / "pictures"), "/data/more"]
    monkeypatch.chdir("sub")
    assert load_config("c.yaml") == config


def test_urls_and_repos_stay_as_they_are_and_folders_that_exist_are_resolved(write, tmp_path):
    config = load_config(write(), ["root=memory://work", "model.path=org/name"])
    assert (config.root, config.model.path) == ("memory://work", "org/name")
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert load_config(write(), ["model.path=org/name"]).model.path == str(tmp_path / "org" / "name")
    assert load_config(write(), ["model.path=./missing"]).model.path == str(tmp_path / "missing")


def test_other_paths_are_resolved_too(write, tmp_path):
    sets = ["model={family: kandinsky5-image, flavour: i2i-lite-sft}", "datasets.photos.media_root=../m"]
    sets += ["datasets.1.conditioning_data=c", "datasets.0.conditioning_data=/c"]
    sets += ["validation.prompts=[{name: a, prompt: b, image: i.png}]"]
    config = load_config(write(), sets)
    assert config.datasets[0].media_root == str(tmp_path.parent / "m")
    assert [d.conditioning_data for d in config.datasets] == ["/c", str(tmp_path / "c")]
    assert config.validation.prompts[0].image == str(tmp_path / "i.png")


def test_a_tilde_is_a_home_only_if_the_user_exists(write, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    locations = {
        "./~scans": tmp_path / "~scans",
        "~/scans": "/home/me/scans",
        "~no-such-user/a": tmp_path / "~no-such-user/a",
    }
    for text, expected in locations.items():
        table = [f"datasets.photos.{key}" for key in ("caption_strategy=csv", f"caption_file={text}")]
        places = [f"datasets.photos.instance_data_dir={text}", f"train.local_cache.folder={text}", f"root={text}"]
        config = load_config(write(), [*table, *places])
        (photos, _), folder = config.datasets, config.train.local_cache.folder
        paths = {photos.root, photos.caption_file, folder, config.root}
        assert paths == {str(expected)}


def test_a_section_of_which_every_key_is_commented_out_has_its_defaults(write):
    config = load_config(write(BASE + "text:\n  # batch_tokens: 5\nstages:\n  encode-text:\n"))
    assert config.text.batch_tokens == Config.model_fields["text"].default.batch_tokens
    assert config.stages.encode_text.workers is None


def test_the_resolved_configuration_reads_back_as_itself(write):
    sets = ["train.optimizer.eps=1e-12", "datasets.photos.disabled=true", "model.revision=no"]
    sets += [
        "validation.prompts=[{name: a, prompt: 'yes: \"no\" # ä\\n'}]",
        "train.adapter.targets=['a.*', 1e3x]",
    ]
    config = load_config(write(), sets)
    assert load_config(write(dump_yaml(config), "again.yaml")) == config


# ------------------------------------------------------------------------------------- errors, file


OPTIMIZER = "  optimizer:\n    lr: 1e-4"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("lr: 1e-4", "lr: '1e-4'", "11: train.optimizer.lr: expected a number, got the text '1e-4'; write it without"),
        ("lr: 1e-4", "lr: -1", "11: train.optimizer.lr: -1 is not valid; valid: more than 0"),
        ("lr: 1e-4", "lr: .nan", "11: train.optimizer.lr: expected a finite number, got nan"),
        ("lr: 1e-4", "warmup: 1.5", "11: train.optimizer.warmup: expected an integer, got 1.5"),
        ("lr: 1e-4", "betas: [0.9]", "11: train.optimizer.betas.1: an item is missing"),
        ("lr: 1e-4", "betas: 0.9", "11: train.optimizer.betas: expected a list, got 0.9"),
        ("lr: 1e-4", "schedule: cosin", "11: train.optimizer.schedule: the text 'cosin' is not valid (did you "),
        ("lr: 1e-4", "LR: 1", "11: train.optimizer.LR: unknown key (did you mean 'lr'?)"),
        ("lr: 1e-4", "warm_up: 1", "11: train.optimizer.warm_up: unknown key (did you mean 'warmup'?)"),
        (
            OPTIMIZER,
            "  optimizer: adamw",
            "10: train.optimizer: expected a section, got the text 'adamw'; valid keys",
        ),
        (OPTIMIZER, "  resume: 'false'", "10: train.resume: expected true or false, got the text 'false'; write it wi"),
        (OPTIMIZER, "  resume: no", "10: train.resume: expected true or false, got the text 'no'"),
        (OPTIMIZER, "  run: a b", "10: train.run: 'a b' is not valid; valid: letters, digits, '.', '_' and '-', "),
        ("id: photos", "id: 7", "5: datasets.0.id: expected text, got 7; put it in quotes"),
        ("    instance_data_dir: /data/more\n", "", "7: datasets.1.instance_data_dir: is required"),
        ("  family: sana\n", "  flavour: x\n", "2: model.family: is required"),
        ("model:\n  family: sana\n", "", "1: model: is required"),
        ("id: more.of-them", "id: photos", "7: datasets.1.id: 'photos' is the id of an earlier dataset"),
        ("root: work", "root:", "1: root: expected text, got nothing (null)"),
        ("root: work", "root: work\nroot: play", "2: root: is already in line 1"),
        ("  family: sana", "\tfamily: sana", "3: not valid YAML: a tab"),
        ("family: sana", "family: sama", "3: model.family: 'sama' is not a model family (did you mean 'sana'?)"),
    ],
)
def test_an_error_names_file_line_and_key(write, old, new, expected):
    assert old in BASE
    (error,) = errors(write(BASE.replace(old, new)))
    assert error.startswith(f"pipeline.yaml:{expected}")


def test_an_error_about_a_key_of_another_section_names_the_section(write):
    (error,) = errors(write(BASE + "  lr: 1e-4\n"))
    assert error.startswith("pipeline.yaml:12: train.lr: unknown key")
    assert error.endswith("train.optimizer or train.optimizer.groups.N")


def test_all_errors_are_listed_in_the_order_of_lines(write):
    text = BASE.replace("1e-4", "x").replace("root: work", "rot: work").replace("id: photos", "id: '/'")
    starts = [error.split(": ")[:2] for error in errors(write(text))]
    assert starts == [
        ["pipeline.yaml:1", "root"],
        ["pipeline.yaml:1", "rot"],
        ["pipeline.yaml:5", "datasets.0.id"],
        ["pipeline.yaml:11", "train.optimizer.lr"],
    ]


def test_an_empty_list_and_a_list_of_invalid_items_differ(write):
    head = BASE[: BASE.index("  - id")]
    (error,) = errors(write(head.replace("datasets:", "datasets: []")))
    assert error.startswith("pipeline.yaml:4: datasets: ")
    assert [e.split(": ")[1] for e in errors(write(head + "  - id: a\n"))] == ["datasets.0.instance_data_dir"]


def test_what_is_no_configuration_at_all(write, tmp_path):
    assert errors(tmp_path)[0].endswith(": is a folder")
    assert errors(write("- a\n"))[0].startswith("pipeline.yaml:1: expected keys and values; valid keys: root, ")
    assert [e.split(": ")[1] for e in errors(write(""))] == ["datasets", "model", "root"]
    (tmp_path / "latin.yaml").write_bytes(b"root: \xe4\n")
    assert errors("latin.yaml") == ["latin.yaml: is not UTF-8 text (byte 6); save it as UTF-8"]


# ------------------------------------------------------------------------------------- errors, --set


def test_overrides_by_key_index_and_id(write):
    sets = ["train.optimizer.lr=3e-5", "datasets.0.resolution=256", "datasets.more.of-them.resolution=512"]
    config = load_config(write(), [*sets, "train.steps=5", "train.steps=6", "stages.encode-text.workers=3"])
    assert config.train.optimizer.lr == 3e-5
    assert [d.resolution for d in config.datasets] == [256.0, 512.0]
    assert config.train.steps == 6
    assert config.stages.encode_text.workers == 3


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.optimizer.lr=abc", "train.optimizer.lr: expected a number, got the text 'abc'"),
        ("train.optimizer.lr='1'", "train.optimizer.lr: expected a number, got the text '1'; write it without quotes"),
        ("train.resume=yes", "train.resume: expected true or false, got the text 'yes'"),
        ("validation.size=1024", "validation.size: 1024 is not a size; write both sides, for example 1024x1024"),
        ("datasets.photos.where='score > '", "datasets.photos.where: 'score > ' is not a filter (invalid syntax)"),
        ("datasets.photos.repeats=1.5", "datasets.photos.repeats: expected an integer, got 1.5"),
        ("datasets.2.repeats=1", "datasets.2.repeats: datasets has no item '2'; valid: photos, more.of-them, 0, 1"),
        ("root.x=1", "root.x: root is the value 'work'"),
        ("datasets.photos=1", "datasets.photos: expected a section, got 1; valid keys: id, "),
        ("model={flavour: x}", "model: model.family: is required"),
        ("trian.lr=1", "trian.lr: unknown key (did you mean 'train'?)"),
        ("text.batch=1", "text.batch: unknown key (did you mean 'batch_tokens'?)"),
        ("train.optimizer.betas.0=1", "train.optimizer.betas.0: the list train.optimizer.betas is not in the file"),
        ("train.steps", "train.steps: is not KEY=VALUE"),
        ("=1", ": is not KEY=VALUE"),
        ("train..lr=1", "train..lr: is not KEY=VALUE"),
        ("train.run=[", "train.run: not valid YAML: "),
        ("train.run=a: b: c", "train.run: not valid YAML: "),
        ("type=lora", "type: unknown key; it is an option of train.loss or train.adapter"),
    ],
)
def test_an_invalid_override_is_named(write, override, expected):
    (error,) = errors(write(), override)
    assert error.startswith(f"--set {expected}")


def test_errors_of_overrides_and_of_the_file_come_together(write):
    lines = errors(write(BASE.replace("id: photos", "id: 7")), "train.steps=0", "nothing")
    assert [error.split(": ")[0] for error in lines] == [
        "--set nothing",
        "--set train.steps",
        "pipeline.yaml:5",
    ]


def test_types_are_found_by_path():
    assert type_at(("datasets", 0, "id")) is str
    assert type_at(("datasets", 3, "video", "num_frames")) is int
    assert type_at(("train", "optimizer", "nothing")) is None


def test_a_file_url_is_a_path_like_any_other(write, tmp_path):
    config = load_config(write(), ["root=file://work", f"output=file://{tmp_path}/out"])
    assert (config.root, config.output) == (str(tmp_path / "work"), str(tmp_path / "out"))


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|video_pad|>"])
def test_a_caption_prompt_with_a_placeholder_of_media_is_refused(token: str) -> None:
    with pytest.raises(ValueError, match="placeholders for media; remove them"):
        Caption(prompts=("brief", f"Describe {token}."))


def test_of_a_file_that_is_missing_the_nearest_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / "photos.yaml").write_text("datasets: []")
    for name in (".photo.yaml", "photo-compose.yaml"):
        (tmp_path / name).write_text("services: {}")
    with pytest.raises(ConfigError) as raised:
        load_config(tmp_path / "photo.yaml")
    assert raised.value.next_step == f"Did you mean --config {tmp_path / 'photos.yaml'}?"
