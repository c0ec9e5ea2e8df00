"""Pictures during training are decoded once, are complete or do not exist, and do not slow training."""

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import trainer.__main__  # noqa: F401 (programs are forks of this process)
from cache.runs.validations import read_mark
from schemas.config.loading import ConfigError
from schemas.errors import LatentpressError
from stages import bucket, decode, discover, encode_latents, encode_text, index, run
from stages.encoding import model_loading
from stages.encoding.vae import base
from stages.encoding.vae.base import load_tiny_autoencoder
from stages.follow import watchers
from stages.follow.watchers import Watch, decodes_while_training
from tests.background import until
from tests.processes import ForkedProgram, processes
from tests.project import Project
from tests.stages.follow.test_watchers import hold
from tests.stages.report_run import FakeRun, step_line
from tests.stages.test_decode import write_latent
from trainer import validation

FAMILY = "kandinsky5-image"


def picture(home: Project, name: str, step: int = 3) -> Path:
    return home.folder / f"output/run/samples/step-{step:06}/{name}.png"


def add(home: Project, name: str, step: int = 3, seed: int = 0) -> Path:
    latent = np.random.default_rng(seed).standard_normal((16, 1, 2, 2)).astype(np.float32)
    return write_latent(home, name, latent, FAMILY, step)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """script(first, second, is_stopped=False): replace the polls of a watch, with one action after each poll."""

    def set_polls(*actions: Callable[[], object], is_stopped: bool = False) -> None:
        class Polls(Watch):
            def __iter__(self) -> Iterator[bool]:
                for action in actions:
                    yield False
                    action()
                if is_stopped:
                    self._stop()
                yield True

        monkeypatch.setattr(decode, "Watch", Polls)

    return set_polls


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices of the processes that were started."""
    started: list[str] = []
    run_stage = decode.StageProcesses.run

    def record(self: Any, stage: str, options: Any) -> tuple[int, dict]:
        started.append(options.device)
        return run_stage(self, stage, options)

    monkeypatch.setattr(decode.StageProcesses, "run", record)
    return started


def decoded(home: Project, latent: Path) -> np.ndarray:
    config = home.config()
    autoencoder = base.load_autoencoder(config.model, config.latents, torch.device("cpu"))
    return np.asarray(autoencoder.decode(torch.from_numpy(decode.read_latent(latent)[0])[None])[0, 0])


def write_after(*files: Path) -> None:
    """Let the trainer write latents of later steps only after `decode` and `report` have written these files."""
    write = validation.write_validation_latents

    def wait_and_write(
        model: Any, family: Any, config: Any, data: Any, folder: Path, *arguments: Any, **options: Any
    ) -> int:
        if folder.name != "step-000000":
            until(lambda: all(file.exists() for file in files))
        return write(model, family, config, data, folder, *arguments, **options)

    validation.write_validation_latents = wait_and_write


@pytest.mark.long
def test_pictures_are_there_before_training_has_ended(
    forked_programs: None, project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through `run`: the trainer's second validation waits for the picture of the first."""
    prompts = [{"name": "one", "prompt": "a colour"}]
    home = project(
        train={"run": "run", "steps": 2, "batch_size": 1, "threads": 1},
        validation={"size": "64x64", "steps": 2, "every": 2, "eval_samples": 0, "prompts": prompts},
    )
    home.image("0.png", (64, 64), "a colour")
    for program in (discover, bucket, encode_text, encode_latents, index):
        home.run(program.run)
    first = picture(home, "one", 0)
    monkeypatch.setattr(ForkedProgram, "prepare", partial(write_after, first, home.folder / "output/run/report.html"))
    report = home.run(run.run, "stages.order=[train, decode]")
    assert report.exit_code == 0 and "watchers_that_failed" not in report.details
    for step in (0, 2):
        latent = home.folder / f"output/run/validation/step-{step:06}/one.safetensors"
        np.testing.assert_array_equal(np.asarray(Image.open(picture(home, "one", step))), decoded(home, latent))
    result = home.folder / "output/run/result.json"
    assert first.stat().st_mtime_ns < result.stat().st_mtime_ns
    assert (home.folder / "output/run/samples/contact-sheet.png").exists()


def children() -> set[int]:
    """Direct child processes, without the decoders of an earlier test's pool, which are children of a server."""
    return {number for number, parent, _ in processes() if parent == os.getpid()}


