"""The code of a model card, run as it is: a whole tiny checkpoint makes a picture or clip with what was uploaded."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image

from examples.load_adapter import missing_components
from schemas.json_records import format_record
from stages import push
from tests.forms import long
from tests.model_hub import ModelHub
from tests.project import Project
from tests.stages.report_run import FakeRun, step_line
from tests.trained_weights import save_changed_weights

pytestmark = pytest.mark.slow
REPO = "me/tabby"
LORA, DORA, LOKR, FULL = {"type": "lora"}, {"type": "lora", "dora": True}, {"type": "lokr"}, {"type": "full"}
EXPERTS = "wan2.2-a14b-t2v"  # of which the second is trained
T2I, SIZES = (
    "kandinsky5-image-t2i",
    {"kandinsky5-video-t2v": "64x64@5", "kandinsky5-video-i2v": "64x64@17", EXPERTS: "64x64@5"},
)
CASES = [
    # How weights are loaded depends on the adapter alone, what the pipeline is given on the task alone.
    *((T2I, adapter) if adapter == LORA else long(T2I, adapter) for adapter in (LORA, DORA, LOKR, FULL)),
    *(("sana", adapter) if adapter == FULL else long("sana", adapter) for adapter in (LORA, DORA, LOKR, FULL)),
    *(
        long(kind, adapter)
        for kind in ("kandinsky5-image-i2i", *SIZES)
        if kind != EXPERTS
        for adapter in (LORA, LOKR, FULL)
    ),
    *(long(EXPERTS, adapter) for adapter in (LORA, LOKR, FULL)),
    ("flux3", LORA),  # of a modular pipeline
    *(long(kind, adapter) for kind in ("flux3", "flux3-i2i") for adapter in (LOKR, FULL)),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, in which a repository is a folder, as diffusers takes it to be; no card."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for kind in (diffusers.DiffusionPipeline, diffusers.ModularPipeline):
        monkeypatch.setattr(kind, "to", lambda pipe, device: pipe)
    for name in ("source.png", "reference.png"):
        Image.linear_gradient("L").convert("RGB").resize((64, 64)).save(name)
    return folder


def push_run(home: Project, kind: str, adapter: dict[str, Any], models: ModelHub, here: Path) -> str:
    """Upload the weights of a finished run; the files of the repository, and the base model, then lie in `here`. The
    code of the card."""
    run, size = FakeRun(home), SIZES.get(kind, "64x64")
    run.metrics(step_line(4))
    about = {"prompt": "a grey cat", "negative_prompt": "blurry", "bucket": size, "steps": 2, "guidance": 2.0}
    about |= {"guidance_low": 1.5} if kind == EXPERTS else {}
    run.latent(4, "one", **about)
    run.clip(4, "one", size=(64, 64)) if kind in SIZES else run.picture(4, "one", (200, 0, 0), (64, 64))
    checkpoint = Path(run.config.model.source)
    config = run.config
    save_changed_weights(checkpoint, config.model.family, run.folder, config.part, config.comfyui_file, **adapter)
    (run.folder / "result.json").write_bytes(format_record({"step": 4, "result": "", "weights": "trained"}))
    home.run(push.run)
    repo = f"{REPO}-low" if kind == EXPERTS else REPO
    for name, content in models.files(repo).items():
        (here / repo / name).parent.mkdir(parents=True, exist_ok=True)
        (here / repo / name).write_bytes(content)
    base = here / run.config.model.flavour_spec.repo
    base.parent.mkdir(parents=True)
    base.symlink_to(checkpoint)
    found = re.search(r"```python\n(.*?)```", (here / repo / "README.md").read_text(), re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.parametrize(
    ("kind", "adapter"), CASES, ids=lambda it: it if isinstance(it, str) else "-".join(map(str, it.values()))
)
def test_the_code_of_the_card_runs(
    project: Callable[..., Project],
    models: ModelHub,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    adapter: dict[str, Any],
) -> None:
    size = SIZES.get(kind, "64x64")
    home = project(kind, train={"run": "run", "steps": 4, "adapter": adapter, "trackers": []}, hub={"repo": REPO})
    home.settings["train"] |= {"experts": "low"} if kind == EXPERTS else {}
    home.settings["validation"] = {"size": size, "fps": 10.0}
    home.settings["datasets"][0] |= {"conditioning_data": "sources"} if "i2i" in kind else {}
    code = push_run(home, kind, adapter, models, here)
    load, frames = diffusers.DiffusionPipeline.from_pretrained.__func__, []
    without = missing_components(home.config())  # torchvision, which the card asks for

    def load_here(cls: type, *args: Any, **options: Any) -> Any:
        assert options["dtype"] == torch.float32
        return load(cls, *args, **options, **without)

    def load_parts_here(pipe: Any, dtype: torch.dtype, load: Any = diffusers.ModularPipeline.load_components) -> None:
        assert dtype == torch.float32
        pipe.update_components(**without)
        load(pipe, dtype=dtype)

    def keep_frames(result: Any, path: str, fps: int) -> None:
        assert (path, fps) == ("out.mp4", 10)
        frames.extend(result)

    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", classmethod(load_here))
    monkeypatch.setattr(diffusers.ModularPipeline, "load_components", load_parts_here)
    monkeypatch.setattr(diffusers.utils, "export_to_video", keep_frames)  # needs imageio-ffmpeg, which it asks for
    names: dict[str, Any] = {}
    exec(compile(code, "card", "exec"), names)
    if kind in SIZES:
        assert len(frames) == int(size.partition("@")[2])
    else:
        with Image.open("out.png") as made:
            assert made.size == (64, 64)
    if kind == EXPERTS:
        assert "guidance_scale_2=1.5" in code and not hasattr(names["pipe"].transformer, "peft_config")
        check_weights(names["pipe"].transformer_2, adapter, here / f"{REPO}-low", "transformer_2")
    else:
        check_weights(names["pipe"].transformer, adapter, here / REPO)


def check_weights(
    transformer: torch.nn.Module, adapter: dict[str, Any], folder: Path, part: str = "transformer"
) -> None:
    """Those that were uploaded are in the pipeline."""
    from safetensors.torch import load_file

    name = f"{part}/diffusion_pytorch_model" if adapter["type"] == "full" else "pytorch_lora_weights"
    saved, own = load_file(folder / f"{name}.safetensors"), transformer.state_dict()
    if adapter["type"] == "full":
        assert saved.keys() == own.keys()
        for name, value in saved.items():
            torch.testing.assert_close(own[name], value)
        return
    mark = "lokr_" if adapter["type"] == "lokr" else "lora_"
    loaded = [value for name, value in own.items() if mark in name]
    assert len(loaded) == len(saved) and all(value.abs().max() > 0 for value in loaded)
    assert sum(map(torch.numel, loaded)) == sum(map(torch.numel, saved.values()))
