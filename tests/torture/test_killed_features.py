"""features killed anywhere, in the comparison of all items at its end too: the same shards and the same table."""

import importlib
import io
import shutil
import signal
from typing import Any

import pytest
from PIL import Image

from cache.store.store import Store
from stages import discover, features
from stages.encoding.features import comparison
from tests.processes import Child
from tests.project import Project
from tests.stages.encoding.features.photographs import photograph
from tests.torture.kills import die

pytestmark = pytest.mark.long
pytest.importorskip("faiss")


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """The children fork from a process that has imported torch."""
    importlib.import_module("stages.encoding.features.worker")
    importlib.import_module("faiss")


@pytest.fixture
def home(project: Any, tiny: Any) -> Project:
    """Photographs with copies, in several units."""
    made = project("kandinsky5-image-t2i", features={"model": str(tiny("dinov2")), "size": 84})
    made.settings["cache"] = {"unit_mib": 1}
    made.settings["stages"] |= {"features": {"threads": 1, "readers": 1}}
    made.media.mkdir(parents=True, exist_ok=True)
    for name in ("chelsea.png", "coffee.png", "astronaut.png", "camera.png"):
        image = photograph(name).reduce(2)
        file = io.BytesIO()
        image.save(file, "JPEG", quality=40)
        changed = {
            "": image,
            "compressed": Image.open(file),
            "mirrored": image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        }
        for change, copy in changed.items():
            path = made.media / f"{change}{name}"
            copy.save(path)
            path.with_suffix(".txt").write_text(name)
    made.run(discover.run)
    return made


def start(home: Project, *overrides: str, **options: Any) -> Child:
    return Child(lambda: home.run(features.run, *overrides, **options))


def files(home: Project) -> dict[str, bytes]:
    store, tops = Store(home.root), ("features/", "items/", "rejects/")
    return {name: store.read_bytes(name) for name in store.list_names("") if name.startswith(tops)}


def forget(home: Project) -> None:
    for top in ("features", "items", "rejects"):
        shutil.rmtree(home.root / top, ignore_errors=True)


def whole(home: Project) -> dict[str, bytes]:
    """What a run that was never interrupted makes: shards, and a table with the four groups. Nothing of it stays."""
    assert start(home).wait() == 0
    made = files(home)
    [table] = [name for name in made if name.startswith("items/")]
    assert Store(home.root).read_table(table)["duplicate_of"].null_count == 4
    assert sum(name.endswith(".arrow") and name.startswith("features/") for name in made) > 3
    forget(home)
    return made


def test_while_pairs_are_confirmed_and_at_every_step_of_the_table(home: Project, monkeypatch: Any, steps: Any) -> None:
    expected = whole(home)
    assert start(home).wait() == 0
    shards = {name: data for name, data in expected.items() if not name.startswith("items/")}
    confirm, calls = comparison.are_near_duplicates, [0]

    def die_at(number: int) -> Any:
        def confirmed(*pair: Any) -> bool:
            calls[0] += 1
            return die() if calls[0] == number else confirm(*pair)  # type: ignore[func-returns-value,return-value]

        return confirmed

    for number in (1, 4):
        shutil.rmtree(home.root / "items")
        with monkeypatch.context() as changed:
            changed.setattr(comparison, "are_near_duplicates", die_at(number))
            assert start(home).wait() == -signal.SIGKILL
        assert files(home) == shards
        assert start(home).wait() == 0
        assert files(home) == expected

    def cut(at: int) -> int:
        def work() -> None:
            steps.arm(at, die, lambda step, path: "/items/" in path)
            home.run(features.run)

        return Child(work).wait()

    at = 0
    while True:
        shutil.rmtree(home.root / "items", ignore_errors=True)
        ended = cut(at)
        assert files(home).items() <= expected.items()
        assert start(home).wait() == 0
        assert files(home) == expected
        if not ended:
            break
        assert ended == -signal.SIGKILL
        at += 1
    assert at >= 3
