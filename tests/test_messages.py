"""The texts that newcomers meet, compared with messages.txt, so that a change of words is one difference to read.

`make golden` records them. Other tests check the type of an error and the item, key or command that it names.
"""

import os
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

import schemas.cli.report
from tests.project import SETTINGS, Project

RECORDED = Path(__file__).with_name("messages.txt")
#: Parts of a text that differ from run to run -> their replacement.
VARIABLE = {
    r"^.*\b\d+:\d\d:\d\d.*\n": "",  # progress
    r"\b\d+(\.\d+)? ?(ms|s|min)\b": "TIME",
    r"\b[0-9a-f]{12,32}\b": "ID",
    r"\b\d+\.\d+\b": "N",
    r"(?<=\S)  +": "  ",
    r"[ \t]+$": "",
}


class Newcomer:
    """Calls programs in the folder of a project and writes down what they print."""

    def __init__(self, home: Project, checkpoint: Path) -> None:
        self.home, self.checkpoint, self.texts = home, checkpoint, dict[str, str]()

    def run(self, title: str, command: str, *more: str) -> None:
        """title: situation. command: program and options, as they are typed. more: options with spaces."""
        name, *words = command.split()
        module = "trainer.__main__" if name == "train" else f"stages.{name.replace('-', '_')}"
        result = CliRunner().invoke(import_module(module).app, [*words, *more], prog_name=f"latentpress {name}")
        text = (
            f"$ latentpress {' '.join([command, *more])}\n{result.stderr}{result.stdout}[exit code {result.exit_code}]"
        )
        text = text.replace(str(self.home.folder), "FOLDER").replace(str(self.checkpoint), "CHECKPOINT")
        for pattern, replacement in VARIABLE.items():
            text = re.sub(pattern, replacement, text, flags=re.M)
        self.texts[title] = text


def first_hour(home: Project, checkpoint: Path) -> Iterator[str]:
    """The situations of a person with a folder of photographs, in their usual order."""
    newcomer = Newcomer(home, checkpoint)
    run, file = newcomer.run, home.folder / "pipeline.yaml"
    run("no configuration", "status")
    for title, settings in {
        "an unknown key": {"trian": {"steps": 5}},
        "a value of another type": {"train": {"steps": "many"}},
        "an unknown family": {"model": {"family": "zimage"}},
        "an unknown flavour": {"model": {"family": "sana", "flavour": "sana-2b"}},
        "a folder that does not exist": {"datasets": [{"id": "photos", "instance_data_dir": "pictures"}]},
    }.items():
        file.write_text(str({**home.settings, **settings}))
        run(title, "discover")
    home.config()
    run("an empty folder", "discover")
    for number in range(4):
        home.image(f"{number}.png", caption=None, seed=number)
    run("no captions", "discover")
    run("no checkpoint", "bucket")
    home.settings["model"]["path"] = str(checkpoint)
    home.config()
    run("bucket before discover", "bucket")
    run("train before everything", "train")
    home.image("broken.jpg", caption="a picture").write_bytes(b"not a picture")
    trigger = "--set", "datasets.photos.trigger=ohwx woman", "--set", "stages.max_reject_fraction=1"
    run("pictures without captions, with a trigger", "discover", *trigger)
    run("the plan", "bucket", *trigger)
    run("rejected items", "status --rejects", *trigger)
    run("the state", "status", *trigger)
    run("nothing encoded", "index", *trigger)
    run("an unknown option", "status --verbos")
    run("a value that is not a number", "discover --workers many")
    run("a part that does not exist", "encode-text --shard 3/2")
    run("a value without a key", "status --set steps")
    for title, text in newcomer.texts.items():
        yield f"== {title} ==\n{text}\n"


@pytest.mark.slow
def test_texts_that_newcomers_meet(
    tmp_path: Path, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "root": "./work",
        "output": "./output",
        "model": SETTINGS["sana"] | {"path": "./sana"},
        "datasets": [{"id": "photos", "instance_data_dir": "./media", "resolution": 64, "allow_upscale": True}],
    }
    (tmp_path / "media").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(schemas.cli.report, "WIDTH", 1000)  # no line is folded, whatever the length of the paths
    texts = "\n".join(first_hour(Project(tmp_path, settings), tiny("sana")))
    if os.environ.get("GOLDEN") == "record":
        RECORDED.write_text(texts, encoding="utf-8")
        pytest.skip("recorded messages.txt")
    assert texts == RECORDED.read_text(encoding="utf-8"), "make golden records the new texts"
