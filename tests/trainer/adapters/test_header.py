"""Layers and strengths of adapter files, and errors for files that can't be used."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from peft.utils.other import get_pattern_key
from safetensors.numpy import save_file

from schemas.config.training import Adapter
from trainer.adapters.header import AdapterError, check_fits, read_adapter, read_initial, resolve_names

MODULES = ("blocks.0.to_q", "blocks.1.to_q", "blocks.1.mid.to_q")


def pairs(prefix: str = "transformer.", rank: int = 4, down: str = "lora_A.weight", up: str = "lora_B.weight") -> dict:
    return {
        key: value
        for module in MODULES
        for key, value in (
            (f"{prefix}{module}.{down}", np.ones((rank, 6), np.float32)),
            (f"{prefix}{module}.{up}", np.ones((8, rank), np.float32)),
        )
    }


def write(path: Path, tensors: dict, config: dict | None = None, **notes: str) -> Path:
    header = {f"latentpress.{key}": value for key, value in notes.items()}
    save_file(tensors, path, header | ({} if config is None else {"lora_adapter_metadata": json.dumps(config)}))
    return path


@pytest.mark.parametrize(
    ("prefix", "down", "up"),
    [
        ("transformer.", "lora_A.weight", "lora_B.weight"),
        ("", "lora_A.weight", "lora_B.weight"),
        ("base_model.model.", "lora_A.default.weight", "lora_B.default.weight"),
        ("transformer.", "lora.down.weight", "lora.up.weight"),
        ("diffusion_model.", "lora_down.weight", "lora_up.weight"),
    ],
)
def test_layers_are_found_whoever_wrote_the_keys(tmp_path, prefix, down, up) -> None:
    result = read_adapter(write(tmp_path / "a.safetensors", pairs(prefix, 4, down, up)))
    assert list(result.layers) == sorted(f"transformer.{module}" for module in MODULES)
    assert result.ranks == [4] and result.alphas == [4.0]  # the default strength is 1
    assert result.format == ("comfyui" if prefix == "diffusion_model." else "diffusers")


@pytest.mark.parametrize("prefix", ["transformer.", ""])  # written by a pipeline, and by the transformer itself
def test_the_strength_is_that_of_the_header(tmp_path, prefix) -> None:
    patterns = {"alpha_pattern": {"1.to_q": 6.0, "^blocks\\.0.*": 1.0}, "rank_pattern": {}}
    config = {"r": 4, "lora_alpha": 2.5, **patterns}
    file = write(tmp_path / "a.safetensors", pairs(prefix), {f"{prefix}{key}": it for key, it in config.items()})
    result = read_adapter(file).layers
    for module in MODULES:
        expected = patterns["alpha_pattern"].get(get_pattern_key(patterns["alpha_pattern"], module), 2.5)
        assert result[f"transformer.{module}"].scale == expected / 4
    assert sorted(layer.alpha for layer in result.values()) == [1.0, 2.5, 6.0]
    write(file, pairs(prefix), {f"{prefix}{key}": it for key, it in (config | {"use_rslora": True}).items()})
    assert read_adapter(file).layers["transformer.blocks.1.mid.to_q"].scale == 2.5 / math.sqrt(4)


def test_patterns_that_take_for_ever_in_other_programs_are_matched(tmp_path) -> None:
    name = "block_" * 30
    tensors = {f"{name}.lora_{ab}.weight": np.ones((2, 2), np.float32) for ab in "AB"}
    patterns = {"(.*)*(.*)*x": 5.0, "(b|l|o|c|k|_)*_": 3.0}
    file = write(tmp_path / "a.safetensors", tensors, {"r": 2, "lora_alpha": 2, "alpha_pattern": patterns})
    assert read_adapter(file).alphas == [3.0]


def test_folders_of_an_adapter_a_run_and_a_checkpoint_are_found(tmp_path) -> None:
    (tmp_path / "run" / "adapter").mkdir(parents=True)
    file = write(tmp_path / "run" / "adapter" / "pytorch_lora_weights.safetensors", pairs(), family="sana", steps="3")
    for place in (tmp_path / "run", file.parent, file):
        assert read_adapter(place).path == file and read_adapter(place).notes == {"family": "sana", "steps": "3"}
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000002"
    checkpoint.mkdir(parents=True)
    save_file(pairs(""), checkpoint / "trainable.safetensors")  # the files of a checkpoint do not contain the strength
    with pytest.raises(AdapterError, match=r"no pytorch_lora_weights\.safetensors .* trainable\.safe"):
        read_adapter(checkpoint)
    file_in_checkpoint = write(checkpoint / file.name, pairs(), {"r": 4, "lora_alpha": 2})
    assert read_adapter(checkpoint).path == file_in_checkpoint and read_adapter(checkpoint).alphas == [2.0]


def without(tensors: dict, *keys: str) -> dict:
    return {name: value for name, value in tensors.items() if name not in keys}


FIRST = "transformer.blocks.0.to_q"


def lokr(start: str = FIRST, b: tuple[int, int] = (2, 3)) -> dict:
    """A LoKr of a weight of 8 x 6."""
    shapes = {"w1": (2, 2), "w2_a": (4, 2), "w2_b": b}
    return {f"{start}.lokr_{name}": np.ones(shape, np.float32) for name, shape in shapes.items()}


def half(start: str, tensor: str) -> dict:
    return {f"{start}.{tensor}.weight": np.ones((2, 2), np.float32)}


CASES = {
    "two prefixes": (pairs() | pairs("diffusion_model."), None, f"{FIRST} occurs twice, as diffusion_model.blocks"),
    "a bare one, too": (pairs() | pairs(""), None, f"{FIRST} occurs twice, as blocks.0.to_q.lora_A.weight and tr"),
    "two names": (pairs() | pairs(down="lora.down.weight"), None, f"{FIRST} occurs twice"),
    "halves": (half("a", "lora_A") | half("transformer.a", "lora_B"), None, "transformer.a occurs twice, as a. and"),
    "half a layer": (
        without(pairs(), f"{FIRST}.lora_A.weight"),
        None,
        "is damaged: transformer.blocks.0.to_q is incomplete",
    ),
    "shapes": (pairs() | {f"{FIRST}.lora_B.weight": np.ones((8, 3), np.float32)}, None, "don't belong together"),
    "rank of the header": (pairs(), {"r": 8, "lora_alpha": 8}, "blocks.0.to_q has rank 8 in the header, but 4"),
    "no alpha": (pairs(), {"r": 4}, "lora_alpha must be a number"),
    "a text": (pairs(), {"r": 4, "lora_alpha": "four"}, "lora_alpha must be a number"),
    "a bad pattern": (pairs(), {"r": 4, "lora_alpha": 4, "rank_pattern": {"(": 4}}, "rank_pattern has a pattern"),
    "alpha not finite": (pairs() | {f"{FIRST}.alpha": np.float32([np.nan])}, None, "alpha must be a number"),
    "alpha without end": (pairs() | {f"{FIRST}.alpha": np.float64([1e308])}, None, "a number up to 1e+30, not 1e+308"),
    "large alpha": (pairs(), {"r": 4, "lora_alpha": 1e308}, "lora_alpha must be a number up to 1e+30, not 1e+308"),
    "400 digits": (pairs(), {"r": 4, "lora_alpha": 10**400}, "lora_alpha must be a number up to 1e+30, not 1000"),
    "rank 0": (
        {f"{FIRST}.lokr_{w}": np.ones((2, 2), np.float32) for w in ("w1", "w2")},
        {"r": 0, "alpha": 4},
        "blocks.0.to_q has rank 0",
    ),
    "patterns": (pairs(), {"r": 4, "rank_pattern": {str(i): 4 for i in range(10_001)}}, "more than 10000"),
    "integers": (half("a", "lora_A") | {"a.lora_B.weight": np.ones((2, 2), int)}, None, "lora_B.weight is of type I64"),
    "booleans": (half("a", "lora_A") | {"a.alpha": np.ones(1, bool)}, None, "a.alpha is of type BOOL, and not one of"),
    "complex": ({"a.lora_A.weight": np.ones((2, 2), np.complex64)}, None, "a.lora_A.weight is of type C64, and not"),
    "DoRA": (pairs() | {f"{FIRST}.lora_magnitude_vector": np.ones(6, np.float32)}, None, "has 8 outputs, and transfor"),
    "half a DoRA": (pairs() | {f"{FIRST}.lora_magnitude_vector": np.ones(8, np.float32)}, None, "kinds: DoRA, LoRA"),
    "LyCORIS' DoRA": (pairs() | {f"{FIRST}.dora_scale": np.ones(8, np.float32)}, None, "DoRA with LyCORIS' magnitudes"),
    "half a LoKr": (
        {f"{FIRST}.lokr_w1": np.ones((2, 2), np.float32)},
        None,
        "is damaged: transformer.blocks.0.to_q",
    ),
    "ranks of a LoKr": (lokr(b=(3, 3)), None, "don't belong together: lokr_w1 [2, 2], lokr_w2_a [4, 2], lokr_w2_b [3"),
    "header of a LoKr": (lokr(), {"r": 4, "alpha": 4}, "blocks.0.to_q has rank 4 in the header, but 2"),
    "Tucker's LoKr": (lokr() | {f"{FIRST}.lokr_t2": np.ones((2, 2, 1, 1))}, None, "a LoKr with a middle tensor"),
    "kinds": (lokr() | without(pairs(), f"{FIRST}.lora_A.weight", f"{FIRST}.lora_B.weight"), None, "kinds: LoKr, LoRA"),
    "text": ({"lora_te1_layers_0.lora_down.weight": np.ones((2, 2), np.float32)}, None, "an adapter of a text encoder"),
    "a model": ({"blocks.0.to_q.weight": np.ones((2, 2), np.float32)}, None, "blocks.0.to_q.weight"),
    "nothing": ({}, None, "no tensors"),
}


@pytest.mark.parametrize("case", list(CASES))
def test_a_file_that_is_damaged_or_foreign_is_named_with_the_reason(tmp_path, case) -> None:
    tensors, config, message = CASES[case]
    file = write(tmp_path / "a.safetensors", tensors, config, steps="1")
    with pytest.raises(AdapterError) as caught:
        read_adapter(file)
    assert str(file) in caught.value.message and message in caught.value.message
    assert caught.value.next_step and caught.value.exit_code == 2


def test_what_is_no_safetensors_file_is_refused(tmp_path) -> None:
    content = write(tmp_path / "a.safetensors", pairs()).read_bytes()
    for data in (b"", b"\0" * 20, content[:-4], content[:50], b"\xff" * 40):
        (tmp_path / "a.safetensors").write_bytes(data)
        with pytest.raises(AdapterError, match=r"a\.safetensors is damaged"):
            read_adapter(tmp_path / "a.safetensors")
    (tmp_path / "a.bin").write_bytes(b"anything")
    with pytest.raises(AdapterError, match=r"a\.bin is pickled"):
        read_adapter(tmp_path / "a.bin")
    with pytest.raises(AdapterError, match="absent does not exist"):
        read_adapter(tmp_path / "absent")
    with pytest.raises(AdapterError, match=r"no pytorch_lora_weights\.safetensors or .* a\.safetensors"):
        read_adapter(tmp_path)
    (tmp_path / "model" / "transformer").mkdir(parents=True)
    with pytest.raises(AdapterError, match="a whole model"):
        read_adapter(tmp_path)


def test_a_file_for_another_model_is_refused(tmp_path) -> None:
    result = read_adapter(write(tmp_path / "a.safetensors", pairs()))
    shapes = {f"transformer.{module}": (8, 6) for module in MODULES}
    check_fits(result, shapes, "m")
    check_fits(result, {name: (8, 6, 1, 1) for name in shapes}, "m")  # a convolution of one pixel
    with pytest.raises(AdapterError, match=r"m lacks 1 of the 3 modules .*: transformer\.blocks\.0\.to_q"):
        check_fits(result, dict(list(shapes.items())[1:]), "m")
    with pytest.raises(AdapterError, match=r"blocks\.0\.to_q is 8 x 6, but 8 x 12 in m"):
        check_fits(result, shapes | {FIRST: (8, 12)}, "m")


def test_a_loras_kinds_and_a_lokrs_strength_and_size(tmp_path) -> None:
    """A LoKr's scale is alpha / rank: by the header with diffusers' keys, by a tensor with other keys, where it only
    counts if a matrix is factorized."""
    file, shapes = tmp_path / "a.safetensors", {FIRST: (8, 6)}
    assert read_adapter(write(file, pairs())).kind == "LoRA"
    magnitudes = {f"transformer.{module}.lora_magnitude_vector": np.ones(8, np.float32) for module in MODULES}
    assert read_adapter(write(file, pairs() | magnitudes)).kind == "DoRA"
    matrices = {f"{FIRST}.lokr_w1": np.ones((2, 2), np.float32), f"{FIRST}.lokr_w2": np.ones((4, 3, 1, 1), np.float32)}
    for tensors, header, rank, scale in (
        (lokr(), {"transformer.r": 2, "transformer.alpha": 3.0}, 2, 1.5),
        (lokr(), {"r": 8, "alpha": 8.0, "rank_pattern": {"to_q": 2}, "alpha_pattern": {"^blocks.*": 1.0}}, 2, 0.5),
        (matrices, {"r": 8, "alpha": 2.0}, 8, 0.25),
        (
            lokr("diffusion_model.blocks.0.to_q") | {"diffusion_model.blocks.0.to_q.alpha": np.float32([5])},
            None,
            2,
            2.5,
        ),
        (matrices | {f"{FIRST}.alpha": np.float32([5])}, None, None, 1.0),
    ):
        result = read_adapter(write(file, tensors, header))
        assert result.kind == "LoKr" and list(result.layers) == [FIRST]
        assert (result.layers[FIRST].file_rank, result.layers[FIRST].scale) == (rank, scale)
        check_fits(result, shapes, "m")
    with pytest.raises(AdapterError, match=r"blocks\.0\.to_q is 8 x 6, but 6 x 8 in m"):
        check_fits(result, {FIRST: (6, 8)}, "m")


def test_lycoris_names_are_those_of_the_models_modules(tmp_path) -> None:
    tensors = lokr("lycoris_blocks_0_to_q") | lokr("lycoris_transformer_2_blocks_0_to_q")
    result = read_adapter(write(tmp_path / "a.safetensors", tensors))
    model = dict.fromkeys([FIRST, "transformer_2.blocks.0.to_q", "transformer.blocks.1.to_q"], (8, 6))
    names = [*model]
    assert result.format == "lycoris" and sorted(resolve_names(result, model, "m").layers) == sorted(names[:2])
    with pytest.raises(
        AdapterError, match=r"lycoris_blocks_0_to_q is ambiguous: in m, .* transformer\.blocks\.0\.to_q, tr"
    ):
        resolve_names(result, model | {"transformer.blocks_0.to_q": (8, 6)}, "m")
    ambiguous = read_adapter(write(tmp_path / "a.safetensors", tensors | lokr("transformer.blocks.0.to_q")))
    with pytest.raises(
        AdapterError, match=r"transformer\.blocks\.0\.to_q occurs twice, as .* and lycoris_blocks_0_to_q"
    ):
        resolve_names(ambiguous, model, "m")
    with pytest.raises(AdapterError, match="m lacks 2 of the 2 modules"):
        last = {names[2]: model[names[2]]}
        check_fits(resolve_names(result, last, "m"), last, "m")


def test_training_takes_ranks_and_alphas_of_the_file_that_it_starts_from(tmp_path) -> None:
    """Configured ranks and alphas must occur in the file, and the kind must match the configuration."""
    header = {"r": 4, "lora_alpha": 2.5, "alpha_pattern": {"mid.to_q": 1}}
    file = write(tmp_path / "a.safetensors", pairs(), header)
    assert read_initial(Adapter()) is None
    for settings in ({}, {"rank": 4}, {"alpha": 2.5}, {"rank": 4, "alpha": 1.0}, {"rslora": True, "alpha": 0.5}):
        assert read_initial(Adapter(init_from=str(file), **settings)).layers.keys() == read_adapter(file).layers.keys()
    for settings, message in (
        ({"rank": 16}, "has rank 4; the configuration has rank 16"),
        ({"rank": 4, "alpha": 4.0}, "has alpha 1, 2.5; the configuration has alpha 4"),
        ({"alpha": 2.5, "rslora": True}, "has alpha 0.5, 1.25 (with rslora: true); the configuration has alpha 2.5"),
        ({"type": "lokr"}, "is a LoRA, but the configuration trains a LoKr"),
        ({"dora": True}, "is a LoRA, but the configuration trains a DoRA"),
    ):
        with pytest.raises(AdapterError) as caught:
            read_initial(Adapter(init_from=str(file), **settings))
        assert message in caught.value.message and "rain.adapter" in caught.value.next_step
    write(file, lokr(), {"r": 2, "alpha": 2})
    with pytest.raises(AdapterError, match="is a LoKr, but the configuration trains a LoRA") as caught:
        read_initial(Adapter(init_from=str(file)))
    assert "Set train.adapter.type to lokr" in caught.value.next_step
