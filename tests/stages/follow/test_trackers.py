"""Pictures and scores that watchers add to TensorBoard and Weights & Biases, read back by their own readers."""

import io
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from schemas.cli.console import Console
from stages.follow.trackers import GIF_SIDE, encode_gif, open_trackers
from stages.pages.pictures import write_output


def make_clip(frames: int, size: tuple[int, int]) -> np.ndarray:
    """Frames of one gray level each, with increasing brightness."""
    shades = np.arange(frames, dtype=np.uint8) * (255 // frames)
    return np.broadcast_to(shades[:, None, None, None], (frames, size[1], size[0], 3)).copy()


def read_gif(data: bytes) -> tuple[list[int], list[int], tuple[int, int]]:
    """Returns (gray level of each frame, durations in ms, size)."""
    greys, durations = [], []
    with Image.open(io.BytesIO(data)) as image:
        for number in range(image.n_frames):
            image.seek(number)
            greys.append(int(np.asarray(image.convert("RGB")).mean()))
            durations.append(image.info["duration"])
        return greys, durations, image.size


def test_a_gif_has_the_frames_and_their_time() -> None:
    greys, durations, size = read_gif(encode_gif(make_clip(5, (64, 48)), 10))
    assert (greys, durations, size) == ([0, 51, 102, 153, 204], [100] * 5, (64, 48))


def test_a_gif_of_a_large_fast_clip_is_smaller_and_leaves_frames_out_and_lasts_as_long() -> None:
    greys, durations, size = read_gif(encode_gif(make_clip(24, (1280, 720)), 24))
    assert greys == [number * 10 for number in range(0, 24, 2)]
    assert abs(sum(durations) - 1000) <= 40 and size == (GIF_SIDE, GIF_SIDE * 720 // 1280)


@pytest.mark.slow
def test_tensorboard_has_clips_that_play_and_scores(tmp_path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    clip = make_clip(5, (64, 48))
    with open_trackers(tmp_path, ["tensorboard"], Console()) as trackers:
        trackers.add_picture("validation/wave", 30, clip, tmp_path / "wave.mp4", 10)
    with open_trackers(tmp_path, ["tensorboard"], Console(), "scores") as trackers:
        trackers.add_scores(30, {"clip score": 0.25})
        trackers.add_scores(60, {"clip score": 0.5, "eval": 1.0})
    events = EventAccumulator(str(tmp_path / "tensorboard/pictures"))
    events.Reload()
    (image,) = events.Images("validation/wave")
    assert (image.step, image.width, image.height) == (30, 64, 48)
    assert image.encoded_image_string == encode_gif(clip, 10)
    events = EventAccumulator(str(tmp_path / "tensorboard/scores"))
    events.Reload()
    assert [(it.step, it.value) for it in events.Scalars("scores/clip score")] == [(30, 0.25), (60, 0.5)]
    assert [(it.step, it.value) for it in events.Scalars("scores/eval")] == [(60, 1.0)]


@pytest.mark.long
def test_weights_and_biases_have_clips_and_scores_in_runs_of_their_own(tmp_path, wandb_offline, monkeypatch) -> None:
    import wandb

    logged, log = [], wandb.Run.log
    monkeypatch.setattr(wandb.Run, "log", lambda run, row, **options: (logged.append(row), log(run, row)))
    clip, file = make_clip(5, (64, 48)), tmp_path / "wave.mp4"
    write_output(file, clip, 10)
    with open_trackers(tmp_path, ["wandb"], Console()) as trackers:
        trackers.add_picture("validation/wave", 30, clip, file, 10)
    with open_trackers(tmp_path, ["wandb"], Console(), "scores") as trackers:
        trackers.add_scores(30, {"clip score": 123.25})
        trackers.add_scores(60, {"clip score": 456.5})
    key = (tmp_path / "wandb-id.txt").read_text()
    (videos,) = tmp_path.glob(f"wandb/offline-run-*-{key}-pictures/files/media/**/*.mp4")
    assert videos.read_bytes() == file.read_bytes()
    assert [row for row in logged if "scores/step" in row] == [
        {"scores/clip score": 123.25, "scores/step": 30},
        {"scores/clip score": 456.5, "scores/step": 60},
    ]
    assert len([*tmp_path.glob(f"wandb/offline-run-*/run-{key}-scores.wandb")]) == 1


SCORES = """
import sys
from pathlib import Path
from schemas.cli.console import Console
from stages.follow.trackers import open_trackers

with open_trackers(Path(sys.argv[1]), ["tensorboard"], Console(), "scores") as trackers:
    trackers.add_scores(30, {"clip_score": 0.25})
"""


@pytest.mark.slow
def test_the_environment_of_a_launcher_of_several_processes_is_not_waited_for(tmp_path, forked_programs) -> None:
    """In a separate process, because accelerate reads the environment only once."""
    script = tmp_path / "scores.py"
    script.write_text(SCORES)
    launcher_variables = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    command = [sys.executable, str(script), str(tmp_path)]
    subprocess.run(command, env=os.environ | launcher_variables, check=True, timeout=120)
    assert [*(tmp_path / "tensorboard/scores").glob("events.*")]
