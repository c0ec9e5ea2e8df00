"""mypy reports a family whose module lacks one of the trainer's functions, or has one with another signature."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cache.order.schedule import BatchSchedule
from schemas.catalog import FAMILIES
from schemas.geometry import Bucket
from tests.trainer.runs import opened
from trainer.data import BatchLoader
from trainer.families.base import module_of

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = """
[mypy]
python_version = 3.11
explicit_package_bases = True
ignore_missing_imports = True
[mypy-torch.*,diffusers.*,pydantic.*,numpy.*,pyarrow.*]
follow_imports = skip
"""


def without_function(text: str) -> str:
    function = r"^def postprocess_latents\(.*?(?=^def |^if TYPE_CHECKING)"
    changed = re.sub(function, "", text, flags=re.MULTILINE | re.DOTALL)
    assert changed != text
    return changed


def other_signature(text: str) -> str:
    changed = text.replace("def clean_frames(task: Task) -> int:", "def clean_frames(task: Task, frames: int) -> int:")
    assert changed != text
    return changed


@pytest.mark.long
@pytest.mark.slow
def test_mypy_compares_a_module_with_the_protocol(tmp_path: Path) -> None:
    """The Sana module as it is and two changed ones, beside each other: one run of mypy takes seconds."""
    for package in ("schemas", "cache", "trainer"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    families = tmp_path / "trainer" / "families"
    text = (families / "sana.py").read_text()
    changes = {"without_function": without_function, "other_signature": other_signature}
    for name, change in changes.items():
        (families / f"{name}.py").write_text(change(text).replace("import sana as", f"import {name} as"))
    command = [sys.executable, "-m", "mypy", "--follow-imports", "silent", "--config-file", "mypy.ini"]
    files = [f"trainer/families/{name}.py" for name in ("sana", *changes)]
    done = subprocess.run([*command, *files], cwd=tmp_path, text=True, capture_output=True, check=False)
    assert "sana.py" not in done.stdout, done.stdout
    for file in files[1:]:
        assert re.search(rf"^{file}:\d+: error: Incompatible types in assignment", done.stdout, re.MULTILINE), file
    assert 'missing following "FamilyModule" protocol member' in done.stdout, done.stdout


@pytest.mark.parametrize("name", sorted({family.transformer for family in FAMILIES.values()}))
def test_every_module_asks_to_be_compared(name: str) -> None:
    text = (ROOT / "trainer" / "families" / f"{name}.py").read_text()
    asked = (
        f"if TYPE_CHECKING:\n    from trainer.families import {name} as this_module\n\n"
        "    _checked: FamilyModule = this_module\n"
    )
    assert text.endswith(asked)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["t2i", "i2i", "t2v", "i2v", "sana"])
def test_blocks_are_called_in_their_order_with_the_tokens_of_the_grid(ready, kind) -> None:
    config = ready(kind)
    data = opened(config)
    [part] = BatchLoader(data, BatchSchedule(data.spans, 0, 2, 2), 0.0).step(0).micro_batches
    family, called = module_of(config.model.family_spec), []
    model = family.load(config.model.source).eval()
    blocks = family.blocks(model)
    for number, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda _, inputs, number=number: called.append((number, inputs[0].shape)))
    with torch.no_grad():
        family.predict(model, part.batch.latents_BCTHW, torch.full((2,), 0.5), part.batch, config.model.task)
    assert [number for number, _ in called] == [*range(len(blocks))]
    grid = family.token_grid(model, part.batch)
    assert called[-1][1][:-1].numel() == 2 * grid.frames * grid.rows * grid.columns
    size, edge = Bucket.parse(part.batch.bucket), config.model.family_spec.side_multiple
    assert (grid.rows, grid.columns) == (size.height // edge, size.width // edge), "side_multiple is a token's edge"
    assert grid.frames == part.batch.latents_BCTHW.shape[2] and grid.text_length == part.batch.text_BLD.shape[1]
    visual = family.visual_blocks(model)
    assert [block for block in blocks if block in visual] == visual and called[-1][1][-1] == family.hidden_size(model)
    listed = {id(weight) for block in blocks for weight in block.parameters()}
    repeated = {id(weight) for name, weight in model.named_parameters() if "_blocks." in name}
    assert listed == repeated
