"""validation.prompts_file: formats, placeholders, and errors that name line, prompt and next step."""

import json
import re
from pathlib import Path

import pytest

from schemas.config.loading import ConfigError, dump_yaml, load_config
from schemas.config.pipeline import Config

SETTINGS = {"root": "work", "model": {"family": "sana"}, "datasets": [{"id": "a", "instance_data_dir": "."}]}


@pytest.fixture
def load(tmp_path: Path):
    """load(name, text, **validation): the configuration with this file of prompts."""

    def load(name: str, text: str, *overrides: str, **validation) -> Config:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        settings = {**SETTINGS, "validation": {"prompts_file": name, **validation}}
        (tmp_path / "pipeline.yaml").write_text(json.dumps(settings))
        return load_config(tmp_path / "pipeline.yaml", overrides)

    return load


def prompts(config: Config) -> dict[str, str]:
    return {prompt.name: prompt.prompt for prompt in config.validation.prompts}


def errors(load, name: str, text: str, **validation) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(name, text, **validation)
    return [re.sub(r"^.*?/(?=p\.)", "", line) for line in caught.value.errors]


PROMPTS = {"cat": "a cat: asleep", "dog_2": "a “dog” \t in 3/4 view"}


@pytest.mark.parametrize("indent", [None, 2, "\t"])
def test_json_is_an_object_of_names_and_prompts(load, indent) -> None:
    """As SimpleTuner's user_prompt_library."""
    for ascii in (True, False):
        assert prompts(load("library.json", json.dumps(PROMPTS, indent=indent, ensure_ascii=ascii))) == PROMPTS


def test_yaml_has_texts_sections_or_a_list(load, tmp_path) -> None:
    mapping = 'cat: "a cat: asleep"\ndog_2: {prompt: "a “dog” \\t in 3/4 view", seed: [1, 2], size: 64x64}\n'
    items = "- {name: cat, prompt: a}\n- name: dog_2\n  prompt: b\n"
    config = load("p.yaml", mapping)
    assert prompts(config) == PROMPTS
    assert (config.validation.prompts[1].seed, config.validation.prompts[1].size) == ((1, 2), "64x64")
    assert list(prompts(load("p.yml", items))) == ["cat", "dog_2"]


def test_text_has_a_prompt_in_each_line_named_after_its_words(load) -> None:
    long = "A very long prompt about the harbor at dawn, with gulls."
    text = f"# animals\nA cat, asleep!\n\n  Ein Hündchen \n{long}\n猫\n"
    texts = prompts(load("p.txt", text))
    assert list(texts.values()) == ["A cat, asleep!", "Ein Hündchen", long, "猫"]
    names = list(texts)
    assert names[:2] == ["a-cat-asleep", "ein-h-ndchen"]
    assert re.fullmatch("a-very-long-prompt-about-the-harbor-at-d-[0-9a-f]{6}", names[2])
    assert re.fullmatch("prompt-[0-9a-f]{6}", names[3])
    assert list(prompts(load("p.txt", "new first\n" + text)))[1:] == names, "other prompts rename none"


def test_only_line_ends_end_a_prompt_and_zero_bytes_are_refused(load) -> None:
    config = load("p.txt", "a\u2028cat\x0band\x85a dog\r\nb\rc\n")
    assert list(prompts(config).values()) == ["a\u2028cat\x0band\x85a dog", "b", "c"]
    (error,) = errors(load, "p.txt", "a\nb\0\n")
    assert error.startswith("p.txt:2: ") and "UTF-8" in error


def test_prompts_of_the_file_follow_those_of_the_configuration(load, tmp_path) -> None:
    config = load("p.txt", "two", prompts=[{"name": "one", "prompt": "first"}])
    assert list(prompts(config)) == ["one", "two"]
    path = tmp_path / "resolved.yaml"
    path.write_text(dump_yaml(config))
    assert prompts(load_config(path)) == prompts(config), "a resolved configuration has them all"
    assert "prompts_file" not in path.read_text()


def test_the_file_may_be_elsewhere_and_images_are_relative_to_it(tmp_path) -> None:
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "p.yaml").write_text("one: {prompt: a, image: first.png}")
    settings = {**SETTINGS, "model": {"family": "kandinsky5-video", "flavour": "i2v-lite-5s"}}
    settings["datasets"] = [{"id": "a", "instance_data_dir": ".", "dataset_type": "video"}]
    (tmp_path / "pipeline.yaml").write_text(json.dumps(settings))
    config = load_config(tmp_path / "pipeline.yaml", ["validation.prompts_file=library/p.yaml"])
    assert config.validation.prompts[0].image == str(tmp_path / "library" / "first.png")


