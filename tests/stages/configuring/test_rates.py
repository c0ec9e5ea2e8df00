"""Times are those that a former run measured, and unknown without one."""

import json
from pathlib import Path

import pytest

from schemas.config.loading import dump_yaml, parse_config
from stages.configuring.rates import UNKNOWN, predict_times, seconds_of_step

TEXT = "root: ./work\nmodel: {family: sana}\ndatasets: [{id: a, instance_data_dir: ./a}]\ntrain: {accumulate: 4}\n"


@pytest.fixture
def former(tmp_path: Path) -> Path:
    """The folder of a run with its records: 2 samples a second, 10 items encoded in 5 s."""
    config = parse_config(TEXT, tmp_path / "pipeline.yaml")
    config.run_folder.mkdir(parents=True)
    (config.run_folder / "config.yaml").write_text(dump_yaml(config))
    (config.run_folder / "metrics.jsonl").write_text(json.dumps({"step": 5, "loss": 1.0, "samples_per_s": 2.0}) + "\n")
    row = {"stage": "encode-latents", "began": 0, "seconds": 5.0, "failed": False, "done": 10}
    (config.run_folder / "stages.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


def times(folder: Path, text: str) -> dict[str, str]:
    config = parse_config(text, folder / "pipeline.yaml")
    rows = predict_times(config, {"encode-latents": 100, "encode-text": 100}, {"discover": (3, "just now")})
    return {row["stage"]: row["time"] for row in rows}


def test_times_of_a_run_like_this(former: Path) -> None:
    known = times(former, TEXT.replace("accumulate: 4", "accumulate: 4, steps: 100"))
    assert (known["train"], known["encode-latents"], known["discover"]) == ("0:03:20", "0:00:50", "0:00:03")
    assert known["encode-text"] == UNKNOWN


@pytest.mark.parametrize(
    "changed",
    [("{family: sana}", "{family: z-image}"), ("./a}", "./a, resolution: 512}")],
)
def test_nothing_is_known_of_another_model_or_size(former: Path, changed: tuple[str, str]) -> None:
    known = times(former, TEXT.replace(*changed))
    assert known["train"] == known["encode-latents"] == UNKNOWN


def test_nothing_is_known_of_training_in_another_way(former: Path) -> None:
    text = TEXT.replace("accumulate: 4", "accumulate: 4, gradient_checkpointing: false")
    assert seconds_of_step(parse_config(text, former / "pipeline.yaml")) is None
    assert times(former, text)["encode-latents"] == "0:00:50"
