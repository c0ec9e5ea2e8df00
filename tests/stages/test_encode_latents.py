"""encode-latents at its limits: a full disk, missing permission, decoders that hang, crash or eat memory."""

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from cache.sets.set_lookup import current_plan
from cache.store.store import Store
from schemas.errors import LatentpressError
from stages import bucket, discover, encode_latents
from stages.encoding import member_reader
from tests.processes import in_child
from tests.stages.failing_reader import make_failing_reader


@pytest.fixture
def planned(project, built):
    return built(project("kandinsky5-image-t2i", cache={"unit_mib": 0.05}), plan_six)


def plan_six(home) -> None:
    for number in range(6):
        home.image(f"{number}.png", (64, 64), f"picture {number}", number)
    home.run(discover.run)
    home.run(bucket.run)


def expect(home, *words: str) -> Callable[[], None]:
    def check() -> None:
        with pytest.raises(LatentpressError) as caught:
            home.run(encode_latents.run)
        message = str(caught.value)
        assert all(word in message for word in words), message
        assert str(home.root) in message

    return check


@pytest.mark.slow
def test_a_file_size_limit_ends_with_the_path_the_reason_and_the_next_step(planned) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        expect(planned, "file-size limit", "run the same command again")()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert planned.shards("latents") == {}
    assert planned.run(encode_latents.run).done == 6


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_no_write_permission_is_named(planned) -> None:
    planned.config()  # written before the folder becomes read-only

    def work() -> None:
        home = planned.folder
        for path in (home, *home.parents):
            if path.stat().st_mode & 0o005 != 0o005:
                path.chmod(path.stat().st_mode | 0o055)
        os.setuid(65534)
        config = planned.config
        planned.config = lambda *overrides: saved  # type: ignore[method-assign]
        assert config
        expect(planned, "permission denied")()

    saved = planned.config()
    planned.run(encode_latents.run)  # imports and hashes files that the child may not be permitted to read
    shutil.rmtree(planned.root / "latents")
    assert in_child(work) == 0
    assert planned.shards("latents") == {}


@pytest.mark.slow
def test_a_decoder_that_hangs_crashes_or_eats_memory_costs_its_item_and_a_retry_mends_it(project, monkeypatch) -> None:
    home = project("kandinsky5-image-t2i", cache={"unit_mib": 1})
    home.settings["stages"] |= {"item_memory_mib": 256, "max_reject_fraction": 1.0}
    for number, name in enumerate(["small-0", "stopped", "small-1", "crashed", "small-2"]):
        home.image(f"{name}.png", (64, 64), seed=number)
    Image.new("L", (8500, 8500)).save(home.media / "huge.png", compress_level=1)  # 289 MB as RGB
    (home.media / "huge.txt").write_text("black")
    for program in (discover.run, bucket.run):
        assert home.run(program).rejects == []
    config = home.config()
    [unit] = current_plan(Store(config.root), config).units("latents")
    assert len(unit.members) == 6

    monkeypatch.setattr(member_reader, "make_member_reader", make_failing_reader)
    report = home.run(encode_latents.run, "stages.item_timeout_s=6")
    rejects = home.rejects(report)
    assert rejects.pop("huge.png") in ("out-of-memory", "timed-out")  # a busy machine may be too slow for it
    assert rejects == {"stopped.png": "timed-out", "crashed.png": "decoder-died"}
    messages = {Path(row["path"]).name: row["message"] for row in report.rejects}
    assert "6 s" in messages["stopped.png"] and "SIGSEGV" in messages["crashed.png"]
    assert (report.done, report.exit_code) == (3, 0)
    monkeypatch.undo()

    report = home.run(encode_latents.run, retry_rejects=True)
    assert (report.done, home.rejects(report)) == (5, {"huge.png": "out-of-memory"})
    [row] = report.rejects
    assert "256 MiB" in row["message"] and "raise stages.item_memory_mib" in row["message"]
    assert home.run(encode_latents.run).done == 0  # not retried without --retry-rejects
    home.settings["stages"]["item_memory_mib"] = 4096
    report = home.run(encode_latents.run, retry_rejects=True)
    assert (report.done, report.rejects, report.exit_code) == (6, [], 0)
