"""configure: the program, on real pictures; what it asks, writes and refuses."""

import io
import json
import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

import pytest

from schemas.cli.console import Console, Options
from schemas.config.loading import load_config
from stages import configure
from stages.configuring import look, questions
from stages.configuring.answers import Answers
from stages.configuring.look import Looker, Prediction
from stages.configuring.recipes import attempts, list_recipes, list_tasks
from tests.project import Project
from tests.reports import odd_keys
from tests.terminal import run_in_terminal

ROWS = [{"program": name, "weights_gib": 1.0, "activations_gib": 1.0} for name in ("encode-text", "train")]


CARD = {"device": "cuda:0", "name": "a card", "memory": 40 << 30, "dtypes": ["float32"]}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for number in range(4):
        Project(tmp_path, {}).image(f"{number}.png", (400 + number, 300), caption=f"picture {number}", seed=number)
    return tmp_path


class Here:
    """In place of StageProcesses: the programs run in this process."""

    def __init__(self, extra_options: Mapping[str, list[str]]) -> None:
        pass

    def run(self, program: str, options: Options) -> tuple[int, dict]:
        config = load_config(options.config, options.overrides)
        report = import_module(f"stages.{program}").run(config, options, Console(stderr=io.StringIO()))
        return report.exit_code, report.to_dict()


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "StageProcesses", Here)


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Memory by the text alone: 20 GiB of training, 5 where its blocks are offloaded. Collects the texts."""
    texts = []

    def predict(self: Looker, text: str, card_gib: float) -> Prediction:
        texts.append(text)
        need = 5 if "blocks: true" in text else 20
        return Prediction([{**row, "all_gib": need, "fits": need <= card_gib} for row in ROWS])

    monkeypatch.setattr(Looker, "predict", predict)
    return texts


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, dict, str]]:
    """call(folder, *words) -> exit code, document and what was said."""

    monkeypatch.setattr(questions, "run_probe", lambda probe: {"devices": [CARD]})

    def start(folder: Path, *words: str) -> tuple[int, dict, str]:
        monkeypatch.chdir(folder)
        with pytest.raises(SystemExit) as ended:
            configure.app(args=[*words, "--json"])
        said = capfd.readouterr()
        return int(ended.value.code or 0), json.loads(said.out), said.err

    return start


YES = ("--yes", "--card", "16", "--time", "none")


@pytest.mark.slow
def test_a_file_is_written_and_changed(
    photos: Path, predicted: list[str], call: Callable[..., tuple[int, dict, str]], here: None
) -> None:
    file = photos / "pipeline.yaml"
    code, report, _ = call(photos, *YES, "--dry-run")
    assert (code, report["remaining"], file.exists(), list(odd_keys(report))) == (0, 1, False, [])
    details = report["details"]
    assert details["media"]["items"] == details["media"]["captions"] == details["media"]["used"] == 4
    assert details["answers"] | {"media": "./media", "task": "style", "card_gib": 16.0} == details["answers"]
    assert [row["fits"] for row in details["memory"]] == [True, True] and len(report["next_steps"]) == 3
    assert {row["time"] for row in details["time"] if row["stage"] == "train"} == {"unknown: not measured here yet"}
    assert "int8" in predicted[0] and "int8" not in details["file"]["text"]  # the next recipe, with offload, fits
    code, report, _ = call(photos, *YES)
    text, config = file.read_text(), load_config(file)
    assert (code, report["done"], report["details"]["file"]["text"]) == (0, 1, text)
    assert config.datasets[0].instance_data_dir == str(photos / "media") and config.train.offload.blocks
    assert (photos / "work/media/media/media.arrow").exists()  # discover need not read the pictures again

    file.write_text("# mine\n" + text.replace("steps: 500", "steps: 400"))
    assert call(photos, *YES)[1]["skipped"] == 1
    code, report, said = call(photos, "--yes", "--time", "1h", "--set", "train.seed=3")
    changes = report["details"]["file"]["changes"]
    assert "found cuda:0: a card, 40.0 GiB" in said and "does not compute in bfloat16" in said
    assert code == 0 and "+  seed: 3" in changes and "blocks" in changes
    assert file.read_text().startswith("# mine\n") and "--max-time 1h" in report["next_steps"][1]


@pytest.mark.slow
def test_a_recipe_is_taken_as_it_is(
    photos: Path,
    predicted: list[str],
    call: Callable[..., tuple[int, dict, str]],
    here: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it saves of memory stays, however large the card is; a card that was found comes before the recipe's."""
    code, report, _ = call(photos, "--yes", "--recipe", "qwen-image-lora-24gb", "--card", "80", "--dry-run")
    assert code == 0 and "base_precision" in report["details"]["file"]["text"] and len(predicted) == 1
    code, report, _ = call(photos, "--yes", "--recipe", "sana-lora-12gb", "--dry-run")
    assert code == 0 and report["details"]["answers"]["card_gib"] == 40.0
    monkeypatch.setattr(questions, "run_probe", lambda probe: {"devices": []})
    code, report, _ = call(photos, "--yes", "--recipe", "qwen-image-lora-24gb", "--dry-run")
    assert code == 0 and report["details"]["answers"]["card_gib"] == 24.0


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_has_a_task_and_can_be_asked_for(name: str) -> None:
    tasks = list_tasks(name)
    assert tasks and ("motion" in tasks) == name.startswith(("wan", "kandinsky-video"))
    (candidate,) = attempts(Answers("./media", "media", tasks[0], 80.0, recipe=name))
    assert candidate.recipe == name and f"{candidate.made_for:g}gb" == name.rpartition("-")[2]