@pytest.mark.slow
def test_what_appears_is_decoded_once_and_damage_is_named(project, forked_programs, script, rounds, capfd) -> None:
    home = project()
    listings, before = list[list[str]](), children()

    def list_pictures() -> None:
        listings.append(sorted(path.name for path in home.folder.glob("output/run/samples/*/*.png")))
        assert children() == before, "between two validations no process uses memory"

    def add_damaged() -> None:
        list_pictures()
        path = add(home, "dog")
        path.write_bytes(path.read_bytes()[:60])
        add(home, "emu")

    add(home, "cat")
    script(add_damaged, list_pictures, list_pictures, lambda: add(home, "fox"))
    report = home.run(decode.run, watch=True)
    assert listings == [["cat.png"], ["cat.png", "emu.png"], ["cat.png", "emu.png"]]
    assert rounds == ["cpu", "cpu"], "the damaged latent is not tried again, and auto is the CPU"
    assert "dog.safetensors" in home.said
    assert [row["reason"] for row in report.failed] == ["damaged"] and report.exit_code == 3
    assert report.done == 3 and picture(home, "fox").exists(), "the last latents are decoded after training"
    times = {path: path.stat().st_mtime_ns for path in home.folder.glob("output/run/samples/step*/*")}
    (home.folder / "output/run/validation/step-000003/dog.safetensors").unlink()
    script(list_pictures)
    second_report = home.run(decode.run, watch=True)
    assert (second_report.done, second_report.skipped, len(rounds)) == (0, 3, 2)
    assert {path: path.stat().st_mtime_ns for path in times} == times


def die_half_way() -> None:
    def save(image: Any, path: Any, *arguments: Any, **options: Any) -> None:
        Path(path).write_bytes(b"\x89PNG half of it")
        os.kill(os.getpid(), signal.SIGKILL)

    Image.Image.save = save  # type: ignore[method-assign]


def run_out() -> None:
    def decode_with(self: Any, latents: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    base.Autoencoder.decode = decode_with  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fail", "why"),
    [
        (die_half_way, "without a report"),
        (run_out, "cat.safetensors on cpu"),
    ],
)
def test_a_process_that_fails_leaves_no_part_and_the_rest_until_training_has_ended(
    project, forked_programs, script, monkeypatch, rounds, fail, why
) -> None:
    home = project()
    latent, results = add(home, "cat"), []
    monkeypatch.setattr(ForkedProgram, "prepare", staticmethod(fail))
    script(lambda: results.append(picture(home, "cat").exists()), lambda: add(home, "dog"))
    report = home.run(decode.run, watch=True)
    assert results == [False] and rounds == ["cpu"], "decoding is not tried again during training"
    assert why in home.said
    assert (report.done, report.exit_code) == (2, 0)
    np.testing.assert_array_equal(np.asarray(Image.open(picture(home, "cat"))), decoded(home, latent))


@pytest.mark.slow
def test_after_sigterm_remaining_latents_are_not_decoded(project, forked_programs, script, rounds) -> None:
    home = project()
    add(home, "cat")
    script(lambda: add(home, "dog"), is_stopped=True)
    report = home.run(decode.run, watch=True)
    assert (report.done, report.exit_code) == (1, 0)
    assert picture(home, "cat").exists() and not picture(home, "dog").exists()


@pytest.mark.long
@pytest.mark.slow
def test_a_stopped_decode_keeps_what_it_decoded_and_no_part(project, monkeypatch) -> None:
    home, decode_with, count = project(), base.Autoencoder.decode, []
    for name in ("cat", "dog", "emu"):
        add(home, name)

    def stop_at_the_second(self: Any, latents: torch.Tensor) -> torch.Tensor:
        count.append(1)
        if len(count) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return decode_with(self, latents)

    monkeypatch.setattr(base.Autoencoder, "decode", stop_at_the_second)
    report = home.run(decode.run)
    assert (report.done, report.remaining, report.exit_code) == (2, 1, 3), "the current file is finished"
    assert report.details["stopped"].startswith("by SIGTERM")
    assert sorted(path.name for path in home.folder.glob("output/run/samples/*/*")) == ["cat.png", "dog.png"]
    assert home.run(decode.run).done == 1


