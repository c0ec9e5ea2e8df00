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
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from PIL import Image

from schemas.cli.console import Console, Options, Report
from schemas.config.loading import load_config
from stages import bucket, discover, encode_latents, encode_text, index
from tests.forms import long

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
IN_NEW_PROCESSES = ("discover", "bucket", "encode-text")
HOSTILE = """\
import os
with open({notes!r}, "a") as notes:
    notes.write(__file__ + "\\n")
raise SystemExit("MINE")
"""


class Place:
    """A working directory, a configuration elsewhere, its media elsewhere again."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
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
            "datasets": [{"id": "colors", "instance_data_dir": str(self.media), "resolution": 64}],
            "stages": {
                "encode-text": {"threads": 1, "workers": 2},
                "encode-latents": {"threads": 1},
                "order": list(IN_NEW_PROCESSES),
            },
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
    return Place(tmp_path, tiny("kandinsky5-image-t2i"))


def in_this_process(config: Path, *programs: Callable[..., Report]) -> None:
    for program in programs:
        report = program(load_config(config), Options(config, workers=1), Console(stderr=io.StringIO()))
        assert report.exit_code == 0


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[[str], Path]) -> Place:
    """One that is planned, where every name lies in every folder."""
    made = Place(tmp_path_factory.mktemp("kept"), tiny("kandinsky5-image-t2i"))
    in_this_process(made.config, discover.run, bucket.run)
    settings = json.loads(made.config.read_text()) | {"root": "whole"}
    made.config.with_name("whole.yaml").write_text(json.dumps(settings))
    shutil.copytree(made.project, made.project.with_name("planned"))
    for folder in (made.work, made.project, made.media):
        made.lay(folder, *sorted({*sys.stdlib_module_names, *INSTALLED, *OURS}))
    return made


@pytest.fixture
def planned(kept: Place) -> Place:
    shutil.rmtree(kept.project / "kept", ignore_errors=True)
    shutil.copytree(kept.project.with_name("planned") / "kept", kept.project / "kept")
    return kept


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [("discover", "--workers", "2", "--set", "root=again"), long(("preview", "--plan"))], ids=" ".join
)
def test_no_program_imports_what_lies_about(planned: Place, words: tuple[str, ...]) -> None:
    planned.latentpress(*words)


@pytest.mark.long
@pytest.mark.timeout(1800)  # a dozen processes, of which three import torch
def test_nor_do_a_run_and_training_on_several_processes(planned: Place) -> None:
    """In new processes, as users start them; and two spawned workers make the same shards as one."""
    planned.latentpress("run", config="whole.yaml")
    in_this_process(planned.config, encode_text.run)
    assert texts(planned.project / "whole") == texts(planned.project / "kept") != {}
    in_this_process(planned.config.with_name("whole.yaml"), encode_latents.run, index.run)
    # As README says it; `torchrun -m trainer` would look for the trainer in the working directory first.
    launcher = (SCRIPTS / "torchrun", "--standalone", "--nproc-per-node", "1", "--no-python", SCRIPTS / "latentpress")
    words = ("train", "--config", planned.config.with_name("whole.yaml"), "--set", "train.run=launched")
    planned.run(*launcher, *words)


def texts(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in (root / "text").rglob("*.arrow")}


@pytest.mark.long
def test_a_program_started_as_a_module_drops_the_working_directory(place: Place) -> None:
    """All that can be done without -P: the packages' own names are found before any of their code runs."""
    place.lay(place.work, *STARTED)
    place.run(sys.executable, "-m", "stages.discover", "--config", place.config, "--workers", "2")
    place.run(sys.executable, "-m", "stages.cli", "bucket", "--config", place.config)
    place.run(sys.executable, "-m", "trainer", "--help")


@pytest.mark.long
@pytest.mark.parametrize("entries", [long(""), os.pathsep.join(["", ".", "here", "/nowhere"])])
def test_an_empty_or_relative_entry_of_pythonpath_is_left_out(place: Place, entries: str) -> None:
    (place.work / "here").mkdir()
    for folder in (place.work, place.work / "here"):
        place.lay(folder, *(name for name in STARTED if name not in ("sitecustomize", "schemas")))
    place.latentpress("discover", "--workers", "2", PYTHONPATH=entries)


def test_what_a_program_starts_has_a_clean_path(place: Place) -> None:
    """As docs/configuration.md says, whatever Python itself has imported by then."""
    start = "import subprocess; subprocess.run([sys.executable, '-c', 'import sys; print(sys.path)'])"
    found = place.run(
        *(sys.executable, "-c", "import sys; sys.argv = ['latentpress', '--version']; import stages.cli; "
          f"stages.cli.main(); {start}"),
        PYTHONPATH=os.pathsep.join(["", ".", "here", str(place.media)]),
    )  # fmt: skip
    (path,) = (line for line in found.splitlines() if line.startswith("["))  # what the two print comes in any order
    assert f"'{place.media}'" in path
    assert not any(f"'{entry}'" in path for entry in ("", ".", "here", place.work, place.work / "here"))
