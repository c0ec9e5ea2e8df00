"""README's last step as a user does it: what was trained makes a picture or a clip in its pipeline, and changes it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from examples import load_adapter
from schemas.catalog import get_flavour
from tests.conformance.flavours import ROWS
from tests.forms import long
from tests.trained_weights import save_changed_weights

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
ADAPTERS = {"kandinsky5-image-i2i": "lokr", "sana": "full", "qwen-image": "full", "wan2.2-a14b-i2v": "full"}
#: In the short form: a clip that is made of a picture, and a picture of a model in full rank.
SHORT = ("kandinsky5-video-i2v", "sana")
KINDS = [kind if kind in SHORT else long(kind) for kind in ROWS]


def size_of(kind: str) -> str:
    """For i2v of Kandinsky 5, with the frames that its pipeline needs for its last step."""
    spec, task = ROWS[kind].spec, ROWS[kind].task
    return "64x64" + (f"@{17 if spec.scale_window and task == 'i2v' else 5}" if spec.video else "")


@pytest.fixture
def finished(tmp_path: Path, tiny: Callable[[str], Path]) -> Callable[[str], Path]:
    """kind -> the configuration of a run whose result is no zero."""

    def make(kind: str) -> Path:
        row, adapter = ROWS[kind], ADAPTERS.get(kind, "lora")
        checkpoint = tiny(row.checkpoint or kind)
        dataset = {"id": "a", "instance_data_dir": "a", "dataset_type": "video" if row.spec.video else "image"}
        dataset |= {"conditioning_data": "b"} if row.task == "i2i" else {}
        settings = {
            "root": "work",
            "model": {"family": row.family, "flavour": row.flavour, "path": str(checkpoint), "precision": "float32"},
            "datasets": [dataset],
            "output": "output",
            "train": {"run": "one", "adapter": {"type": adapter}},
            "validation": {"size": size_of(kind), "steps": 2, "fps": 10.0},
        }
        expert = get_flavour(row.family, row.flavour).experts.get("low")
        settings["train"] |= {"experts": "low"} if expert else {}
        (tmp_path / "pipeline.yaml").write_text(json.dumps(settings))
        folder, part = ("one-low", expert.part) if expert else ("one", "transformer")
        save_changed_weights(checkpoint, row.family, tmp_path / "output" / folder, part, type=adapter)
        return tmp_path / "pipeline.yaml"

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_checkpoint_makes_a_picture_or_clip_without_torchvision(finished, tmp_path: Path, kind: str) -> None:
    config, out = finished(kind), tmp_path / ("made.webp" if ROWS[kind].spec.video else "made.png")
    more = []
    if ROWS[kind].task in ("i2i", "i2v"):
        Image.linear_gradient("L").convert("RGB").save(tmp_path / "source.png")
        more = ["--image", str(tmp_path / "source.png")]
    load_adapter.main([str(config), "--prompt", "a grey cat", "--out", str(out), *more])
    with Image.open(out) as image:
        assert image.size == (64, 64) and getattr(image, "n_frames", 1) == int(size_of(kind).partition("@")[2] or 1)


@pytest.mark.long
@pytest.mark.parametrize("kind", [kind for kind in ROWS if "a14b" in kind])
def test_the_change_of_one_expert_is_seen(finished, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    load_adapter.main([str(finished(kind))])
    assert ", low: loaded in Wan" in capsys.readouterr().out


def test_as_a_script_it_compares_and_says_what_is_wrong(forked_programs, finished, tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "examples" / "load_adapter.py")]
    done = subprocess.run([*script, str(finished("kandinsky5-image-t2i"))], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "loaded in Kandinsky5T2IPipeline; mean |change of the output| = 0." in done.stdout
    with pytest.raises(SystemExit, match="latentpress train"):
        load_adapter.main([str(tmp_path / "pipeline.yaml"), "--set", "train.run=nothing"])
    done = subprocess.run([*script, str(tmp_path / "absent.yaml")], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "absent.yaml" in done.stderr
    assert "Traceback" not in done.stderr
