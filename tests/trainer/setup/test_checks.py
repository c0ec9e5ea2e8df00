"""Checks before weights are loaded."""

import shutil
from pathlib import Path

import diffusers
import pytest

from cache.models.compatibility import CheckpointMismatch
from cache.models.compatibility import check_scheduler as check_class
from cache.runs.training_run import RunError
from schemas.config.pipeline import Config
from tests.project import SETTINGS
from trainer.families.base import module_of
from trainer.setup.checks import check_scheduler

pytestmark = pytest.mark.slow


def configured(kind: str, folder: Path, **validation) -> Config:
    prompts = {"prompts": [{"name": "one", "prompt": "a cat"}], **validation}
    datasets = [{"id": "a", "instance_data_dir": "a", "dataset_type": "video" if kind.endswith("v") else "image"}]
    model = SETTINGS[kind] | {"path": str(folder)}
    return Config.model_validate({"root": "r", "model": model, "datasets": datasets, "validation": prompts})


@pytest.mark.parametrize(
    "kind", ["z-image", "flux2-klein", "qwen-image", "krea2", "sana", "wan2.1-t2v", "kandinsky5-image-t2i"]
)
def test_a_scheduler_of_another_family_is_refused(tiny, tmp_path, kind) -> None:
    """By its class, or because its noise levels can't be set as in the family's pipeline."""
    config = configured(kind, tiny(kind))
    family = module_of(config.model.family_spec)
    check_scheduler(config.model, None, family)
    folder = shutil.copytree(tiny(kind), tmp_path / "other", ignore=shutil.ignore_patterns("*.safetensors"))
    diffusers.DDIMScheduler().save_pretrained(folder / "scheduler")
    with pytest.raises(CheckpointMismatch, match="DDIMScheduler"):
        check_class(configured(kind, folder).model, ask_hub=False)
    shutil.rmtree(folder / "scheduler")
    with pytest.raises(RunError, match="can't denoise validation prompts") as caught:
        check_scheduler(configured(kind, folder).model, None, family)
    assert "Take scheduler/" in caught.value.next_step
    diffusers.FlowMatchHeunDiscreteScheduler().save_pretrained(folder / "scheduler")
    check_class(configured(kind, folder).model, ask_hub=False)
    if kind in ("z-image", "flux2-klein", "qwen-image", "krea2"):  # their pipelines set the noise levels
        with pytest.raises(RunError, match="can't denoise validation prompts"):
            check_scheduler(configured(kind, folder).model, None, family)
