"""Each extra installed alone, from the wheel, runs the programs that it is for."""

import json
import re
import shutil
import signal
import subprocess
import tarfile
import urllib.request
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import pytest
from PIL import Image

from cache.store.store import Store
from schemas.cli.starting import EXTRAS
from stages.cli import PROGRAMS
from tests.project import Project
from tests.s3_server import BUCKET, S3Server
from tests.webhook_server import serve_webhook
from tests.wheels import clean_environment, make_environment

pytestmark = pytest.mark.long
#: Of these a project that is trained leaves something to do, or they end before they look.
NEEDING = ("discover", "preview", "encode-text", "encode-latents", "train", "decode", "score", "report", "ui")
WITHOUT = [name for name in PROGRAMS if name not in EXTRAS]


@pytest.fixture(scope="module")
def python_of(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """extras -> the python of an environment with them alone."""
    made: dict[str, Path] = {}

    def find(extras: str) -> Path:
        if extras not in made:
            made[extras] = make_environment(tmp_path_factory.mktemp("environment"), wheel, extras)
        return made[extras]

    return find


def start(python: Path, folder: Path, *words: str, code: int = 0) -> str:
    """What a program printed, in a folder; it ended with `code`."""
    command = [python, "-m", "latentpress", *words]
    done = subprocess.run(command, cwd=folder, env=clean_environment(), capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def trained(python_of: Callable[[str], Path], tiny: Callable[[str], Path], tmp_path_factory: Any) -> Path:
    """A folder in which everything up to decode was done, by what a user installs for that."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "media").mkdir()
    for number in range(2):
        Image.new("RGB", (64, 64), (60 * number, 20, 90)).save(folder / "media" / f"{number}.png")
        (folder / "media" / f"{number}.txt").write_text(f"color number {number}")
    settings = {
        "root": "work",
        "model": {"family": "z-image", "path": str(tiny("z-image")), "precision": "float32"},
        "datasets": [{"id": "colors", "instance_data_dir": "media", "resolution": 64, "dataset_type": "image"}],
        "train": {"steps": 1, "batch_size": 1, "device": "cpu", "threads": 1},
        "validation": {"every": 1, "steps": 1, "size": "64x64", "prompts": [{"name": "one", "prompt": "a color"}]},
    }
    (folder / "pipeline.yaml").write_text(json.dumps(settings))
    start(python_of("media,encode,train"), folder, "run")
    assert list((folder / "output" / "run" / "samples").glob("*/one*.png"))
    return folder


@pytest.fixture
def project(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "project"))


@pytest.mark.parametrize("name", WITHOUT)
def test_programs_without_an_extra_need_none(python_of: Callable[[str], Path], project: Path, name: str) -> None:
    """Of those that start others or need a file only what they say of themselves."""
    python = python_of("")
    start(python, project, name, "--help")
    options = {"export": ["--to", "exported"]}.get(name, [])
    if name in ("index", "status", "doctor", "gc", "export"):
        start(python, project, name, *options, code=3 if name == "doctor" else 0)  # it compares with the configuration


@pytest.mark.parametrize("name", NEEDING)
def test_a_program_without_its_extra_names_it(
    python_of: Callable[[str], Path], project: Path, tiny: Callable[[str], Path], name: str
) -> None:
    removed = {"train": ["output"], "score": ["work/text", "work/latents"]}
    for folder in removed.get(name, ["work/text", "work/latents", "output"]):
        shutil.rmtree(project / folder)
    options = ["--set", f"validation.scores.clip={tiny('clip')}"] if name == "score" else []
    said = start(python_of(""), project, name, *options, code=3)
    assert f"pip install 'latentpress[{EXTRAS[name]}]'" in said


class Case(NamedTuple):
    """What is removed, and the programs that make it again, with settings in place of the project's."""

    removed: str
    programs: str
    settings: dict[str, Any] = {}  # noqa: RUF012 (read only)


ENCODED, TRAINED, ALL = "work/text work/latents", "output", "work output"
HEIF = {"datasets": [{"id": "colors", "instance_data_dir": "heif", "resolution": 64, "dataset_type": "image"}]}
TARS = {"datasets": [{"id": "colors", "instance_data_dir": "{0..1}.tar", "resolution": 64, "dataset_type": "image"}]}
FACES = {"datasets": [{"id": "colors", "instance_data_dir": "media", "resolution": 64, "crop_style": "face"}]}
TABLE = {
    "datasets": [
        {
            "id": "a",
            "source": "huggingface",
            "instance_data_dir": "table",
            "resolution": 64,
            "caption_column": ["text"],
            "dataset_type": "image",
        }
    ]
}
SCENES = {
    "model": {"family": "kandinsky5-video"},
    "datasets": [
        {
            "id": "clips",
            "instance_data_dir": "clips",
            "dataset_type": "video",
            "resolution": 64,
            "video": {"num_frames": 5, "clip_selection": "chunks", "scenes": True},
        }
    ],
}
CASES = {
    "media": Case(ALL, "discover, bucket, preview --plan"),
    "media,heif": Case(ALL, "discover, bucket", HEIF),
    "media,webdataset": Case(ALL, "discover, bucket", TARS),
    "media,huggingface": Case(ALL, "discover, bucket", TABLE),
    "media,faces": Case(ALL, "discover, bucket", FACES),
    "media,scenes": Case(ALL, "discover, bucket", SCENES),
    "encode": Case(ENCODED, "encode-text, encode-latents, preview"),
    "encode,features": Case("work/plans work/items work/features", "features, bucket", {"features": {"model": None}}),
    "encode,quant": Case(ENCODED, "encode-text --set text.quantization=int8-quanto"),
    "media,encode,train": Case(ALL, "rehearse"),
    "train": Case(TRAINED, "train, export-adapter --to exported.safetensors"),
    "train,quant": Case(TRAINED, "train --set train.base_precision=int8-torchao"),
    "train,optimizers": Case(TRAINED, "train --set train.optimizer.name=prodigy"),
    "train,wandb": Case(TRAINED, "train --set train.trackers=[tensorboard,wandb]"),
    "report": Case("output/run/report.html", "report"),
}


@pytest.mark.parametrize("extras", CASES)
def test_an_extra_alone_runs_its_programs(
    python_of: Callable[[str], Path], project: Path, monkeypatch: pytest.MonkeyPatch, extras: str
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    case = CASES[extras]
    for name in case.removed.split():
        shutil.rmtree(project / name, ignore_errors=True)
    add_media(project, extras)
    settings = json.loads((project / "pipeline.yaml").read_text()) | case.settings
    (project / "pipeline.yaml").write_text(json.dumps(settings))
    for program in case.programs.split(", "):
        said = start(python_of(extras), project, *program.split())
        assert "rejected" not in said.replace("0 rejected", "").replace("rejected: 0", "") or program == "preview"


def add_media(project: Path, extras: str) -> None:
    """The media of the case: those of the project in another form, or a clip."""
    if extras == "media,heif":
        import pillow_heif

        (project / "heif").mkdir()
        pillow_heif.from_pillow(Image.open(project / "media" / "0.png")).save(project / "heif" / "0.heic")
        (project / "heif" / "0.txt").write_text("dark")
    if extras == "media,webdataset":
        for number in range(2):
            with tarfile.open(project / f"{number}.tar", "w") as file:
                for suffix in (".png", ".txt"):
                    file.add(project / "media" / f"{number}{suffix}", f"{number}{suffix}")
    if extras == "media,huggingface":
        shutil.copytree(project / "media", project / "table", ignore=shutil.ignore_patterns("*.txt"))
        (project / "table" / "metadata.csv").write_text("file_name,text\n0.png,dark\n1.png,red\n")
    if extras == "media,scenes":
        Project(project, {}).video("../clips/0.mp4", size=(128, 96))


def test_a_store_alone_with_media(python_of: Callable[[str], Path], project: Path, s3: S3Server) -> None:
    """Media and root are there. What needs no extra reads the root with that of the store alone."""
    address = f"s3://{BUCKET}"
    for path in (project / "media").iterdir():
        Store(f"{address}/media").publish_bytes(path.name, path.read_bytes())
    settings = json.loads((project / "pipeline.yaml").read_text()) | {"root": f"{address}/root"}
    settings["datasets"][0] |= {"instance_data_dir": f"{address}/media", "identity": "store"}
    (project / "pipeline.yaml").write_text(json.dumps(settings))
    for program in ("discover", "bucket"):
        start(python_of("media,s3"), project, program)
    assert "encode-latents" in start(python_of("s3"), project, "status", code=3)


def test_http_alone_with_media(python_of: Callable[[str], Path], project: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=project / "media"))
    Thread(target=server.serve_forever, daemon=True).start()
    settings = json.loads((project / "pipeline.yaml").read_text()) | {"root": "other"}
    settings["datasets"][0] |= {"instance_data_dir": f"http://127.0.0.1:{server.server_port}/"}
    (project / "pipeline.yaml").write_text(json.dumps(settings))
    try:
        start(python_of("media,http"), project, "discover")
    finally:
        server.shutdown()
        server.server_close()


def test_the_page_alone(python_of: Callable[[str], Path], project: Path) -> None:
    command = [python_of("ui"), "-m", "latentpress", "ui", "--port", "0"]
    process = subprocess.Popen(command, cwd=project, env=clean_environment(), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        address = next(found[0] for line in process.stderr if (found := re.search(r"http://127\.0\.0\.1:\d+/", line)))
        assert b"encode-latents" in urllib.request.urlopen(address).read()
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode == 0


def test_notifications_alone_with_media(python_of: Callable[[str], Path], project: Path, monkeypatch: Any) -> None:
    with serve_webhook() as webhook:
        monkeypatch.setenv("HOOK", webhook.url)
        settings = json.loads((project / "pipeline.yaml").read_text())
        settings["notify"] = {"webhooks": [{"url_env": "HOOK"}]}
        (project / "pipeline.yaml").write_text(json.dumps(settings))
        start(python_of("media,notify"), project, "notify")
        assert webhook.received


@pytest.mark.parametrize(("extra", "library"), [("decord", "decord"), ("ray", "ray"), ("optimizers", "schedulefree")])
def test_a_library_that_only_a_larger_set_up_uses_is_there(
    python_of: Callable[[str], Path], tmp_path: Path, extra: str, library: str
) -> None:
    """decord reads clips of a video family; tests/test_wheel.py has a Ray cluster."""
    assert re.search(rf"{library} +\d", start(python_of(extra), tmp_path, "doctor"))
