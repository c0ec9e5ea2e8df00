"""export-adapter: written files have the effect of the adapter, and errors come before anything is written."""

import copy
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

from cache.store.files import temporary
from schemas.catalog import FAMILIES
from schemas.cli.console import INCOMPLETE, OK, USAGE, Options, run_program
from tests.forms import long
from tests.trainer.pipelines import (
    absent_parts,
    apply_as_comfyui,
    exact_output,
    pipeline,
    pipeline_class,
    random,
    trained,
)
from trainer.export_adapter import run
from trainer.setup import adapters, export

FLAVOURS = {
    "kandinsky5-video-t2v": ("kandinsky5-video", "t2v-lite-sft-5s"),
    "sana": ("sana", None),
    "flux3": ("flux3", None),
    "wan2.1-t2v": ("wan2.1", "t2v-1.3b"),
}


class Exported:
    """A run's adapter in a project, and its program. options: options of the LoRA, or with `type` of another
    adapter."""

    def __init__(
        self, kind: str, checkpoint: Path, folder: Path, capsys: pytest.CaptureFixture[str], **options: Any
    ) -> None:
        self.kind, self.checkpoint, self.folder, self.capsys = kind, checkpoint, folder, capsys
        self.family, flavour = FLAVOURS[kind]
        dataset = {"id": "a", "instance_data_dir": "media"} | (
            {"dataset_type": "video"} if FAMILIES[self.family].video else {}
        )
        model = {"family": self.family, "flavour": flavour, "path": str(checkpoint), "precision": "float32"}
        settings = {"root": "work", "model": model, "datasets": [dataset]}
        self.config = folder / "pipeline.yaml"
        self.config.write_text(json.dumps(settings))
        self.model = trained(kind, checkpoint, **{"alpha": 2.5, **options})
        self.expected = exact_output(kind, self.model)
        self.adapter = export.save_lora(self.model, folder / "output/run/adapter", self.family, {"steps": "3"})

    def __call__(self, overrides: tuple[str, ...] = (), dry_run: bool = False, **changes: Any) -> tuple[int, dict]:
        options = Options(self.config, overrides, dry_run, json=True)
        arguments: dict[str, Any] = {
            "source": None,
            "form": None,
            "merge": False,
            "whole": False,
            "to": None,
            "scale": 1.0,
        }
        arguments["overwrite"] = False
        code = run_program("export-adapter", run, options, arguments | changes)
        return code, json.loads(self.capsys.readouterr().out)

    def refused(self, **options: Any) -> str:
        code, report = self(**options)
        assert code == USAGE and report["error"]["next_step"]
        return report["error"]["message"]


@pytest.fixture
def exported(tiny, tmp_path, capsys):
    return lambda kind, **options: Exported(kind, tiny(kind), tmp_path, capsys, **options)


def merged_by_peft(model: torch.nn.Module, scale: float) -> dict[str, torch.Tensor]:
    """The adapted weights, by their keys in a checkpoint."""
    model, result = copy.deepcopy(model), {}
    for name in adapters.list_adapted_modules(model):
        layer = model.get_submodule(name)
        layer.set_scale("default", scale)
        layer.merge()
        result[f"{name}.weight"] = layer.get_base_layer().weight.data
    return result


def check_weights(folder: Path, expected: dict[str, torch.Tensor], checkpoint: Path) -> None:
    """Check that the folder's weights are `expected`, and all other weights the checkpoint's."""
    [path], [before] = folder.glob("*.safetensors"), (checkpoint / "transformer").glob("*.safetensors")
    result, expected = load_file(path), load_file(before) | expected
    assert list(result) == list(load_file(before))
    for key, weight in result.items():
        torch.testing.assert_close(
            weight, expected[key], rtol=1e-6, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}"
        )


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kandinsky5-video-t2v", long("wan2.1-t2v")])
def test_a_run_is_converted_and_merged(exported, kind) -> None:
    it = exported(kind)
    target = it.folder / f"output/run/run-{it.family}.safetensors"
    code, report = it(dry_run=True)
    assert code == OK and report["remaining"] > 0 and not target.exists()
    code, report = it()
    about = report["details"]
    assert code == OK and report["done"] == about["modules"] == len(adapters.list_adapted_modules(it.model))
    assert (about["rank"], about["alpha"], about["format"], about["to_format"]) == ([4], [2.5], "diffusers", "comfyui")
    assert about["written"] == [str(target)] and about["written_bytes"] == target.stat().st_size
    plain = pipeline(kind, it.checkpoint).transformer
    apply_as_comfyui(plain, target)
    close(exact_output(kind, plain), it.expected)
    merged = it.folder / "merged"
    assert it(merge=True, to=merged, dry_run=True)[0] == OK and not merged.exists()
    leftover = temporary(merged) / "transformer"  # from a merge that was killed
    leftover.mkdir(parents=True)
    code, report = it(merge=True, to=merged)
    assert not leftover.parent.exists()
    assert code == OK and report["details"]["written_bytes"] > about["written_bytes"]
    model = type(plain).from_pretrained(merged, use_safetensors=True)
    close(exact_output(kind, model), it.expected)
    assert "not empty" in it.refused(merge=True, to=merged)
    # A base in bfloat16 keeps its dtype: the update is added in float32 and rounded once.
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


