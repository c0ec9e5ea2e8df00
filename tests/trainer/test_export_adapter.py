"""The program: what it writes applies as the adapter does, and what it refuses before it writes."""

import json
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

from schemas.cli.console import INCOMPLETE, OK, USAGE, Options, run_program
from tests.trainer.pipelines import (
    COMPONENTS,
    apply_as_comfyui,
    exact_output,
    pipeline,
    pipeline_class,
    trained,
)
from trainer.export_adapter import run
from trainer.setup import adapters

FLAVOURS = {"kandinsky5-video-t2v": ("kandinsky5-video", "t2v-lite-sft-5s"), "sana": ("sana", None)}


class Exported:
    """A run's adapter in a project, and its program."""

    def __init__(self, kind: str, checkpoint: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.kind, self.checkpoint, self.folder, self.capsys = kind, checkpoint, folder, capsys
        self.family, flavour = FLAVOURS[kind]
        dataset = {"id": "a", "instance_data_dir": "media"} | ({"dataset_type": "video"} if "video" in kind else {})
        model = {"family": self.family, "flavour": flavour, "path": str(checkpoint), "precision": "float32"}
        settings = {"root": "work", "model": model, "datasets": [dataset]}
        self.config = folder / "pipeline.yaml"
        self.config.write_text(json.dumps(settings))
        self.model = trained(kind, checkpoint, rank=4, alpha=2.5)
        self.wanted = exact_output(kind, self.model)
        self.adapter = adapters.save_lora(self.model, folder / "output/run/adapter", self.family, {"steps": "3"})

    def __call__(self, overrides: tuple[str, ...] = (), dry_run: bool = False, **own: Any) -> tuple[int, dict]:
        options = Options(self.config, overrides, dry_run, json=True)
        given: dict[str, Any] = {"source": None, "form": None, "merge": False, "whole": False, "to": None, "scale": 1.0}
        code = run_program("export-adapter", run, options, given | own)
        return code, json.loads(self.capsys.readouterr().out)

    def refused(self, **own: Any) -> str:
        code, report = self(**own)
        assert code == USAGE and report["error"]["next_step"]
        return report["error"]["message"]


@pytest.fixture
def exported(tiny, tmp_path, capsys):
    return lambda kind: Exported(kind, tiny(kind), tmp_path, capsys)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(FLAVOURS))
def test_a_run_is_converted_and_merged(exported, kind) -> None:
    it, target = exported(kind), Path("comfyui_lora.safetensors")
    code, report = it(dry_run=True)
    assert code == OK and report["remaining"] > 0 and not (it.adapter.parent / target).exists()
    code, report = it()
    made, about = it.adapter.parent / target, report["details"]
    assert code == OK and report["done"] == about["modules"] == len(adapters.list_adapted_modules(it.model))
    assert (about["rank"], about["alpha"], about["format"], about["to_format"]) == ([4], [2.5], "diffusers", "comfyui")
    assert about["written"] == [str(made)] and about["written_bytes"] == made.stat().st_size
    plain = pipeline(kind, it.checkpoint).transformer
    apply_as_comfyui(plain, made)
    close(exact_output(kind, plain), it.wanted)
    merged = it.folder / "merged"
    assert it(merge=True, to=merged, dry_run=True)[0] == OK and not merged.exists()
    code, report = it(merge=True, to=merged)
    assert code == OK and report["details"]["written_bytes"] > about["written_bytes"]
    model = type(plain).from_pretrained(merged, use_safetensors=True)
    close(exact_output(kind, model), it.wanted)
    assert "not empty" in it.refused(merge=True, to=merged)
    # A base in bfloat16 stays so: the update is added in float32 and rounded once.
    half = it.folder / "half"
    shutil.copytree(it.checkpoint / "transformer", half / "transformer")
    [weights] = (half / "transformer").glob("*.safetensors")
    before = {key: value.bfloat16() for key, value in load_file(weights).items()}
    save_file(before, weights, {"format": "pt"})
    assert it((f"model.path={half}",), merge=True, to=it.folder / "merged-half")[0] == OK
    after = load_file(it.folder / "merged-half" / weights.name)
    assert {value.dtype for value in after.values()} == {torch.bfloat16} and list(after) == list(before)
    name = next(name for name in adapters.list_adapted_modules(it.model))
    layer = it.model.get_submodule(name)
    change = layer.get_delta_weight("default")
    assert torch.equal(after[f"{name}.weight"], (before[f"{name}.weight"].float() + change).bfloat16())


