"""The program new on real pictures: its questions, files and errors."""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from schemas.config.loading import load_config
from stages import new
from stages.configuring import questions
from stages.configuring.text import write_file
from tests.forms import long
from tests.project import Project
from tests.reports import odd_keys
from tests.terminal import run_in_terminal

CARD = {"device": "cuda:0", "name": "a card", "memory": 40 << 30, "dtypes": ["float32"]}
YES = ("--yes", "--card", "16", "--time", "none")
Call = Callable[..., tuple[int, dict, str]]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for number in range(4):
        Project(tmp_path, {}).image(f"{number}.png", (400 + number, 300), caption=f"picture {number}", seed=number)
    return tmp_path


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """call(folder, *words) -> exit code, report, and text on stderr."""

    monkeypatch.setattr(questions, "run_probe", lambda probe: {"devices": [CARD]})

    def start(folder: Path, *words: str) -> tuple[int, dict, str]:
        monkeypatch.chdir(folder)
        with pytest.raises(SystemExit) as ended:
            new.app(args=[*words, "--json"])
        said = capfd.readouterr()
        return int(ended.value.code or 0), json.loads(said.out), said.err

    return start


@pytest.mark.slow
def test_a_file_is_written_and_changed(photos: Path, call: Call) -> None:
    file = photos / "media.yaml"  # next to the folder of media, with its name
    code, report, _ = call(photos, *YES, "--dry-run")
    assert (code, report["remaining"], file.exists(), list(odd_keys(report))) == (0, 1, False, [])
    assert report["details"]["media"] | {"items": 4, "with_a_caption_file": 4} == report["details"]["media"]
    assert report["details"]["answers"] | {"task": "style", "card_gib": 16.0} == report["details"]["answers"]
    assert report["next_steps"][0].endswith("--dry-run --card 16") and "5080" in report["details"]["training_time"]
    code, report, _ = call(photos, *YES)
    text, config = file.read_text(), load_config(file)
    assert (code, report["done"], report["details"]["file"]["text"]) == (0, 1, text)
    assert config.datasets[0].instance_data_dir == str(photos / "media") and config.datasets[0].resolution == 256

    file.write_text("# mine\n" + text.replace("steps: 500", "steps: 400"))
    assert call(photos, "media", *YES)[1]["skipped"] == 1 == call(photos / "media", ".", *YES)[1]["skipped"]
    code, report, said = call(photos, "--yes", "--time", "1h", "--set", "train.seed=3")
    assert "found cuda:0: a card, 40.0 GiB" in said and "bfloat16" in said
    assert code == 0 and "+  seed: 3" in report["details"]["file"]["changes"]
    assert file.read_text().startswith("# mine\n") and "--max-time 1h" in report["next_steps"][-1]


def test_a_sentence_says_what_is_left_out_and_how_long_it_takes(photos: Path, call: Call) -> None:
    picture = photos / "media/noise.png"
    Image.effect_noise((400, 300), 90).save(picture)
    picture.write_bytes(picture.read_bytes()[:-2000])
    (photos / "media/clip.mp4").write_bytes(b"not read, because pictures are trained")
    details = call(photos, "media", *YES, "--card", "RTX 4080", "--dry-run")[1]["details"]
    assert details["left_out"][0].startswith("noise.png: can't be decoded (image file is truncated")
    assert details["left_out"][1:] == ["1 clip: only pictures are trained on"]
    assert re.fullmatch(
        r"4 of 5 pictures, Z-Image, 500 steps, \d+ (minutes )?to \d+ (minutes|hours) on such a card \(4080; from step "
        r"times that others published\), 11\.3 of 16 GB",
        details["sentence"],
    )