LOKR = {
    "kandinsky5-video-t2v": {"rank": 2, "alpha": 3.5, "decompose_both": True, "decompose_factor": 16},
    # Whole and factorized, with several ranks and strengths; also convolutions.
    "sana": {"rank_pattern": {r".*to_q": 64}, "alpha_pattern": {r".*\.0\..*": 3.0}, "decompose_factor": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [long("kandinsky5-video-t2v"), "sana"])
def test_a_lokr_is_converted_and_merged(exported, kind) -> None:
    """Merged as by peft, at any strength, from each of its files; converted files equal the files that training
    writes."""
    it = exported(kind, type="lokr", **LOKR[kind])
    folder = it.folder / "both"
    export.save_lora(it.model, folder, it.family, {"steps": "3"}, folder / "comfyui.safetensors")
    names = {path.name for path in folder.iterdir()}
    assert names == {"pytorch_lora_weights.safetensors", "comfyui.safetensors", "lycoris_weights.safetensors"}
    assert it.adapter.with_name("lycoris_weights.safetensors").exists()
    for source, form in (("pytorch_lora", "lycoris"), ("lycoris", "comfyui"), ("comfyui", "diffusers")):
        [file] = folder.glob(f"{source}*")
        code, report = it(source=file, form=form, to=it.folder / form)
        [made] = (it.folder / form).iterdir()
        assert code == OK and report["details"]["kind"] == "LoKr" and report["details"]["written"] == [str(made)]
        [like] = folder.glob(f"{'pytorch_lora' if form == 'diffusers' else form}*")
        theirs, ours = load_file(like), load_file(made)
        assert theirs.keys() == ours.keys()
        # diffusers' strength is in the header, ComfyUI's for two whole matrices in the first; alpha is not read then.
        whole_keys = {key.removesuffix("lokr_w2") + "alpha" for key in theirs if key.endswith("lokr_w2")}
        for key in theirs.keys() - whole_keys if form != "diffusers" else ():
            torch.testing.assert_close(ours[key], theirs[key], rtol=1e-6, atol=0)
    model = pipeline(kind, it.checkpoint).transformer
    loader = {"prefix": "transformer", "weight_name": it.adapter.name}
    model.load_lora_adapter(it.folder / "diffusers", **loader)
    close(exact_output(kind, model), it.expected)
    for number, (file, scale) in enumerate((("pytorch_lora", 1.0), ("comfyui", 1.0), ("lycoris", -0.5))):
        [source], to = folder.glob(f"{file}*"), it.folder / f"merged{number}"
        whole_keys = file == "lycoris"
        code, report = it(source=source, merge=True, whole=whole_keys, to=to, scale=scale)
        about = report["details"]
        assert code == OK and report["done"] == about["modules"] == len(adapters.list_adapted_modules(it.model))
        assert (about["kind"], about["scale"], about["written"]) == ("LoKr", scale, [str(to)])
        check_weights(to / "transformer" if whole_keys else to, merged_by_peft(it.model, scale), it.checkpoint)
        assert (to / "vae" / "config.json").exists() == whole_keys
    merged = exact_output(kind, type(model).from_pretrained(it.folder / "merged0", use_safetensors=True))
    assert (merged - it.expected).abs().mean() <= 1e-6 * it.expected.abs().mean()


@pytest.mark.slow
def test_a_dora_is_merged_as_peft_merges_it(exported) -> None:
    """Its magnitudes do not depend on the strength. ComfyUI's format is refused; diffusers' format supports it."""
    kind, pattern = "sana", {"rank_pattern": {r".*to_q": 6}}
    it = exported(kind, dora=True, rslora=True, **pattern)
    for number, scale in enumerate((1.0, 0.25)):
        to = it.folder / f"merged{number}"
        code, report = it(merge=True, to=to, scale=scale)
        assert code == OK and (report["details"]["kind"], report["details"]["rank"]) == ("DoRA", [4, 6])
        check_weights(to, merged_by_peft(it.model, scale), it.checkpoint)
    base = pipeline(kind, it.checkpoint)
    merged = exact_output(kind, type(base.transformer).from_pretrained(it.folder / "merged0", use_safetensors=True))
    assert (merged - it.expected).abs().mean() <= 1e-6 * it.expected.abs().mean()
    for options in ({}, {"form": "lycoris"}):
        assert "can't store its magnitudes" in it.refused(**options)
    assert it(form="diffusers", to=it.folder / "other")[0] == OK
    base.load_lora_weights(it.folder / "other")
    close(exact_output(kind, base.transformer), it.expected)


@pytest.mark.slow
def test_a_whole_checkpoint_of_a_modular_pipeline_loads(exported) -> None:
    it = exported("flux3")
    code, _ = it(merge=True, whole=True, to=it.folder / "whole")
    assert code == OK
    pipe = diffusers.Flux3AutoBlocks().init_pipeline(it.folder / "whole")
    pipe.load_components(["transformer", "vae", "text_encoder"])
    assert pipe.vae is not None and pipe.text_encoder is not None
    close(exact_output("flux3", pipe.transformer), it.expected)
    assert it.refused(merge=True, to=it.folder / "whole" / "new").endswith(f"model's folder, {it.folder / 'whole'}")


@pytest.mark.slow
def test_a_whole_checkpoint_loads_as_a_pipeline_and_the_strength_is_chosen(exported) -> None:
    """The transformer has twice the strength, from ComfyUI's file; the other components do not change."""
    it = exported("sana")
    it()
    comfyui = it.folder / "output/run/run-sana.safetensors"
    private = it.folder / "private"  # as huggingface_hub and safetensors leave some files
    shutil.copytree(it.checkpoint, private)
    for path in private.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    overrides = (f"model.path={private}",)
    code, report = it(overrides, source=comfyui, merge=True, whole=True, to=it.folder / "whole", scale=2.0)
    assert code == OK and report["details"]["whole_checkpoint"] is True
    pipe = diffusers.SanaPipeline.from_pretrained(it.folder / "whole", use_safetensors=True)
    assert not type(pipe.transformer).__module__.startswith("trainer") and pipe.vae is not None
    twice = trained("sana", it.checkpoint, rank=4, alpha=5.0)
    close(exact_output("sana", pipe.transformer), exact_output("sana", twice))
    rest = [path.relative_to(it.checkpoint) for path in it.checkpoint.rglob("*") if path.is_file()]
    for path in rest:
        is_equal = (it.folder / "whole" / path).read_bytes() == (it.checkpoint / path).read_bytes()
        assert is_equal == (path.suffix != ".safetensors" or path.parts[0] != "transformer"), path
    (it.folder / "new").mkdir()
    (it.folder / "new" / "file").touch()
    for path in (it.folder / "whole", *(it.folder / "whole").rglob("*")):
        like = it.folder / "new" if path.is_dir() else it.folder / "new" / "file"
        assert path.stat().st_mode == like.stat().st_mode, path
    code, report = it(source=comfyui, form="diffusers", to=it.folder / "back", scale=2.0)
    assert code == OK and report["details"]["alpha"] == [2.5]
    absent = absent_parts(pipeline_class("sana"))
    loaded = pipeline_class("sana").from_pretrained(it.checkpoint, use_safetensors=True, **absent)
    loaded.load_lora_weights(it.folder / "back")
    close(exact_output("sana", loaded.transformer), exact_output("sana", twice))


def loud(it: Exported) -> Path:
    """The adapter with numbers that exceed float16 after multiplication."""
    path = it.folder / "loud.safetensors"
    save_file({key: value * 1e3 for key, value in load_file(it.adapter).items()}, path)
    return path


@pytest.mark.slow
def test_a_lokr_of_another_program_is_refused_where_a_format_can_not_hold_it(exported, tmp_path) -> None:
    """Sides divided differently from peft, or factors of other ranks; they can be merged."""
    it = exported("sana", type="lokr")
    name = adapters.list_adapted_modules(it.model)[0]
    outputs, inputs = it.model.get_submodule(name).get_base_layer().weight.shape
    odd = {"lokr_w1": random(outputs, 2), "lokr_w2": random(1, inputs // 2)}
    factors = {"lokr_w1": random(2, 2), "lokr_w2_a": random(outputs // 2, 40), "lokr_w2_b": random(40, inputs // 2)}
    for number, tensors in enumerate((odd, factors)):
        source = tmp_path / f"{number}.safetensors"
        save_file({f"lycoris_{name.replace('.', '_')}.{key}": value for key, value in tensors.items()}, source)
        options = {"source": source, "to": tmp_path / f"to{number}"}
        for dry_run in (True, False):
            code, report = it(form="diffusers", dry_run=dry_run, **options)
            assert code == USAGE and "--merge" in report["error"]["next_step"] and not options["to"].exists()
        assert f"the LoKr of {name} can't be written in diffusers' format" in report["error"]["message"]
        assert it(merge=True, **options)[0] == OK
        [weights] = options["to"].glob("*.safetensors")
        w2 = tensors.get("lokr_w2", factors["lokr_w2_a"] @ factors["lokr_w2_b"])
        base = load_file(it.checkpoint / "transformer" / weights.name)[f"{name}.weight"]
        expected = base + torch.kron(tensors["lokr_w1"], w2)
        torch.testing.assert_close(load_file(weights)[f"{name}.weight"], expected, rtol=1e-5, atol=1e-5)
    log = it.refused(overrides=("model.path=owner/name",), source=source)
    assert "module paths with underscores" in log and "on this machine" in log


class Foreign(Exported):
    """A file of another program, and a model that is not on this machine."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.config, self.capsys, self.adapter = folder / "pipeline.yaml", capsys, folder / "theirs.safetensors"
        model = {"family": "sana", "path": "owner/name"}
        datasets = [{"id": "a", "instance_data_dir": "media"}]
        self.config.write_text(json.dumps({"root": "work", "model": model, "datasets": datasets}))
        self.save("transformer")

    def save(self, *parts: str, dtype: torch.dtype = torch.float32, **more: torch.Tensor) -> None:
        tensors = {f"{part}.to_q.lora_{ab}.weight": torch.ones(2, 2) for part in parts for ab in "AB"}
        save_file({key: value.to(dtype) for key, value in tensors.items()} | more, self.adapter)


@pytest.fixture
def foreign(tmp_path, capsys):
    return Foreign(tmp_path, capsys)


def test_a_file_is_replaced_only_where_that_is_asked_for(foreign, tmp_path) -> None:
    """Also links; and never in a model's folder, for any path."""
    options = {"source": foreign.adapter, "to": tmp_path / "there.safetensors"}
    (tmp_path / "kept").write_bytes(b"kept")
    for make in (lambda: options["to"].write_bytes(b"kept"), lambda: options["to"].symlink_to(tmp_path / "kept")):
        make()
        for dry_run in (False, True):
            code, report = foreign(**options, dry_run=dry_run)
            assert code == USAGE and f"{options['to']} already exists" in report["error"]["message"]
            assert "--overwrite" in report["error"]["next_step"] and options["to"].read_bytes() == b"kept"
        assert foreign(**options, overwrite=True)[0] == OK and "diffusion_model.to_q.alpha" in load_file(options["to"])
        options["to"].unlink()
    assert (tmp_path / "kept").read_bytes() == b"kept"
    transformer = tmp_path / "model" / "transformer"
    transformer.mkdir(parents=True)
    (transformer / "weights.safetensors").write_bytes(b"kept")
    (tmp_path / "link").symlink_to(transformer)
    for marker in (transformer / "config.json", tmp_path / "model" / "model_index.json"):
        marker.touch()
        for place in (transformer / "weights.safetensors", tmp_path / "link" / "new.safetensors"):
            for more in ({"overwrite": True}, {"merge": True}):
                options["to"] = place.with_suffix("") if "merge" in more else place
                assert "in a model's folder" in foreign.refused(**options, **more)
        marker.unlink()
    assert [path.read_bytes() for path in transformer.iterdir()] == [b"kept"]
    assert "--overwrite" in foreign.refused(merge=True, to=tmp_path / "new", overwrite=True)


def test_each_of_two_experts_has_a_file_of_its_own(foreign, tmp_path) -> None:
    model, train = {"family": "wan2.2-a14b", "path": "owner/name"}, {"run": "run", "experts": "both"}
    datasets = [{"id": "a", "instance_data_dir": "media", "dataset_type": "video"}]
    foreign.config.write_text(json.dumps({"root": "work", "model": model, "datasets": datasets, "train": train}))
    name, files = "blocks.0.attn1.to_q", {}
    for number, expert in enumerate(("high", "low")):
        files[expert] = tmp_path / f"output/run-{expert}/adapter/pytorch_lora_weights.safetensors"
        files[expert].parent.mkdir(parents=True)
        tensors = {f"transformer.{name}.lora_{ab}.weight": torch.full((2, 2), number + 1.0) for ab in "AB"}
        save_file(tensors, files[expert], {"latentpress.family": "wan2.2-a14b", "latentpress.expert": expert})
    one = {"to": tmp_path / "low.safetensors"}
    for options in (one, {"source": files["low"]}, {"merge": True, **one}):
        assert "train.experts is both" in foreign.refused(**options)
    assert [*tmp_path.rglob("run-*.safetensors"), *tmp_path.glob("low*")] == []
    code, report = foreign()
    assert code == OK and report["done"] == 2 and {"high", "low"} <= report["details"].keys()
    assert foreign(overrides=("train.experts=low",), **one)[0] == OK
    for number, expert in enumerate(files):
        [path] = files[expert].parents[1].glob("*.safetensors")
        assert load_file(path)["diffusion_model.blocks.0.self_attn.q.lora_A.weight"].unique() == number + 1
    assert one["to"].read_bytes() == path.read_bytes()
    log = foreign.refused(overrides=("train.experts=low",), source=files["high"])
    assert "was trained for the expert high, and train.experts is low" in log
    foreign.save("transformer_2")
    for merge in (False, True):
        options = {"source": foreign.adapter, "to": tmp_path / "new", "merge": merge}
        log = foreign.refused(overrides=("train.experts=low",), **options)
        assert "has keys of transformer_2" in log


@pytest.mark.slow
def test_what_does_not_fit_is_refused_before_anything_is_written(exported, tiny, tmp_path) -> None:
    it = exported("sana")
    merged = {"merge": True, "to": tmp_path / "merged"}
    assert "has no result yet" in it.refused(overrides=("train.run=other",))
    for options, message in (
        ({"form": "diffusers"}, "is the adapter itself"),
        ({"merge": True}, "--merge needs a new folder"),
        ({"form": "comfyui", **merged}, "no --format"),
        ({"whole": True}, "--whole is only valid with --merge"),
        ({"scale": 0.0}, "--scale 0"),
        ({"source": tmp_path / "absent"}, "absent does not exist"),
        ({"merge": True, "to": it.checkpoint}, "is not empty"),
        ({"form": "lycoris"}, "is a LoRA, and the format lycoris"),
    ):
        assert message in it.refused(**options)
    foreign = export.save_lora(trained("kandinsky5-video-t2v", tiny("kandinsky5-video-t2v")), tmp_path / "k", "k5")
    assert "was trained for k5, and model.family is sana" in it.refused(source=foreign, **merged)
    save_file(load_file(foreign), foreign)  # without a note of its family
    for options in ({}, merged):
        assert f"{it.checkpoint} lacks" in it.refused(source=foreign, **options)
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(it.adapter.read_bytes()[:-8])
    assert f"{damaged} is damaged" in it.refused(source=damaged, **merged)
    packed = tmp_path / "packed"
    shutil.copytree(it.checkpoint / "transformer", packed / "transformer")
    [weights] = (packed / "transformer").glob("*.safetensors")
    save_file({key: value.to(torch.int8) for key, value in load_file(weights).items()}, weights)
    assert "of type I8, and an adapter can't be merged" in it.refused(overrides=(f"model.path={packed}",), **merged)
    small = {key: value.half() for key, value in load_file(it.checkpoint / "transformer" / weights.name).items()}
    save_file(small, weights, {"format": "pt"})
    message = it.refused(overrides=(f"model.path={packed}",), **merged | {"scale": 1e2, "source": loud(it)})
    assert "with the adapter, " in message and "has numbers that are not finite in float16" in message
    weights.write_bytes(b"none")
    assert f"{weights} is damaged" in it.refused(overrides=(f"model.path={packed}",), **merged)
    # A full disk, and an invalid path: no files remain.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for options in (merged, {"to": tmp_path / "merged"}):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        code, report = it(**options)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert code == INCOMPLETE and "merged: the file would exceed" in report["error"]["message"]
    code, report = it(merge=True, to=damaged / "inside")
    assert code == INCOMPLETE and f"{damaged} is a file, not a folder" in report["error"]["message"]
    assert not [*(tmp_path / "merged").glob("*")] and not list(tmp_path.glob(".*"))
    assert sorted(path.name for path in it.adapter.parent.iterdir()) == [it.adapter.name]