@pytest.mark.parametrize(
    ("configured", "given", "expected"),
    [
        ("auto", None, "cpu"),
        ("cuda:1", None, "cuda:1"),
        ("auto", "cuda:2", "cuda:2"),
        ("cuda:1", "cpu", "cpu"),
    ],
)
def test_the_device_beside_training(
    project: Callable[..., Project], script, monkeypatch, configured, given, expected
) -> None:
    home, devices = project(stages={"decode": {"device": configured}}), []

    def note_device(self: Any, stage: str, options: Any) -> tuple[int, dict[str, int]]:
        devices.append(options.device)
        return 0, {"done": 1}

    monkeypatch.setattr(decode.StageProcesses, "run", note_device)
    trained = FakeRun(home)
    trained.metrics(step_line(4))
    add(home, "cat")
    script(lambda: None, is_stopped=True)
    assert home.run(decode.run, watch=True, device=given).done == 1
    assert devices == [expected]


def test_on_the_trainers_card_nothing_is_decoded_while_it_validates(
    project: Callable[..., Project], script, monkeypatch
) -> None:
    """Latents are decoded between validations, after the next training step."""
    home, rounds = project(stages={"decode": {"device": "cuda"}}), []
    monkeypatch.setattr(decode.StageProcesses, "run", lambda *arguments: (rounds.append(1), (0, {"done": 1}))[1])
    trained, counts = FakeRun(home), []
    trained.metrics(step_line(3))
    add(home, "cat", 3)

    def train_a_step() -> None:
        counts.append(len(rounds))
        trained.metrics(step_line(4))

    script(train_a_step, lambda: counts.append(len(rounds)), is_stopped=True)
    home.run(decode.run, watch=True)
    assert counts == [0, 1]


def test_memory_is_limited_where_others_may_use_the_card(tmp_path: Path, monkeypatch) -> None:
    assert not decode._may_be_shared(tmp_path), "after training the card is free"
    with hold(tmp_path):
        assert decode._may_be_shared(tmp_path)
    monkeypatch.setattr(decode, "is_running", lambda folder: None)
    assert decode._may_be_shared(tmp_path), "it is unknown whether a trainer is running"
    monkeypatch.setattr(decode, "is_running", lambda folder: False)
    monkeypatch.setenv(watchers.RUN_PID_VARIABLE, "7")
    assert decode._may_be_shared(tmp_path), "the encoding stages may be running"


def test_beside_the_trainer_a_part_of_the_free_memory_is_used(monkeypatch) -> None:
    limits = []
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (10 << 30, 40 << 30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *arguments: limits.append(arguments))
    model_loading.limit_memory(torch.device("cuda:1"))
    assert limits == [(0.2, torch.device("cuda:1"))]


@pytest.mark.parametrize(
    ("kind", "overrides", "expected"),
    [
        ("kandinsky5-image-t2i", (), True),
        ("sana", (), True),
        ("kandinsky5-image-t2i", ("stages.decode.while_training=false",), False),
        ("kandinsky5-image-t2i", ("stages.order=[train]",), False),
        ("kandinsky5-image-t2i", ("validation.prompts=[]",), False),
        ("kandinsky5-video-t2v", (), False),
        ("kandinsky5-video-t2v", ("stages.decode.device=cuda:1",), True),
        ("kandinsky5-video-t2v", ("stages.decode.while_training=true",), True),
    ],
)
def test_run_decodes_while_training_where_that_is_safe(project, kind, overrides, expected) -> None:
    home = project(kind, validation={"prompts": [{"name": "one", "prompt": "a colour"}]})
    assert decodes_while_training(home.config(*overrides)) is expected


