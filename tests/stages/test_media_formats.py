"""Media of every format through the programs, all at once: each file gives what a person expects, or a reject with the
reason."""

import base64
import html
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cache.sets.set_lookup import current_plan
from cache.shards.shard_io import open_reader
from cache.store.store import Store
from schemas.cli.console import Options, Report, run_program
from schemas.errors import LatentpressError
from stages import bucket, discover, encode_latents, encode_text, index, preview
from tests.project import SETTINGS, Project
from tests.stages import media_cases, media_files
from tests.stages.media_cases import CLIP, IMAGES, LANDSCAPE, PORTRAIT, VIDEOS, Reject, Sample

ROOT = Path(__file__).parents[2]
VIDEO = "kandinsky5-video-t2v"


# -- one project, every program ----------------------------------------------------------------------------------------


@dataclass(repr=False)
class Outcome:
    """What the programs made of a folder."""

    home: Any
    overrides: tuple[str, ...] = ()
    reports: dict[str, Report] = field(default_factory=dict)
    page: str = ""
    latents: dict[str, np.ndarray] = field(default_factory=dict)  # path -> latent

    @property
    def rejects(self) -> dict[str, Reject]:
        return {
            row["path"] if stage != "latents" else os.path.relpath(row["path"], self.home.media): Reject(
                stage, row["reason"]
            )
            for stage in ("discover", "bucket", "latents")
            for row in self.reports[stage].rejects
        }

    @property
    def active(self) -> dict[str, dict]:
        """path -> row of ACTIVE."""
        config = self.home.config(*self.overrides)
        return {row["path"]: row for row in current_plan(Store(config.root), config).active.to_pylist()}

    @cached_property
    def pictures(self) -> list[tuple[str, str]]:
        """Data and description of each picture on the page."""
        found = re.findall(r'<img src="data:image/webp;base64,([^"]+)" [^>]*alt="([^"]*)">', self.page)
        return [(data, html.unescape(said)) for data, said in found]

    def strip(self, path: str) -> list[np.ndarray]:
        """The pictures of an item on the page, as they are cut; a clip's in order."""
        seen = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in path)
        alt = re.compile(rf"cropped to \S+: (?:[\d.]+ s of )?{re.escape(seen)}")
        found = [base64.b64decode(data) for data, said in self.pictures if alt.fullmatch(said)]
        return [np.asarray(Image.open(io.BytesIO(data)).convert("RGB")) for data in found]


@pytest.fixture(scope="module")
def start(tiny) -> Callable[..., Project]:
    """start(folder, kind, **dataset) -> the project of the other tests, for a whole module."""
    return partial(project, tiny)


def project(tiny: Callable[[str], Path], folder: Path, kind: str, **dataset: Any) -> Project:
    settings = {"id": "photos", "instance_data_dir": "media", "resolution": 64, **dataset}
    if "video" in kind:
        settings |= {
            "dataset_type": "video",
            "video": {"num_frames": 9, "frame_rate": 12.0, **dataset.get("video", {})},
        }
    home = Project(
        folder,
        {
            "root": "work",
            "output": "output",
            "model": {**SETTINGS[kind], "path": str(tiny(kind)), "precision": "float32"},
            "latents": {"posterior": "mode"},
            "datasets": [settings],
            "stages": {"max_reject_fraction": 1.0, "encode-text": {"threads": 1}, "encode-latents": {"threads": 1}},
        },
    )
    home.media.mkdir(parents=True)
    return home


def fill(home: Any, cases: dict[str, tuple]) -> None:
    for name, (make, _) in cases.items():
        make(home.media / name)
        if name != "uncaptioned.png":
            (home.media / name).with_suffix(".txt").write_text("a scene")


STAGES = "discover", "bucket", "text", "latents", "index", "preview"