@pytest.mark.slow
def test_what_is_refused(
    photos: Path, predicted: list[str], call: Callable[..., tuple[int, dict, str]], here: None
) -> None:
    (photos / "empty").mkdir()
    file = ("--config", "new.yaml")
    for words, message in (
        ((), "no terminal"),
        (("--yes", "--media", "empty"), "no pictures and no clips"),
        (("--yes", "--media", "nowhere"), "no folder"),
        (("--yes", "--task", "motion"), "trained on clips"),
        (("--yes", "--task", "editing", "--card", "16"), "needs its source"),
        (("--yes", "--card", "small"), "no memory in GiB"),
        (("--yes", "--time", "soon"), "no time"),
        (("--yes", "--family", "other"), "valid: "),
        (("--yes", "--recipe", "other"), "valid: kandinsky-image-lora-16gb, "),
        (("--yes", "--recipe", "sana-lora-12gb", "--family", "sana"), "a recipe has its family"),
        (("--yes", "--recipe", "sana-lora-12gb", "--task", "editing"), "is a recipe for style or character or concept"),
        (("--yes", "--recipe", "wan-1.3b-lora-12gb"), "trained on clips"),
        (("--yes", "--set", "train.steps=many", "--card", "16"), "train.steps"),
    ):
        code, report, _ = call(photos, *file, *words)
        assert code == 2 and message in report["error"]["message"], words
    code, report, _ = call(photos, *file, "--yes", "--card", "3")
    assert code == 3 and "nothing that was tried fits" in report["error"]["message"]
    assert not (photos / "new.yaml").exists()


def test_pairs_are_found_and_one_caption_does_for_all(
    photos: Path,
    call: Callable[..., tuple[int, dict, str]],
    here: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And without the extra `train` nothing is predicted."""
    monkeypatch.setattr(look, "TRAIN_LIBRARIES", ("no_such_library",))
    Project(photos, {}).image("../before/1.png", (500, 400), caption=None)
    for number in (0, 2, 3):
        Project(photos, {}).image(f"../before/{number}.png", (500, 400), caption=None)
    for caption in (photos / "media").glob("*.txt"):
        caption.unlink()
    code, report, said = call(photos, "--config", "edit.yaml", *YES, "--caption", "make it blue")
    config = load_config(photos / "edit.yaml")
    assert code == 0 and "no_such_library" in report["details"]["memory"] and "make it blue" in said
    assert config.datasets[0].conditioning_data == str(photos / "before") and config.model.task == "i2i"
    assert config.validation.prompts[0].image == str(photos / "before/0.png")


@pytest.mark.long
def test_it_asks_in_a_terminal(photos: Path) -> None:
    """Wrong answers are asked for again, and nothing is written before the last one."""
    code = "from stages.configuring import look; look.TRAIN_LIBRARIES = ('no_such_library',); "
    code += "from stages.configure import app; app(prog_name='latentpress configure')"
    command = [sys.executable, "-c", code, "--config", "mine.yaml"]
    environment = {"PYTHONPATH": os.fspath(Path(__file__).resolve().parents[2])}
    answers = ("nowhere", "", "paint", "character", "24", "2h")
    status, shown = run_in_terminal(command, 100, photos, environment, [*answers, "n"])
    assert status == 0 and not (photos / "mine.yaml").exists(), shown
    status, shown = run_in_terminal(command, 100, photos, environment, [*answers, "y"])
    assert status == 0 and load_config(photos / "mine.yaml").train.run == "media-lora", shown
    for expected in ("no folder of this machine", "'paint' is none of", "not predicted", "Write mine.yaml?", "Next:"):
        assert expected in shown, shown
