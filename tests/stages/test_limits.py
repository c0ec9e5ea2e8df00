"""A full disk and missing permission: a clear message, nothing half-written under a final name, and it goes on."""

import os
import resource
import signal
import subprocess
from collections.abc import Callable

import pytest

from schemas.errors import LatentpressError
from stages import bucket, discover, encode_latents, verify


@pytest.fixture
def planned(project):
    home = project("kandinsky5-image-t2i", cache={"unit_mib": 0.05})
    for number in range(6):
        home.image(f"{number}.png", (64, 64), f"picture {number}", number)
    home.run(discover.run)
    home.run(bucket.run)
    return home


def in_child(work: Callable[[], None]) -> int:
    """Fork, do `work`, give the exit status; what it limits stays in the child."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WIFEXITED(status), f"killed by signal {os.WTERMSIG(status)}"
    return os.WEXITSTATUS(status)


def expect(home, *words: str) -> Callable[[], None]:
    def check() -> None:
        with pytest.raises(LatentpressError) as caught:
            home.run(encode_latents.run)
        message = str(caught.value)
        assert all(word in message for word in words), message
        assert str(home.root) in message

    return check


def test_a_file_size_limit_ends_with_the_path_the_reason_and_the_next_step(planned) -> None:
    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        expect(planned, "file-size limit", "run the same command again")()

    assert in_child(work) == 0
    assert planned.shards("latents") == {}
    assert planned.run(encode_latents.run).done == 6


def test_a_full_disk_ends_with_the_path_the_reason_and_the_next_step(planned) -> None:
    folder = planned.root / "latents"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(folder)], check=False).returncode:
        pytest.skip("no right to mount a tmpfs here")
    try:
        expect(planned, "the disk is full", "free space there")()
        assert planned.run(verify.run).exit_code == 0
        assert not [path for path in folder.rglob("*.tmp")]
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    assert planned.run(encode_latents.run).done == 6


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_no_write_permission_is_named(planned) -> None:
    planned.config()  # written while it may be

    def work() -> None:
        home = planned.folder
        for path in (home, *home.parents):
            if path.stat().st_mode & 0o005 != 0o005:
                path.chmod(path.stat().st_mode | 0o055)
        os.setuid(65534)
        config = planned.config
        planned.config = lambda *overrides: saved  # type: ignore[method-assign]
        assert config
        expect(planned, "permission denied", "right")()

    saved = planned.config()
    assert in_child(work) == 0
    assert planned.shards("latents") == {}