@pytest.mark.slow
def test_a_whole_checkpoint_loads_as_a_pipeline_and_the_strength_is_chosen(exported) -> None:
    """The transformer as after twice the strength, from ComfyUI's file; the other components as they were."""
    it = exported("sana")
    it()
    comfyui = it.adapter.with_name("comfyui_lora.safetensors")
    code, report = it(source=comfyui, merge=True, whole=True, to=it.folder / "whole", scale=2.0)
    assert code == OK and report["details"]["whole_checkpoint"] is True
    pipe = diffusers.SanaPipeline.from_pretrained(it.folder / "whole", use_safetensors=True)
    assert not type(pipe.transformer).__module__.startswith("trainer") and pipe.vae is not None
    twice = trained("sana", it.checkpoint, rank=4, alpha=5.0)
    close(exact_output("sana", pipe.transformer), exact_output("sana", twice))
    rest = [path.relative_to(it.checkpoint) for path in it.checkpoint.rglob("*") if path.is_file()]
    for path in rest:
        same = (it.folder / "whole" / path).read_bytes() == (it.checkpoint / path).read_bytes()
        assert same == (path.suffix != ".safetensors" or path.parts[0] != "transformer"), path
    code, report = it(source=comfyui, form="diffusers", to=it.folder / "back", scale=2.0)
    assert code == OK and report["details"]["alpha"] == [2.5]
    loaded = pipeline_class("sana").from_pretrained(
        it.checkpoint, use_safetensors=True, **dict.fromkeys(COMPONENTS[:3] + COMPONENTS[5:])
    )
    loaded.load_lora_weights(it.folder / "back")
    close(exact_output("sana", loaded.transformer), exact_output("sana", twice))


@pytest.mark.slow
def test_what_does_not_fit_is_refused_before_anything_is_written(exported, tiny, tmp_path) -> None:
    it = exported("sana")
    merged = {"merge": True, "to": tmp_path / "merged"}
    assert "has no result yet" in it.refused(overrides=("train.run=other",))
    for own, said in (
        ({"form": "diffusers"}, "is the adapter itself"),
        ({"merge": True}, "--merge needs a new folder"),
        ({"form": "comfyui", **merged}, "not --format"),
        ({"whole": True}, "--whole belongs to --merge"),
        ({"scale": 0.0}, "leaves nothing"),
        ({"source": tmp_path / "absent"}, "absent is not there"),
        ({"merge": True, "to": it.checkpoint}, "is not empty"),
    ):
        assert said in it.refused(**own)
    foreign = adapters.save_lora(trained("kandinsky5-video-t2v", tiny("kandinsky5-video-t2v")), tmp_path / "k", "k5")
    assert "was trained for k5, and model.family is sana" in it.refused(source=foreign, **merged)
    save_file(load_file(foreign), foreign)  # without a note of its family
    for own in ({}, merged):
        assert f"modules where {it.checkpoint} has none" in it.refused(source=foreign, **own)
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(it.adapter.read_bytes()[:-8])
    assert f"{damaged} is damaged" in it.refused(source=damaged, **merged)
    packed = tmp_path / "packed"
    shutil.copytree(it.checkpoint / "transformer", packed / "transformer")
    [weights] = (packed / "transformer").glob("*.safetensors")
    save_file({key: value.to(torch.int8) for key, value in load_file(weights).items()}, weights)
    assert "of type I8, to which nothing can be added" in it.refused(overrides=(f"model.path={packed}",), **merged)
    weights.write_bytes(b"none")
    assert f"{weights} is damaged" in it.refused(overrides=(f"model.path={packed}",), **merged)
    # A full disk, and a place that is none: nothing is left behind.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for own in (merged, {"to": tmp_path / "merged"}):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        code, report = it(**own)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert code == INCOMPLETE and "merged: a file may not grow larger" in report["error"]["message"]
    code, report = it(merge=True, to=damaged / "inside")
    assert code == INCOMPLETE and f"{damaged} is a file, not a folder" in report["error"]["message"]
    assert not [*(tmp_path / "merged").glob("*")] and not list(tmp_path.glob(".*"))
    assert sorted(path.name for path in it.adapter.parent.iterdir()) == [it.adapter.name]