def through(home: Any, *overrides: str, stages: Sequence[str] = STAGES, buckets: Sequence[str] = ()) -> Outcome:
    """Run these stages. buckets: those that preview shows; all where none is given."""
    outcome, page = Outcome(home, overrides), home.folder / "page.html"
    programs: dict[str, Callable[..., Report]] = {
        "discover": discover.run,
        "bucket": bucket.run,
        "text": encode_text.run,
        "latents": encode_latents.run,
        "index": index.run,
        "preview": partial(preview.run, plan=True, items=1000, out=page, bucket=list(buckets)),
    }
    for name in stages:
        outcome.reports[name] = home.run(programs[name], *overrides)
    outcome.page = page.read_text(encoding="utf-8") if "preview" in stages else ""
    outcome.latents = latents(home, *overrides)
    return outcome


def latents(home: Any, *overrides: str, tensor: str = "latent") -> dict[str, np.ndarray]:
    config = home.config(*overrides)
    store = Store(config.root)
    found = {}
    for name in home.shards(f"latents/{encode_latents.STAGE.fingerprint(config)}"):
        shard = open_reader(store, f"latents/{encode_latents.STAGE.fingerprint(config)}/{name}")
        found |= {row.id: row.tensors[tensor].numpy() for row in map(shard.read, range(len(shard)))}
    active = current_plan(store, config).active.to_pylist()
    return {row["path"]: found[row["sample_id"]] for row in active if row["sample_id"] in found}


@pytest.fixture(scope="module")
def images(tmp_path_factory, start) -> Outcome:
    home = start(tmp_path_factory.mktemp("images"), "kandinsky5-image-t2i")
    fill(home, IMAGES)
    media_cases.folder_with_a_picture(home.media / "x.png")
    for name in (media_cases.NO_UTF8, "clip.mp4", "readme.md"):
        media_cases.saved(media_files.picture(99))(home.media / name)
    return through(home)


@pytest.fixture(scope="module")
def videos(tmp_path_factory, start) -> Outcome:
    home = start(tmp_path_factory.mktemp("videos"), VIDEO, animations="video")
    fill(home, VIDEOS)
    return through(home)


def problems(outcome: Outcome, cases: dict[str, tuple]) -> Iterator[str]:
    """Where the result differs from the table."""
    rejects, active = outcome.rejects, outcome.active
    for name, (_, expected) in cases.items():
        there = active.get(name, {}).get("bucket")
        if isinstance(expected, Reject):
            if rejects.get(name) != expected or (there is not None) != (expected.stage == "latents"):
                yield f"{name!r}: {rejects.get(name)} and in bucket {there} instead of {expected}"
        elif name in rejects or there != expected.bucket:
            yield f"{name!r}: {rejects.get(name)} and in bucket {there} instead of {expected.bucket}"
        elif expected.shown:
            yield from differences(name, outcome, expected)


def differences(name: str, outcome: Outcome, expected: Sample) -> Iterator[str]:
    strip = outcome.strip(name)
    width, height, frames = map(int, re.split("[x@]", expected.bucket))
    if [frame.shape[:2] for frame in strip] != [(height, width)] * frames:
        yield f"{name!r}: pictures of {[frame.shape for frame in strip]}"
        return
    if expected.colors is not None:
        far = max(float(np.abs(media_files.corners(frame) - expected.colors).max()) for frame in strip)
        if far > 25:
            yield f"{name!r}: corners {media_files.corners(strip[0]).round().tolist()} instead of {expected.colors}"
    for number, (frame, level) in enumerate(zip(strip, expected.levels, strict=False)):
        if abs(media_files.level(frame) - level) > media_files.STEP * 0.45:
            yield f"{name!r}: frame {number} has level {media_files.level(frame):.0f} instead of {level}"
    if expected.exact and not np.array_equal(outcome.latents[name], outcome.latents["plain.png"]):
        yield f"{name!r}: other latents than plain.png"


@pytest.mark.slow
def test_every_image_is_what_a_person_expects(images: Outcome) -> None:
    assert not (wrong := list(problems(images, IMAGES))), "\n".join(wrong)


