"""Files that are called like modules, where a user works and where his media lie: no program imports one.

Every name of the standard library and of every installed package is there, ours among them.
"""

import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from functools import partial
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from PIL import Image

from schemas.cli.console import Console, Options, Report
from schemas.config.loading import load_config
from stages import bucket, discover, encode_latents, encode_text, encode_vision, export, index
from trainer.__main__ import run as train

SCRIPTS = Path(sysconfig.get_path("scripts"))
OURS = ("stages", "trainer", "cache", "schemas", "examples")
INSTALLED = {name for name in packages_distributions() if name.isidentifier()}
STARTED = (
    "h2",
    "tokenize",
    "json",
    "torch",
    "datasets",
    "sitecustomize",
    "socket",
    "numpy",
    "typer",
    "schemas",
    "cache",
)
HOSTILE = """\
import os
with open({notes!r}, "a") as notes:
    notes.write(__file__ + "\\n")
raise SystemExit("MINE")
"""


class Place:
    """A working directory, a configuration elsewhere, its media elsewhere again."""

    def __init__(self, folder: Path, checkpoint: Path, vision: Path) -> None:
        self.notes = folder / "notes"
        self.work, self.project, self.media = folder / "here", folder / "project", folder / "media"
        for made in (self.work, self.project, self.media):
            made.mkdir()
        for number in range(3):
            Image.new("RGB", (64, 64), (60 * number, 20, 90)).save(self.media / f"{number}.png")
            (self.media / f"{number}.txt").write_text(f"colour number {number}")
        settings = {
            "root": "kept",
            "cache": {"unit_mib": 0.02},
            "model": {"family": "kandinsky5-image", "path": str(checkpoint), "precision": "float32"},
            "text": {"max_length": 3},
            "vision": {"model": str(vision), "size": 84},
            "datasets": [{"id": "colours", "instance_data_dir": str(self.media), "resolution": 64}],
            "stages": {"encode-text": {"threads": 1}, "encode-latents": {"threads": 1}},
            "train": {"run": "one", "steps": 2, "batch_size": 1, "threads": 1},
            "validation": {"size": "64x64", "steps": 1, "eval_samples": 1, "prompts": [{"name": "p", "prompt": "a"}]},
        }
        self.config = self.project / "pipeline.yaml"
        self.config.write_text(json.dumps(settings))

    def lay(self, folder: Path, *names: str) -> None:
        for number, name in enumerate(names):
            text = HOSTILE.format(notes=str(self.notes))
            if number % 2 or name in OURS:
                (folder / name).mkdir()
                (folder / name / "__init__.py").write_text(text)
            else:
                (folder / f"{name}.py").write_text(text)

    def run(self, *command: str | Path, code: int = 0, **environment: str) -> str:
        """What the command printed; it ended with `code`, and nothing that lies about was imported."""
        kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONSAFEPATH")}
        words = [str(word) for word in command]
        done = subprocess.run(words, cwd=self.work, env=kept | environment, capture_output=True, text=True)
        assert not self.notes.exists(), (words, self.notes.read_text(), done.stderr)
        assert "MINE" not in done.stdout + done.stderr
        assert done.returncode == code, (words, done.stderr)
        return done.stdout

    def latentpress(
        self, program: str, *words: str, config: str = "pipeline.yaml", code: int = 0, **environment: str
    ) -> str:
        start = (SCRIPTS / "latentpress", program, "--config", self.config.with_name(config))
        return self.run(*start, *words, code=code, **environment)


@pytest.fixture
def place(tmp_path: Path, tiny: Callable[[str], Path]) -> Place:
    return Place(tmp_path, tiny("kandinsky5-image-t2i"), tiny("dinov2"))


def in_this_process(config: Path, *programs: Callable[..., Report]) -> None:
    for program in programs:
        report = program(load_config(config), Options(config), Console(stderr=io.StringIO()))
        assert report.exit_code == 0


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[[str], Path]) -> Place:
    """One that is planned, where every name lies in every folder."""
    made = Place(tmp_path_factory.mktemp("kept"), tiny("kandinsky5-image-t2i"), tiny("dinov2"))
    in_this_process(made.config, discover.run, bucket.run)
    shutil.copytree(made.project, made.project.with_name("planned"))
    for folder in (made.work, made.project, made.media):
        made.lay(folder, *sorted({*sys.stdlib_module_names, *INSTALLED, *OURS}))
    return made


@pytest.fixture
def planned(kept: Place) -> Place:
    shutil.rmtree(kept.project / "kept", ignore_errors=True)
    shutil.copytree(kept.project.with_name("planned") / "kept", kept.project / "kept")
    return kept