def make_tiny(folder: Path, **changes: Any) -> Path:
    from diffusers import AutoencoderTiny

    torch.manual_seed(3)
    blocks = {"encoder_block_out_channels": (8,) * 4, "decoder_block_out_channels": (8,) * 4}
    counts = {"num_encoder_blocks": (1,) * 4, "num_decoder_blocks": (1,) * 4}
    settings = {"latent_channels": 16, "scaling_factor": 0.7, "shift_factor": 0.3, **blocks, **counts, **changes}
    AutoencoderTiny(**settings).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_preview_is_what_diffusers_decodes_and_is_replaced(project, forked_programs, script, rounds) -> None:
    from diffusers import AutoencoderKL, AutoencoderTiny
    from diffusers.image_processor import VaeImageProcessor
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    home = project()
    folder = make_tiny(home.folder / "taef")
    home.settings["validation"] = {"preview_autoencoder": str(folder)}
    latent, previews = add(home, "cat"), []

    def check_preview() -> None:
        previews.append(np.asarray(Image.open(picture(home, "cat"))))
        assert read_mark(picture(home, "cat")).is_preview
        add(home, "dog")

    script(check_preview, check_preview)
    report = home.run(decode.run, watch=True)
    vae = AutoencoderKL.from_pretrained(Path(home.settings["model"]["path"]) / "vae").config
    tiny = AutoencoderTiny.from_pretrained(folder)
    raw = torch.from_numpy(decode.read_latent(latent)[0])[None, :, 0] / vae.scaling_factor
    flux = (raw - (vae.shift_factor or 0)) * vae.scaling_factor  # like Flux' pipeline, for which it was distilled
    with torch.no_grad():
        expected = tiny.decode(flux / tiny.config.scaling_factor + tiny.config.shift_factor).sample
    expected = VaeImageProcessor().postprocess(expected, "pil")[0]
    assert (
        np.abs(previews[0].astype(int) - np.asarray(expected)).max() <= 1
        and (previews[0] == np.asarray(expected)).mean() > 0.99
    )
    # Training has ended, so both are decoded by the full autoencoder.
    assert report.exit_code == 0 and not any(read_mark(picture(home, name)).is_preview for name in ("cat", "dog"))
    np.testing.assert_array_equal(np.asarray(Image.open(picture(home, "cat"))), decoded(home, latent))
    events = EventAccumulator(str(home.folder / "output/run/tensorboard/pictures"))
    events.Reload()
    assert {"preview/cat", "preview/dog", "validation/cat", "validation/dog"} == {*events.Tags()["images"]}


@torch.no_grad()
def test_latents_that_are_shifted_already_are_not_shifted_again(project) -> None:
    from diffusers import AutoencoderTiny

    home = project("z-image")
    folder = make_tiny(home.folder / "taef")
    config = home.config()
    loaded = load_tiny_autoencoder(config.model, config.latents, str(folder), torch.device("cpu"))
    tiny, latents = AutoencoderTiny.from_pretrained(folder), torch.randn(1, 16, 1, 4, 4)
    expected = tiny.decode(latents[:, :, 0] / tiny.config.scaling_factor + tiny.config.shift_factor).sample
    decoded_pixels = loaded.decode(latents)[:, 0].permute(0, 3, 1, 2).float() / 255
    assert ((expected * 0.5 + 0.5).clamp(0, 1) - decoded_pixels).abs().max() <= 0.51 / 255


@pytest.mark.slow
def test_previews_by_hand_are_marked_on_the_page(project) -> None:
    from stages import report

    home = project()
    home.settings["validation"] = {"preview_autoencoder": str(make_tiny(home.folder / "taef"))}
    trained = FakeRun(home)
    trained.metrics(step_line(3))
    add(home, "cat")
    assert home.run(decode.run, preview=True).done == 1 and read_mark(picture(home, "cat")).is_preview
    assert home.run(decode.run, preview=True).done == 0
    home.run(report.run)
    assert "step 3, preview" in (trained.folder / "report.html").read_text()
    assert home.run(decode.run, dry_run=True).remaining == 1
    assert home.run(decode.run).done == 1
    home.run(report.run)
    assert "step 3, preview" not in (trained.folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latent_channels": 4}, "latent_channels = 4"),
        (
            {"decoder_block_out_channels": (8,) * 3, "num_decoder_blocks": (1,) * 3},
            "does not enlarge latents 8 times",
        ),
    ],
)
def test_a_tiny_autoencoder_of_other_latents_is_refused_before_training(project, changes, message) -> None:
    home = project()
    home.settings["validation"] = {"preview_autoencoder": str(make_tiny(home.folder / "taef", **changes))}
    add(home, "cat")
    for program, options in ((run.run, {}), (decode.run, {"preview": True})):
        with pytest.raises(LatentpressError, match=message) as caught:
            home.run(program, **options)
        assert caught.value.exit_code == 2


def test_a_preview_without_a_fitting_tiny_autoencoder_is_wrong_usage(project) -> None:
    with pytest.raises(ConfigError, match="no tiny autoencoder for"):
        project("kandinsky5-video-t2v").config("validation.preview_autoencoder=some/where")
    home = project()
    with pytest.raises(LatentpressError, match=r"needs validation\.preview_autoencoder") as caught:
        home.run(decode.run, preview=True)
    assert caught.value.exit_code == 2
    home.settings["validation"] = {"preview_autoencoder": "nowhere"}
    with pytest.raises(LatentpressError, match="nowhere is neither a directory nor a repository id"):
        home.run(decode.run, preview=True)
