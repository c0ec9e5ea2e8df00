"""The trainer does not read pickled weights."""

import ast
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cache.models.weights import WeightsError
from schemas.catalog import FAMILIES
from trainer.families.base import module_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("family", "kind"), [("sana", "sana"), ("kandinsky5-image", "kandinsky5-image-t2i")])
def test_a_pickled_transformer_is_refused(tiny, tmp_path, family, kind) -> None:
    load = module_of(FAMILIES[family]).load
    folder = shutil.copytree(tiny(kind) / "transformer", tmp_path / "transformer")
    assert load(str(tmp_path)) is not None
    (weights,) = folder.glob("*.safetensors")
    torch.save(load_file(weights), weights.with_suffix(".bin"))
    weights.unlink()
    with pytest.raises(WeightsError, match=rf"{folder}/\w+\.bin") as caught:
        load(str(tmp_path))
    assert caught.value.exit_code == 2 and "safe_serialization=True" in caught.value.next_step


@pytest.mark.slow
def test_whatever_loads_weights_asks_for_safetensors() -> None:
    """Also for future code: only tokenizers, processors and configs, which have no weights, are loaded without it."""
    result = []
    for path in (path for top in ("cache", "stages", "trainer") for path in sorted((ROOT / top).rglob("*.py"))):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "from_pretrained" in text else ():
            if not isinstance(node, ast.Call) or getattr(node.func, "attr", "") != "from_pretrained":
                continue
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if not any(word in ast.unparse(node.func) for word in ("Token", "Processor", "config_class", "AutoConfig")):
                result.append((path.relative_to(ROOT).as_posix(), options.get("use_safetensors")))
    assert result == [("cache/models/weights.py", "True")], "there is one place that loads weights"