def test_placeholders_are_replaced_in_prompts_and_names(load) -> None:
    library = {
        "chef_<token>": {"prompt": "<token>, a <job>, <3 and a < b > c", "negative_prompt": "no <token>"},
        "plain": "<<token> and <<< and <<<job>",
    }
    config = load("p.yaml", json.dumps(library), placeholders={"token": "ohwx man", "job": "cook"})
    chef, plain = config.validation.prompts
    assert [chef.name, plain.name] == ["chef_ohwx-man", "plain"]
    assert chef.prompt == "ohwx man, a cook, <3 and a < b > c" and chef.negative_prompt == "no ohwx man"
    assert plain.prompt == "<token> and << and <cook"
    assert prompts(load("p.txt", "of <token>", "validation.placeholders.token=sks")) == {"of-token": "of sks"}


def test_an_unknown_placeholder_is_named_with_prompt_and_line(load) -> None:
    (line,) = errors(load, "p.yaml", "cat: a\ndog:\n  prompt: a <toke> dog\n", placeholders={"token": "sks"})
    assert line.startswith("p.yaml:3: prompt 'dog': <toke> is not in validation.placeholders (valid: <token>)")
    assert "write <<toke>" in line
    (line,) = errors(load, "p.txt", "a\n\na <toke> dog")
    assert line.startswith("p.txt:3: prompt 'a-toke-dog': <toke>") and "(valid: none)" in line


@pytest.mark.parametrize(
    "name, text, expected",
    [
        ("p.yaml", "one: a\none: b", "p.yaml:2: one: is already in line 1"),
        ("p.json", '{"one": "a",\n "one": "b"}', "p.json:2: one: is already in line 1"),
        ("p.yaml", "- {name: one, prompt: a}\n- {name: one, prompt: b}", "p.yaml:2: prompt 'one' has"),
        ("p.txt", "a cat\na dog\nA cat!", "p.txt:3: prompt 'a-cat' has the name of the prompt in line 1"),
        ("p.yaml", "a: b\n../../etc: a cat", "p.yaml:2: prompt '../../etc': name: '../../etc' is not valid; valid: "),
        ("p.json", '{"a/b": "a cat"}', "p.json:1: prompt 'a/b': name: 'a/b' is not valid"),
        ("p.yaml", "x: a\none:\n  prompt: a\n  sed: 3", "p.yaml:4: prompt 'one': sed: unknown key"),
        ("p.yaml", "one:\n  prompt: a\n  size: [64x64, 65x64]", "p.yaml:3: prompt 'one': size.1: sides of '65x64'"),
        ("p.yaml", "one:\n  seed: 1", "p.yaml:1: prompt 'one': prompt: is required"),
        ("p.yaml", "one: 5", "p.yaml:1: prompt 'one': prompt: expected text, got 5"),
        ("p.yaml", "one: {name: two, prompt: a}", "p.yaml:1: one.name: "),
        ("p.yaml", "- a cat", "p.yaml:1: item 1 of the list is not a section"),
        ("p.yaml", "a cat", "p.yaml:1: is not a list of prompts"),
        ("p.yaml", "", "p.yaml:1: contains no prompt"),
        ("p.txt", "# nothing\n", "p.txt:1: contains no prompt"),
        ("p.json", '{"one": "a"\n,}', "p.json:2: not valid JSON: "),
        ("p.yaml", "one: [", "p.yaml:1: not valid YAML: "),
        ("p.csv", "one", "p.csv:1: 'p.csv' has no valid suffix; valid: .yaml, .yml, .json, .txt"),
    ],
)  # fmt: skip
def test_errors_have_file_and_line(load, name, text, expected) -> None:
    (line,) = errors(load, name, text)
    assert line.startswith(expected)


def test_a_name_of_the_configuration_is_not_taken_again(load) -> None:
    (line,) = errors(load, "p.yaml", "\none: b", prompts=[{"name": "one", "prompt": "a"}])
    assert line.startswith("p.yaml:2: prompt 'one': name: 'one' is the name of an earlier prompt")


def test_files_that_cannot_be_read(load, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"gone.yaml:1: cannot be read: No such file"):
        load("p.yaml", "a: b", "validation.prompts_file=gone.yaml")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match=r"latin.txt:1: is not UTF-8 text \(byte \d"):
        load("p.yaml", "a: b", "validation.prompts_file=latin.txt")
    with pytest.raises(ConfigError, match=r"prompts_file: 's3://bucket/p.yaml' is a URL"):
        load("p.yaml", "a: b", "validation.prompts_file=s3://bucket/p.yaml")
    (tmp_path / "big.txt").write_text("x" * 300_000)
    with pytest.raises(ConfigError, match="longer than 262,144 characters"):
        load("p.yaml", "a: b", "validation.prompts_file=big.txt")


def test_placeholders_without_a_file_are_refused(tmp_path) -> None:
    (tmp_path / "pipeline.yaml").write_text(json.dumps({**SETTINGS, "validation": {"placeholders": {"a": "b"}}}))
    with pytest.raises(ConfigError, match=r"validation.placeholders: .*prompts_file"):
        load_config(tmp_path / "pipeline.yaml")
    with pytest.raises(ConfigError, match="beginning with a letter"):
        load_config(tmp_path / "pipeline.yaml", ["validation.placeholders={1x: b}"])
