"""The last step of the README: trained weights in their pipeline make a picture or a clip, and change it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from examples import load_adapter
from schemas.catalog import FAMILIES, get_flavour
from tests.forms import long
from tests.trained_weights import save_changed_weights

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
RUNS = {
    "kandinsky5-image-t2i": ("kandinsky5-image", "t2i-lite-sft", "lora", "64x64"),
    "kandinsky5-image-i2i": ("kandinsky5-image", "i2i-lite-sft", "lokr", "64x64"),
    "kandinsky5-video-t2v": ("kandinsky5-video", "t2v-lite-sft-5s", "lora", "64x64@5"),
    "kandinsky5-video-i2v": ("kandinsky5-video", "i2v-lite-5s", "lora", "64x64@17"),
    "sana": ("sana", "sana-1.6b-1024px", "full", "64x64"),
    "z-image": ("z-image", "z-image", "lora", "64x64"),
    "flux2-klein": ("flux2-klein", "klein-base-4b", "lora", "64x64"),
    "qwen-image": ("qwen-image", "qwen-image", "full", "64x64"),
    "wan2.1-t2v": ("wan2.1", "t2v-1.3b", "lora", "64x64@5"),
    "wan2.2-5b-i2v": ("wan2.2-5b", "i2v-5b", "lora", "64x64@5"),
    "wan2.2-a14b-t2v": ("wan2.2-a14b", "t2v-a14b", "lora", "64x64@5"),
    "wan2.2-a14b-i2v": ("wan2.2-a14b", "i2v-a14b", "full", "64x64@5"),
    "qwen-image-edit": ("qwen-image-edit", "qwen-image-edit", "lora", "64x64"),
    "qwen-image-edit-plus": ("qwen-image-edit-plus", "qwen-image-edit-2511", "lora", "64x64"),
}
#: Kinds of the short form: a picture, a clip made from a picture, and a model in full rank.
SHORT = ("kandinsky5-video-i2v", "sana", "z-image")
KINDS = [kind if kind in SHORT else long(kind) for kind in RUNS]


@pytest.fixture
def finished(tmp_path: Path, tiny: Callable[[str], Path]) -> Callable[[str], Path]:
    """finished(kind) -> the configuration of a run with trained weights that are not zero."""

    def make(kind: str) -> Path:
        name, flavour, adapter, size = RUNS[kind]
        dataset = {"id": "a", "instance_data_dir": "a", "dataset_type": "video" if FAMILIES[name].video else "image"}
        dataset |= {"conditioning_data": "b"} if get_flavour(name, flavour).task == "i2i" else {}
        settings = {
            "root": "work",
            "model": {"family": name, "flavour": flavour, "path": str(tiny(kind)), "precision": "float32"},
            "datasets": [dataset],
            "output": "output",
            "train": {"run": "one", "adapter": {"type": adapter}},
            "validation": {"size": size, "steps": 2, "fps": 10.0},
        }
        expert = get_flavour(name, flavour).experts.get("low")
        settings["train"] |= {"experts": "low"} if expert else {}
        (tmp_path / "pipeline.yaml").write_text(json.dumps(settings))
        folder, part = ("one-low", expert.part) if expert else ("one", "transformer")
        save_changed_weights(tiny(kind), name, tmp_path / "output" / folder, part, type=adapter)
        return tmp_path / "pipeline.yaml"

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_checkpoint_makes_a_picture_or_clip_without_torchvision(finished, tmp_path: Path, kind: str) -> None:
    config, out = finished(kind), tmp_path / ("made.webp" if FAMILIES[RUNS[kind][0]].video else "made.png")
    more = []
    if get_flavour(*RUNS[kind][:2]).task in ("i2i", "i2v"):
        Image.linear_gradient("L").convert("RGB").save(tmp_path / "source.png")
        more = ["--image", str(tmp_path / "source.png")]
    load_adapter.main([str(config), "--prompt", "a grey cat", "--out", str(out), *more])
    with Image.open(out) as image:
        assert image.size == (64, 64) and getattr(image, "n_frames", 1) == int(RUNS[kind][3].partition("@")[2] or 1)


@pytest.mark.long
@pytest.mark.parametrize("kind", [kind for kind in RUNS if "a14b" in kind])
def test_the_change_of_one_expert_is_seen(finished, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    load_adapter.main([str(finished(kind))])
    assert ", low: loaded in Wan" in capsys.readouterr().out


def test_as_a_script_it_compares_and_says_what_is_wrong(forked_programs, finished, tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "examples" / "load_adapter.py")]
    process = subprocess.run([*script, str(finished("kandinsky5-image-t2i"))], capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")
    assert "loaded in Kandinsky5T2IPipeline; mean |change of the output| = 0." in process.stdout
    with pytest.raises(SystemExit, match=r"nothing/adapter .*latentpress train"):
        load_adapter.main([str(tmp_path / "pipeline.yaml"), "--set", "train.run=nothing"])
    process = subprocess.run([*script, str(tmp_path / "absent.yaml")], capture_output=True, text=True)
    assert process.returncode == 1 and process.stderr.startswith("error: ") and "absent.yaml" in process.stderr
    assert "Traceback" not in process.stderr
