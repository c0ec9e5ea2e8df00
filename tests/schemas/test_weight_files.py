"""Weight files of a checkpoint's folder, and the error if there are none."""

import json

import pytest

from cache.models.weights import find_weights_problem


def make_folder(folder, *names: str):
    for name in names:
        (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize(
    "names",
    [
        ("model.safetensors",),
        ("config.json", "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin"),
        ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    ],
)
def test_safetensors_are_read(tmp_path, names) -> None:
    assert find_weights_problem(make_folder(tmp_path, *names)) is None


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "diffusion_pytorch_model.fp16.bin", "x.pt", "x.pth", "x.ckpt", "x.pkl"]
)
def test_pickles_alone_are_named_with_the_way_out(tmp_path, name) -> None:
    problem, step = find_weights_problem(make_folder(tmp_path, "config.json", ".hidden.safetensors", name))
    assert str(tmp_path / name) in problem
    assert "save_pretrained(folder, safe_serialization=True)" in step


def test_a_folder_without_weights_is_named(tmp_path) -> None:
    problem, step = find_weights_problem(make_folder(tmp_path, "config.json"))
    assert str(tmp_path) in problem and "*.safetensors" in problem and "whole copy" in step


@pytest.mark.parametrize(
    "shares",
    [
        {"a": "pytorch_model.bin"},
        {"a": "model-1.safetensors", "b": "x.bin"},
        {"a": "../other/model.safetensors"},
        {"a": "/model.safetensors"},
        {"a": 7},
        {"a": None},
        ["model.safetensors"],
        None,
    ],
)
def test_an_index_leads_to_safetensors_of_its_folder_alone(tmp_path, shares) -> None:
    index = make_folder(tmp_path, "model-1.safetensors") / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    assert find_weights_problem(tmp_path) is None
    index.write_text(json.dumps({"weight_map": shares}))
    problem, _ = find_weights_problem(tmp_path)
    assert str(index) in problem


@pytest.mark.parametrize("text", ["", "[]", "{}", "7", "[" * 10**5])
def test_an_index_that_is_none_is_named(tmp_path, text) -> None:
    (make_folder(tmp_path, "model-1.safetensors") / "model.safetensors.index.json").write_text(text)
    problem, _ = find_weights_problem(tmp_path)
    assert "index.json" in problem