def test_a_recipe_is_taken_as_it_is(photos: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that save memory stay on any card; a detected card replaces the recipe's card."""
    code, report, _ = call(photos, "--yes", "--recipe", "qwen-image-lora-24gb", "--card", "80", "--dry-run")
    assert code == 0 and "base_precision" in report["details"]["file"]["text"]
    monkeypatch.setattr(questions, "run_probe", lambda probe: {"devices": []})
    code, report, _ = call(photos, "--yes", "--recipe", "qwen-image-lora-24gb", "--dry-run")
    assert code == 0 and report["details"]["answers"]["card_gib"] == 24.0


@pytest.mark.parametrize(("card", "fits"), [("16", "it fits"), long("6", "barely"), ("5", "does not")])
def test_whether_the_choice_fits_the_card(photos: Path, call: Call, card: str, fits: str) -> None:
    _, report, said = call(photos, "--yes", "--card", card, "--dry-run")
    assert fits in report["details"]["memory"] and ("--family" in said) == (card != "16")


def test_what_is_refused(photos: Path, call: Call) -> None:
    (photos / "empty").mkdir()
    for words, name in (
        ((), "not a terminal"),
        (("empty", "--yes"), "empty"),
        (("nowhere", "--yes"), "not a folder"),
        (("--yes", "--task", "motion"), "motion"),
        (("--yes", "--task", "editing", "--card", "16"), "--sources"),
        (("--yes", "--card", "small"), "--card"),
        (("--yes", "--time", "soon"), "--time"),
        (("--yes", "--family", "other"), "valid: "),
        (("--yes", "--recipe", "other"), ", kandinsky-image-lora-16gb, "),
        (("--yes", "--recipe", "sana-lora-12gb", "--family", "sana"), "--recipe and --family"),
        (("--yes", "--recipe", "sana-lora-12gb", "--task", "editing"), "character or style or object"),
        (("--yes", "--set", "train.steps=many", "--card", "16"), "train.steps"),
    ):
        code, report, _ = call(photos, "--config", "new.yaml", *words)
        assert code == 2 and name in report["error"]["message"] + report["error"]["next_step"], words
    (photos / "empty/broken.png").write_bytes(b"no picture")
    code, report, _ = call(photos, "--config", "new.yaml", *YES, "empty")
    assert code == 3 and "broken.png" in report["error"]["message"]
    assert not (photos / "new.yaml").exists()


def test_pairs_are_found_and_captions_are_never_invented(photos: Path, call: Call) -> None:
    for number in range(4):
        Project(photos, {}).image(f"../before/{number}.png", (500, 400), caption=None)
    code, report, _ = call(photos, "--config", "edit.yaml", *YES)
    config = load_config(photos / "edit.yaml")
    assert config.datasets[0].conditioning_data == str(photos / "before") and config.model.task == "i2i"
    assert config.validation.prompts[0].image == str(photos / "before/0.png")
    for caption in (photos / "media").glob("*.txt"):
        caption.unlink()
    code, report, errors = call(photos, "--config", "none.yaml", *YES)
    assert code == 0 and "latentpress caption" in errors and "latentpress caption" in report["next_steps"][1]
    assert load_config(photos / "none.yaml").caption is not None
    assert not load_config(photos / "none.yaml").datasets[0].trigger
    call(photos, "--config", "one.yaml", *YES, "--trigger", "make it blue")
    assert load_config(photos / "one.yaml").datasets[0].trigger == "make it blue"


def test_the_prompts_of_samples_have_the_trigger(photos: Path, call: Call) -> None:
    """Also without captions, so that training makes pictures."""
    words = ("--yes", "--task", "character", "--trigger", "ohwx man,", "--card", "16")
    call(photos, "--config", "captions.yaml", *words)
    prompts = [prompt.prompt for prompt in load_config(photos / "captions.yaml").validation.prompts]
    assert prompts == ["ohwx man, picture 0", "ohwx man, picture 2"]
    for path in (photos / "media").glob("*.txt"):
        path.unlink()
    call(photos, "--config", "none.yaml", *words)
    assert [prompt.prompt for prompt in load_config(photos / "none.yaml").validation.prompts] == ["ohwx man"]


def test_a_file_that_appeared_or_changed_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text("theirs")
    for before in (None, "mine"):
        with pytest.raises(new.LatentpressError, match="changed"):
            write_file(file, before, "new")
    assert file.read_text() == "theirs"
    write_file(file, "theirs", "new")
    assert file.read_text() == "new"


@pytest.mark.long
def test_it_asks_in_a_terminal(photos: Path) -> None:
    """Wrong answers are asked for again, and nothing is written before the last one."""
    command = [sys.executable, "-c", "from stages.new import app; app(prog_name='latentpress new')"]
    command += ["--config", "mine.yaml"]
    environment = {"PYTHONPATH": os.fspath(Path(__file__).resolve().parents[2])}
    answers = ("nowhere", "", "paint", "character", "ohwx man", "24", "2h")
    status, screen = run_in_terminal(command, 100, photos, environment, [*answers, "n"])
    assert status == 0 and not (photos / "mine.yaml").exists(), screen
    status, screen = run_in_terminal(command, 100, photos, environment, [*answers, "y"])
    assert status == 0 and load_config(photos / "mine.yaml").train.run == "media-lora", screen
    for expected in ("not a folder", "'paint' is not a task", "Write mine.yaml?", "Next:"):
        assert expected in screen, screen
