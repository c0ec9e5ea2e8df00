"""Pictures during training by a machine that shares nothing with the trainer's but the run's output folder."""

import ctypes
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cache.runs.training_run import noting_failure
from stages import decode
from tests.background import until
from tests.processes import ForkedProgram
from tests.project import Project
from tests.stages.follow.test_watchers import hold
from tests.stages.test_decode import write_latent

CLONE_NEWNS, CLONE_NEWUTS = 0x20000, 0x4000000


def move_to_other_machine(mounts: str) -> None:
    """Give this process another name of its machine, where the trainer's output is mounted at another place, and its
    media, caches and configuration are not there. mounts: commands."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(CLONE_NEWNS | CLONE_NEWUTS) == 0, os.strerror(ctypes.get_errno())
    socket.sethostname("second")
    assert os.system(f"mount --make-rprivate / && {mounts}") == 0


def start_elsewhere(home: Project, elsewhere: Path, locks_reach: bool) -> ForkedProgram:
    (elsewhere / "mounted").mkdir(parents=True)
    settings = home.settings | {"output": str(elsewhere / "mounted"), "root": "absent"}
    (elsewhere / "pipeline.yaml").write_text(json.dumps(settings))
    (elsewhere / "lock").touch()  # without the trainer's lock on it
    hidden = [] if locks_reach else [f"mount --bind {elsewhere / 'lock'} {elsewhere / 'mounted/run/.lock'}"]
    steps = [f"mount --bind {home.folder / 'output'} {elsewhere / 'mounted'}", *hidden]
    mounts = " && ".join([*steps, f"mount -t tmpfs none {home.folder}"])
    machine = type("Second", (ForkedProgram,), {"prepare": partial(move_to_other_machine, mounts)})
    command = [sys.executable, "-P", "-m", "stages.decode", "--config", str(elsewhere / "pipeline.yaml"), "--watch"]
    return machine(command, cwd=elsewhere, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.long
@pytest.mark.parametrize("locks_reach", [True, False])
@pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "-u", "hostname", "x"], capture_output=True).returncode != 0,
    reason="no namespaces here",
)
def test_a_machine_that_sees_the_output_folder_decodes(
    forked_programs: None, project: Callable[..., Project], tmp_path: Path, locks_reach: bool
) -> None:
    home = project(train={"run": "run", "trackers": []})
    folder, family = home.folder / "output/run", home.config().model.family
    latents = dict(
        zip(("cat", "dog"), np.random.default_rng(0).standard_normal((2, 16, 1, 8, 8), np.float32), strict=True)
    )
    hold(folder).close()
    process = start_elsewhere(home, tmp_path / "elsewhere", locks_reach)
    with hold(folder), noting_failure(folder, "train", KeyError):
        try:
            write_latent(home, "cat", latents["cat"], family, 2)
            until((folder / "samples/step-000002/cat.png").exists)
            write_latent(home, "dog", latents["dog"], family, 4)
            until((folder / "samples/step-000004/dog.png").exists)
        except BaseException:
            process.kill()
            raise
    said, _ = process.communicate()
    assert process.returncode == 0, said
    assert "decode: 2 done" in said and (folder / "samples/contact-sheet.png").exists()
    for step, name in ((2, "cat"), (4, "dog")):
        with Image.open(folder / f"samples/step-{step:06}/{name}.png") as made:
            first = np.asarray(made)
        (folder / f"samples/step-{step:06}/{name}.png").unlink()
        home.run(decode.run)
        with Image.open(folder / f"samples/step-{step:06}/{name}.png") as again:
            np.testing.assert_array_equal(first, np.asarray(again))
