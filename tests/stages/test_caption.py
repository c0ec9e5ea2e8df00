"""The program caption: which items it describes, that it describes them once, and that captions are reproducible."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from PIL import Image

from cache.sets import plans
from cache.sets.caption_edits import write_edit
from cache.store.damage import DamageError
from cache.store.store import Store
from schemas.config.encoding import PRESETS
from schemas.errors import LatentpressError
from schemas.geometry import Bucket
from stages import bucket, caption, discover, gc, status, verify
from stages.encoding.stage_registry import CAPTION
from tests.project import Project
from tests.stages.describing import describing, generated, written

pytestmark = pytest.mark.slow


@pytest.fixture
def photos(project: Any, tiny: Any, built: Any) -> Project:
    """Six pictures of two shapes without a caption, and one with a caption."""
    return built(describing(project, tiny), discover_seven)


@pytest.fixture
def described(project: Any, tiny: Any, built: Any) -> Project:
    """The same pictures with the captions of the model."""
    return built(describing(project, tiny), describe_six)


def discover_seven(home: Project) -> None:
    for number in range(6):
        home.image(f"{number}.png", (64, 48) if number % 3 else (48, 64), None, number)  # type: ignore[arg-type]
    home.image("own.png", (64, 48), "a cat", 9)
    home.run(discover.run)


def describe_six(home: Project) -> None:
    discover_seven(home)
    home.run(caption.run)


def test_greedy_captions_are_those_of_generate_one_at_a_time(photos: Project) -> None:
    """Also for the second prompt, which reuses the picture's tokens of the first."""
    prompts = photos.settings["caption"]["prompts"] = ["detailed", "plain"]
    report = photos.run(caption.run)
    assert report.done + len(report.rejects) == 6 and report.done >= 3
    plan, captions = CAPTION.find_plan(Store(photos.root), photos.config()), written(photos)
    assert (
        len({texts[0] for texts in captions.values()}) >= 3 and max(len(texts[0]) for texts in captions.values()) > 20
    )
    messages = {row["path"]: row["message"] for row in report.rejects}
    folder = Path(photos.settings["model"]["path"], "text_encoder")
    model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(folder).eval()
    for row in plan.sample_table.to_pylist():
        size = Bucket.parse(row["geometry"]["bucket"])
        picture = Image.open(photos.media / row["path"]).resize((size.width, size.height), Image.Resampling.LANCZOS)
        answers = [generated(photos, model, PRESETS[name], picture.convert("RGB")) for name in prompts]
        if row["path"] in captions:
            assert captions[row["path"]] == [text for text, ended in answers if ended and text in captions[row["path"]]]
        else:
            assert answers[0][0].replace("; ", ", ") in messages[row["path"]]
    assert {len(texts) for texts in captions.values()} == {1, 2}


def test_only_what_has_no_caption_is_described_and_then_nothing_is_left(photos: Project) -> None:
    dry_report = photos.run(caption.run, dry_run=True)
    assert (
        dry_report.remaining == 6 and not (photos.root / "plans").exists() and not (photos.root / "captions").exists()
    )
    first = photos.run(caption.run)
    before = photos.shards("captions")
    second_report = photos.run(caption.run)
    assert (second_report.done, second_report.skipped) == (0, first.done) and second_report.remaining == 0
    assert photos.shards("captions") == before and "own.png" not in written(photos)
    rows = {row["stage"]: row for row in photos.run(status.run).details["stages"]}
    assert rows["caption"]["done"] == first.done and rows["caption"]["rejected"] == len(first.rejects)


def test_a_partition_and_workers_make_the_same_shards(photos: Project, described: Project, is_long: bool) -> None:
    for part in ("0/2", "1/2"):
        photos.run(caption.run, shard=part)
    assert photos.shards("captions") == described.shards("captions") and len(photos.shards("captions")) > 1
    if is_long:
        shutil.rmtree(photos.root / "captions")
        photos.run(caption.run, workers=2)
        assert photos.shards("captions") == described.shards("captions")


def test_bucket_waits_for_captions_and_plans_them(photos: Project) -> None:
    with pytest.raises(LatentpressError, match="6 of 6 items are not described yet") as caught:
        photos.run(bucket.run)
    assert "latentpress caption" in caught.value.next_step
    photos.run(caption.run)
    report = photos.run(bucket.run)
    captions = written(photos)
    plan = plans.load_plan(Store(photos.root), plans.list_plans(Store(photos.root))[-1])
    texts = {row["text_id"]: row["text"] for row in plan.text_table.to_pylist()}
    texts_by_path = {row["path"]: [texts[name] for name in row["texts"]] for row in plan.active.to_pylist()}
    assert texts_by_path.pop("own.png") == ["a cat"] and texts_by_path.keys() == captions.keys()
    assert {row["path"]: row["reason"] for row in report.rejects} == dict.fromkeys(
        {f"{number}.png" for number in range(6)} - captions.keys(), "no-caption"
    )


def test_damage_is_named_before_a_plan_is_made_of_it(described: Project) -> None:
    path = max((described.root / "captions").glob("*/*.arrow"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[data.rindex(b'{"captions":["') + 15] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamageError, match="checksum") as caught:
        described.run(bucket.run)
    assert path.name in caught.value.message and "caption" in caught.value.next_step


def test_captions_are_verified_repaired_and_kept_by_gc(described: Project) -> None:
    """Also if a dataset names the set of captions; captions of other settings are removed."""
    described.run(bucket.run)
    write_edit(Store(described.root), "0" * 32, ["by hand"])
    shards = described.shards("captions")
    assert described.run(verify.run).exit_code == 0
    name = max((name for name in shards if not name.startswith("edits/")), key=lambda name: len(shards[name]))
    (described.root / "captions" / name).write_bytes(shards[name][:-40])
    assert described.run(verify.run).exit_code == 4
    assert described.run(verify.run, repair=True).details["encoded_again"] == 1
    assert described.shards("captions") == shards
    described.run(gc.run, keep_days=0, yes=True)
    assert described.shards("captions") == shards
    folder = f"captions/{name.partition('/')[0]}"
    named = f"datasets.photos.caption_sets=[{folder.partition('/')[2]}]"
    described.run(discover.run, "datasets.photos.make_captions=none")
    for overrides, more in (((), True), ((named,), False)):
        arguments = "datasets.photos.make_captions=none", "caption.prompts=[plain]", *overrides
        described.run(bucket.run, *arguments)
        unused = described.run(gc.run, *arguments, keep_days=0).details["unused"]
        assert (folder in {row["path"] for row in unused if isinstance(row, dict)}) == more