@pytest.fixture(scope="module")
def trained(kept: Place) -> Place:
    """The same, in another root, where the stages have been run up to the training."""
    settings = json.loads(kept.config.read_text()) | {"root": "whole"}
    kept.config.with_name("whole.yaml").write_text(json.dumps(settings))
    stages = (discover, bucket, encode_text, encode_latents, encode_vision, index)
    to_folder = partial(export.run, to=str(kept.project / "exported"))
    in_this_process(kept.config.with_name("whole.yaml"), *(stage.run for stage in stages), train, to_folder)
    return kept


# Programs from a process that has imported what the encoders need: each in a child, which runs the installed script.
TOGETHER = """
import json, os, runpy, sys
from schemas.cli.import_path import remove_working_directory

remove_working_directory()
import stages.encoding.text.kandinsky5, stages.encoding.text.worker, stages.encoding.vae.flux
import stages.encoding.vae.worker, stages.encoding.vision.worker

for words in json.loads(sys.argv[2]):
    if os.fork() == 0:
        sys.argv = sys.argv[1:2] + words
        runpy.run_path(sys.argv[0], run_name="__main__")
        raise SystemExit(0)
    if code := os.waitstatus_to_exitcode(os.wait()[1]):
        raise SystemExit(f"{words} ended with {code}")
"""


def together(place: Place, *programs: tuple[str, ...]) -> None:
    script = place.notes.with_name("script") / "together.py"  # whose folder comes first, as that of `latentpress` does
    script.parent.mkdir(exist_ok=True)
    script.write_text(TOGETHER)
    asked = [[*words, "--config", str(place.config.with_name("whole.yaml"))] for words in programs]
    place.run(sys.executable, script, SCRIPTS / "latentpress", json.dumps(asked))


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("discover", "--workers", "2", "--set", "root=again"),
        ("bucket",),
        ("preview", "--plan"),
        ("encode-latents", "--workers", "2"),
        ("run", "--workers", "2", "--set", "stages.order=[discover, bucket]"),
        ("status",),
        ("gc",),
    ],
    ids=" ".join,
)
def test_no_program_imports_what_lies_about(planned: Place, words: tuple[str, ...]) -> None:
    planned.latentpress(*words, code=3 if words[0] == "status" else 0)  # work remains


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a dozen programs, of which five import torch
def test_nor_do_the_other_encoding_programs_and_those_after_them(planned: Place, trained: Place) -> None:
    for words in (
        ("index",),
        ("verify",),
        ("export", "--to", "exported"),
        ("import", "--from", "../project/exported", "--set", "root=other"),
    ):
        trained.latentpress(*words, config="whole.yaml")
    anew = ("--set", "root=kept")  # which is planned and no more
    together(trained, ("encode-text", *anew), ("encode-vision", *anew), ("decode",), ("preview",))

    # As README says it; `torchrun -m trainer` would look for the trainer in the working directory first.
    launcher = (SCRIPTS / "torchrun", "--standalone", "--nproc-per-node", "2", "--no-python", SCRIPTS / "latentpress")
    words = ("train", "--config", trained.config.with_name("whole.yaml"), "--set", "train.run=launched")
    trained.run(*launcher, *words)


@pytest.mark.parametrize("words", [("stages.discover", "--workers", "2"), ("trainer", "--help")], ids=" ".join)
def test_a_module_is_safe_with_the_option(planned: Place, words: tuple[str, ...]) -> None:
    """So does `run` start every program."""
    planned.run(sys.executable, "-P", "-m", *words, "--config", planned.config)


@pytest.mark.slow
def test_a_program_started_as_a_module_drops_the_working_directory(place: Place) -> None:
    """All that can be done without -P: the packages' own names are found before any of their code runs."""
    place.lay(place.work, *STARTED)
    place.run(sys.executable, "-m", "stages.discover", "--config", place.config, "--workers", "2")
    place.run(sys.executable, "-m", "stages.cli", "bucket", "--config", place.config)
    place.run(sys.executable, "-m", "trainer", "--help")


@pytest.mark.slow
@pytest.mark.parametrize("entries", ["", os.pathsep.join(["", ".", "here", "/nowhere"])])
def test_an_empty_or_relative_entry_of_pythonpath_is_left_out(place: Place, entries: str) -> None:
    (place.work / "here").mkdir()
    for folder in (place.work, place.work / "here"):
        place.lay(folder, *(name for name in STARTED if name not in ("sitecustomize", "schemas")))
    place.latentpress("discover", "--workers", "2", PYTHONPATH=entries)


def test_an_absolute_entry_of_pythonpath_stays(place: Place) -> None:
    code = "import stages.cli; stages.cli.main()"
    (place.project / "stages.py").write_text("")
    found = place.run(
        *(sys.executable, "-c", f"import sys; sys.argv = ['latentpress', '--version']; {code}; print(sys.path)"),
        PYTHONPATH=f"{os.pathsep}{place.media}",
    )
    assert str(place.media) in found and f"'{place.work}'" not in found