@pytest.mark.slow
def test_every_video_is_what_a_person_expects(videos: Outcome) -> None:
    assert not (wrong := list(problems(videos, VIDEOS))), "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["images", "videos"])
def test_every_file_is_accounted_for_exactly_once(which: str, request) -> None:
    outcome = request.getfixturevalue(which)
    for name, report in outcome.reports.items():
        assert (name, report.exit_code, report.failed, report.damage) == (name, 0, [], [])
    listed = [row["path"] for stage in ("discover", "bucket") for row in outcome.reports[stage].rejects]
    media = {
        os.path.relpath(path, outcome.home.media) for path in outcome.home.media.rglob("*") if path.suffix != ".txt"
    }
    media -= {"x.png"}
    ignored = {"clip.mp4", "readme.md"} if which == "images" else set()
    shown = {media_cases.NO_UTF8_SHOWN if path == media_cases.NO_UTF8 else path for path in media - ignored}
    assert sorted([*listed, *outcome.active]) == sorted(shown)
    others = str(outcome.reports["discover"].details["datasets"][0]["other_files"])
    assert others.partition(":")[0] == str(len(ignored))
    # One of the two of the same bytes is encoded.
    unreadable = {path for path, reject in outcome.rejects.items() if reject.stage == "latents"}
    assert outcome.latents.keys() == outcome.active.keys() - unreadable
    assert outcome.reports["latents"].done == len(outcome.latents) - 1
    assert outcome.reports["index"].details["samples"] == len(outcome.latents)


def test_what_is_not_in_the_table_of_images(images: Outcome) -> None:
    assert images.rejects[media_cases.NO_UTF8_SHOWN] == Reject("discover", "name-not-utf8")
    assert images.active[media_cases.IN_FOLDER]["bucket"] == LANDSCAPE
    assert images.active["pair.png"]["texts"] == images.active["pair.jpg"]["texts"]
    assert images.active["twice-1.png"]["sample_id"] == images.active["twice-2.png"]["sample_id"]


@pytest.mark.slow
def test_a_second_run_reads_and_encodes_nothing(videos: Outcome) -> None:
    again = through(videos.home, stages=("discover", "bucket", "text", "latents"))
    assert [again.reports[name].done for name in ("bucket", "text", "latents")] == [0, 0, 0]
    assert again.rejects == videos.rejects


# -- as the command line calls them ------------------------------------------------------------------------------------


def call(
    capsys: pytest.CaptureFixture, home: Any, program: Any, *overrides: str, as_json: bool = False, **own: Any
) -> tuple[int, str, str]:
    """The exit code, and what `latentpress ...` writes to standard output and standard error."""
    home.config()
    options = Options(home.folder / "pipeline.yaml", overrides, json=as_json)
    code = run_program(program.__name__.rpartition(".")[2].replace("_", "-"), program.run, options, own)
    return (code, *capsys.readouterr())


PROGRAMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "discover": (discover, {}),
    "preview": (preview, {"plan": True, "items": 1000}),
    "latents": (encode_latents, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_reports_are_json_whatever_the_names(images: Outcome, name: str, capsys) -> None:
    program, own = PROGRAMS[name]
    code, output, _ = call(capsys, images.home, program, as_json=True, **own)
    found, before = json.loads(output), images.reports[name]
    assert {(row["path"], row["reason"]) for row in found["rejects"]} == {
        (row["path"], row["reason"]) for row in before.rejects
    }
    assert code == found["exit_code"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_name_reaches_the_terminal_as_control_characters(images: Outcome, name: str, capsys) -> None:
    program, own = PROGRAMS[name]
    code, *texts = call(capsys, images.home, program, **own)
    assert code == 0
    for text in texts:
        strange = [line for line in text.splitlines() if not line.isprintable()]
        assert not strange and not re.search(r"^(?:name|line)\.png|^\S*0;title", text, re.MULTILINE), (strange, text)


@pytest.mark.long
def test_a_terminal_that_knows_ascii_alone_is_no_reason_to_crash(images: Outcome) -> None:
    images.home.config()
    command = [sys.executable, "-m", "stages.cli", "discover", "--config", str(images.home.folder / "pipeline.yaml")]
    environment = os.environ | {"PYTHONIOENCODING": "ascii:strict"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert "\\u202e" in done.stdout and done.stdout.isascii()


@pytest.mark.slow
def test_an_error_that_lists_names_is_readable(images: Outcome, capsys) -> None:
    code, output, errors = call(capsys, images.home, discover, "stages.max_reject_fraction=0", as_json=True)
    assert code == 3 and "stages.max_reject_fraction" in json.loads(output)["error"]["message"]
    assert "max_reject_fraction" in errors and "empty-file" in errors
    assert not (strange := [line for line in errors.splitlines() if not line.isprintable()]), strange
    assert not re.search(r"^name\.png", errors, re.MULTILINE), errors


# -- other settings on the same files --------------------------------------------------------------------------------


@pytest.mark.slow
def test_extreme_sides_are_enlarged_where_that_is_allowed(images: Outcome) -> None:
    found = through(images.home, "datasets.photos.allow_upscale=true", stages=("discover", "bucket", "latents"))
    wanted = {"line.png": PORTRAIT, "hair.png": LANDSCAPE, "wide.png": LANDSCAPE}
    assert {name: found.active[name]["bucket"] for name in wanted} == wanted
    assert found.reports["latents"].done == 2
    assert all(np.isfinite(found.latents[name]).all() for name in wanted)


def test_an_image_model_takes_no_table_of_videos(images: Outcome, videos: Outcome) -> None:
    """What an earlier configuration discovered, before discover is run again."""
    with pytest.raises(LatentpressError, match="dataset_type was 'video' and is") as caught:
        images.home.run(bucket.run, f"root={videos.home.root}", dry_run=True)
    assert "latentpress discover" in caught.value.next_step


@pytest.mark.slow
def test_animations_are_their_first_frame_where_asked(videos: Outcome) -> None:
    stages = ("discover", "bucket", "latents", "preview")
    found = through(videos.home, "datasets.photos.animations=first-frame", stages=stages, buckets=[LANDSCAPE])
    moving = {f"moving.{ending}": (media_files.animation, Sample()) for ending in ("gif", "webp", "png")}
    assert not (wrong := list(problems(found, moving))), "\n".join(wrong)
    assert found.reports["latents"].done == 3
    assert found.rejects == videos.rejects and found.active.keys() == videos.active.keys()


#: What decord can't do as exactly as PyAV, with the reason; the anamorphic one is so narrow that it garbles it.
NOT_DECORD = {
    **dict.fromkeys(("uneven.mkv", "uneven.mp4", "h264.avi"), "variable-rate"),
    **dict.fromkeys(("mirrored.mp4", "anamorphic.mp4", "clear.mov", "live.mkv", "av1.mp4", "av1.webm"), "unreadable"),
}


@pytest.mark.long
def test_decord_gives_the_same_frames_or_a_reject(videos: Outcome) -> None:
    pytest.importorskip("decord")
    found = through(videos.home, "latents.decoder=decord", stages=("discover", "bucket", "latents", "preview"))
    refused: dict[str, tuple] = {
        name: (media_cases.live, Reject("latents", reason)) for name, reason in NOT_DECORD.items()
    }
    assert not (wrong := list(problems(found, {**VIDEOS, **refused}))), "\n".join(wrong)
    assert found.latents.keys() == videos.latents.keys() - NOT_DECORD.keys()


# -- i2i ---------------------------------------------------------------------------------------------------------------

SOURCES: dict[str, tuple[str, Callable[[Path], Any] | None, str]] = {  # target -> source, how it is made, reject
    "plain": ("plain.png", media_cases.saved(media_cases.SCENE), ""),
    "turned": ("turned.png", partial(media_files.oriented, orientation=6), ""),
    "turned-photo": ("turned-photo.jpg", partial(media_files.oriented, orientation=8), ""),
    "heic": ("heic.heic", media_files.heic, ""),
    "grey": ("grey.png", media_cases.saved(media_cases.SCENE.convert("L")), ""),
    "moving": ("moving.gif", media_files.animation, ""),
    "other\nline": ("other\nline.png", media_cases.saved(media_files.picture(3)), ""),
    "missing": ("elsewhere.png", media_cases.saved(media_cases.SCENE), "discover: no-source"),
    "empty": ("empty.png", media_cases.content(b""), "discover: empty-file"),
    "text": ("text.png", media_cases.content(b"no picture" * 99), "discover: not-an-image"),
    "cut": (
        "cut.jpg",
        media_cases.then(media_cases.saved(media_cases.SCENE.resize((480, 320)), "JPEG", quality=95), media_files.cut),
        "latents: truncated",
    ),
    "small": ("small.png", media_cases.saved(media_cases.SCENE.resize((30, 20))), "bucket: source-needs-upscale"),
}


@pytest.mark.slow
def test_source_images_of_every_format(tmp_path: Path, start) -> None:
    kind = "kandinsky5-image-i2i"
    home = start(tmp_path, kind, conditioning_data="sources")
    (tmp_path / "sources").mkdir()
    for number, (name, (source, make, _)) in enumerate(SOURCES.items()):
        media_files.oriented(home.media / f"{name}.png", 1 + number % 8, level=number)
        (home.media / f"{name}.txt").write_text("a scene")
        assert make
        make(tmp_path / "sources" / source)
    found = through(home)
    rejects = {
        Path(row["path"]).stem: f"{stage}: {row['reason']}"
        for stage in ("discover", "bucket", "latents")
        for row in found.reports[stage].rejects
    }
    assert rejects == {name: reject for name, (_, _, reject) in SOURCES.items() if reject}
    conditions = latents(home, tensor="condition")
    np.testing.assert_array_equal(conditions["turned.png"], conditions["plain.png"])
    far = {name: float(np.abs(condition - conditions["plain.png"]).mean()) for name, condition in conditions.items()}
    assert far.keys() == {f"{name}.png" for name, (_, _, reject) in SOURCES.items() if not reject}
    assert far["turned-photo.png"] < 0.2 * far["grey.png"] and far["heic.png"] < 0.3 * far["grey.png"]


@pytest.mark.slow
def test_no_clip_crosses_a_cut(tmp_path: Path, start) -> None:
    pytest.importorskip("scenedetect")
    home = start(tmp_path, VIDEO, video={"scenes": True, "clip_selection": "chunks"})
    other = [(20, 20, 20), media_files.WHITE, (120, 20, 120), (10, 90, 90)]
    parts = [media_files.scene(0)] * 7 + [media_files.scene(100, colors=other)] * 12 + [media_files.scene(200)] * 3
    media_files.video(home.media / "cuts.mp4", parts)
    media_files.animation(home.media / "moving.gif")
    for name in ("cuts", "moving"):
        (home.media / f"{name}.txt").write_text("a scene")
    home.settings["datasets"][0]["animations"] = "video"
    found = through(home)
    config = home.config()
    samples = [row for row in current_plan(Store(config.root), config).samples.values() if row["path"] == "cuts.mp4"]
    # The third scene is too short for a clip.
    assert {(round(row["start"] * 12), row["geometry"]["bucket"]) for row in samples} == {(0, "80x48@5"), (7, CLIP)}
    strip = found.strip("cuts.mp4")
    assert sorted(round(media_files.level(frame) / 100) for frame in strip) == [0] * 5 + [1] * 9
    assert found.reports["latents"].done == found.reports["index"].details["samples"] == 4  # chunks: two of the GIF
