"""The unchanged code of a model card: a complete tiny checkpoint makes a picture or clip with the uploaded weights."""

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
EXPERTS = "wan2.2-a14b-t2v"  # the second expert is trained
T2I, SIZES = (
    "kandinsky5-image-t2i",
    {"kandinsky5-video-t2v": "64x64@5", "kandinsky5-video-i2v": "64x64@17", EXPERTS: "64x64@5"},
)
CASES = [
    # Loading of weights depends only on the adapter, arguments of the pipeline only on the task.
    *((T2I, adapter) if adapter == LORA else long(T2I, adapter) for adapter in (LORA, DORA, LOKR, FULL)),
    *(("sana", adapter) if adapter == FULL else long("sana", adapter) for adapter in (LORA, DORA, LOKR, FULL)),
    *(
        long(kind, adapter)
        for kind in ("kandinsky5-image-i2i", *SIZES)
        if kind != EXPERTS
        for adapter in (LORA, LOKR, FULL)
    ),
    *(long(EXPERTS, adapter) for adapter in (LORA, LOKR, FULL)),
]


@pytest.fixture
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, in which repositories are folders, which diffusers supports. Without a card."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(diffusers.DiffusionPipeline, "to", lambda pipe, device: pipe)
    Image.linear_gradient("L").convert("RGB").resize((64, 64)).save("source.png")
    return folder


def push_run(home: Project, kind: str, adapter: dict[str, Any], models: ModelHub, working_directory: Path) -> str:
    """Upload the weights of a finished run, and place the files of the repository and the base model in the working
    directory. Returns the code of the card."""
    run, size = FakeRun(home), SIZES.get(kind, "64x64")
    run.metrics(step_line(4))
    about = {"prompt": "a grey cat", "negative_prompt": "blurry", "bucket": size, "steps": 2, "guidance": 2.0}
    about |= {"guidance_low": 1.5} if kind == EXPERTS else {}
    run.latent(4, "one", **about)
    run.clip(4, "one", size=(64, 64)) if kind in SIZES else run.picture(4, "one", (200, 0, 0), (64, 64))
    checkpoint = Path(run.config.model.source)
    save_changed_weights(checkpoint, run.config.model.family, run.folder, run.config.part, **adapter)
    (run.folder / "result.json").write_bytes(format_record({"step": 4, "result": "", "weights": "trained"}))
    home.run(push.run)
    repo = f"{REPO}-low" if kind == EXPERTS else REPO
    for name, content in models.repositories[repo].files.items():
        (working_directory / repo / name).parent.mkdir(parents=True, exist_ok=True)
        (working_directory / repo / name).write_bytes(content)
    base = working_directory / run.config.model.flavour_spec.repo
    base.parent.mkdir(parents=True)
    base.symlink_to(checkpoint)
    match = re.search(r"```python\n(.*?)```", (working_directory / repo / "README.md").read_text(), re.DOTALL)
    assert match is not None
    return match[1]


@pytest.mark.parametrize(
    ("kind", "adapter"), CASES, ids=lambda it: it if isinstance(it, str) else "-".join(map(str, it.values()))
)
def test_the_code_of_the_card_runs(
    project: Callable[..., Project],
    models: ModelHub,
    working_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    adapter: dict[str, Any],
) -> None:
    size = SIZES.get(kind, "64x64")
    home = project(kind, train={"run": "run", "steps": 4, "adapter": adapter, "trackers": []}, hub={"repo": REPO})
    home.settings["train"] |= {"experts": "low"} if kind == EXPERTS else {}
    home.settings["validation"] = {"size": size, "fps": 10.0}
    home.settings["datasets"][0] |= {"conditioning_data": "sources"} if "i2i" in kind else {}
    code = push_run(home, kind, adapter, models, working_directory)
    load, frames = diffusers.DiffusionPipeline.from_pretrained.__func__, []
    without = missing_components(home.config())  # torchvision, which the card installs

    def load_here(cls: type, *args: Any, **options: Any) -> Any:
        assert options["dtype"] == torch.float32
        return load(cls, *args, **options, **without)

    def keep_frames(result: Any, path: str, fps: int) -> None:
        assert (path, fps) == ("out.mp4", 10)
        frames.extend(result)

    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", classmethod(load_here))
    monkeypatch.setattr(
        diffusers.utils, "export_to_video", keep_frames
    )  # needs imageio-ffmpeg, which the card installs
    names: dict[str, Any] = {}
    exec(compile(code, "card", "exec"), names)
    if kind in SIZES:
        assert len(frames) == int(size.partition("@")[2])
    else:
        with Image.open("out.png") as picture:
            assert picture.size == (64, 64)
    if kind == EXPERTS:
        assert "guidance_scale_2=1.5" in code and not hasattr(names["pipe"].transformer, "peft_config")
        check_weights(names["pipe"].transformer_2, adapter, working_directory / f"{REPO}-low", "transformer_2")
    else:
        check_weights(names["pipe"].transformer, adapter, working_directory / REPO)


def check_weights(
    transformer: torch.nn.Module, adapter: dict[str, Any], folder: Path, part: str = "transformer"
) -> None:
    """Check that the pipeline contains the uploaded weights."""
    from safetensors.torch import load_file

    name = f"{part}/diffusion_pytorch_model" if adapter["type"] == "full" else "pytorch_lora_weights"
    saved, state = load_file(folder / f"{name}.safetensors"), transformer.state_dict()
    if adapter["type"] == "full":
        assert saved.keys() == state.keys()
        for name, value in saved.items():
            torch.testing.assert_close(state[name], value)
        return
    mark = "lokr_" if adapter["type"] == "lokr" else "lora_"
    loaded = [value for name, value in state.items() if mark in name]
    assert len(loaded) == len(saved) and all(value.abs().max() > 0 for value in loaded)
    assert sum(map(torch.numel, loaded)) == sum(map(torch.numel, saved.values()))
