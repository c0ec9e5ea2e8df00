"""Captions of several settings in one project, sampled captions, captions of files, edited captions, caption files."""

from typing import Any

import pytest

from cache.sets import plans
from cache.sets.caption_edits import write_edit
from cache.store.store import Store
from schemas.errors import LatentpressError
from stages import bucket, caption, discover
from stages.encoding.stage_registry import CAPTION
from tests.project import Project
from tests.stages.describing import describing, written

pytestmark = pytest.mark.slow


@pytest.fixture
def photos(project: Any, tiny: Any, built: Any) -> Project:
    """Four pictures without a caption, and one with a caption."""
    return built(describing(project, tiny, temperature=2.0), discover_five)


def discover_five(home: Project) -> None:
    for number in range(4):
        home.image(f"{number}.png", (64, 48), None, number)  # type: ignore[arg-type]
    home.image("own.png", (64, 48), "a cat", 9)
    home.run(discover.run)


@pytest.fixture
def described(project: Any, tiny: Any, built: Any) -> Project:
    """The same pictures with the captions of the model."""
    return built(describing(project, tiny, temperature=2.0), describe_four)


def describe_four(home: Project) -> None:
    discover_five(home)
    home.run(caption.run)


def planned_texts(home: Project) -> dict[str, set[str]]:
    """Path -> texts in the newest plan."""
    store = Store(home.root)
    plan = plans.load_plan(store, plans.list_plans(store)[-1])
    texts = {row["text_id"]: row["text"] for row in plan.text_table.to_pylist()}
    return {row["path"]: {texts[name] for name in row["texts"]} for row in plan.active.to_pylist()}


@pytest.mark.long
def test_drawn_captions_are_the_same_in_any_batch_and_others_by_another_seed(photos: Project) -> None:
    photos.run(caption.run)
    first, name = written(photos), CAPTION.fingerprint(photos.config())
    assert len({text for texts in first.values() for text in texts}) >= 3
    photos.run(discover.run, "root=alone")
    alone = "caption.batch_tokens=1", "root=alone"
    photos.run(caption.run, *alone)
    assert CAPTION.fingerprint(photos.config(*alone)) == name
    second_project = Project(photos.folder, photos.settings | {"root": "alone"})
    captions = {row: texts for row, texts in written_under(second_project, "alone", *alone).items()}
    assert captions == first
    photos.run(caption.run, "caption.seed=1")
    second = written(photos, "caption.seed=1")
    assert written(photos) == first and second != first
    photos.settings["datasets"][0]["caption_sets"] = ["current", name]
    photos.run(bucket.run, "caption.seed=1")
    for path, texts in planned_texts(photos).items():
        if path != "own.png":
            assert texts == cleaned(photos, first.get(path, []) + second.get(path, []))


def cleaned(home: Project, texts: list[str]) -> set[str]:
    """The caption as `bucket` cleans it: without control characters, which random weights generate."""
    return {home.config().model.template.cleaner.text(text) for text in texts}


def written_under(home: Project, root: str, *overrides: str) -> dict[str, list[str]]:
    from cache.sets.item_rows import iter_item_rows

    config, store = home.config(*overrides), Store(home.folder / root)
    plan = CAPTION.find_plan(store, config)
    paths = dict(zip(*(plan.active.column(name).to_pylist() for name in ("sample_id", "path")), strict=True))
    return {
        paths[row.id]: row.info["captions"]
        for _, _, row in iter_item_rows(store, f"captions/{CAPTION.fingerprint(config)}")
    }


def test_a_persons_caption_wins_then_that_of_a_file(photos: Project) -> None:
    photos.settings["datasets"][0]["make_captions"] = "all"
    photos.run(discover.run)
    photos.run(caption.run)
    generated = {path: cleaned(photos, texts) for path, texts in written(photos).items()}
    path = next(path for path in generated if path != "own.png")
    assert "own.png" in generated, "the model's caption of this picture is rejected: choose another picture"
    media = CAPTION.find_plan(Store(photos.root), photos.config()).sample_table.to_pylist()
    ids = {row["path"]: row["media_id"] for row in media}
    write_edit(Store(photos.root), ids[path], ["by hand"])
    for mode, expected in (
        ("fill", {"a cat"}),
        ("add", {"a cat"} | generated["own.png"]),
        ("replace", generated["own.png"]),
    ):
        photos.settings["datasets"][0]["generated_captions"] = mode
        photos.run(bucket.run)
        texts = planned_texts(photos)
        assert texts["own.png"] == expected and texts[path] == {"by hand"}


def test_files_are_written_beside_media_and_never_over_others(described: Project) -> None:
    captions = written(described)
    first, *paths = sorted(captions)
    (described.media / first).with_suffix(".txt").write_text("mine")
    before = {path.name for path in described.media.iterdir()}
    report = described.run(caption.run, write_files=True)
    assert report.details["files_written"] == len(paths) and report.details["files_there_before"] == 1
    assert (described.media / first).with_suffix(".txt").read_text() == "mine"
    for path in paths:
        assert (described.media / path).with_suffix(".txt").read_text() == "".join(
            f"{text}\n" for text in captions[path]
        )
    assert {path.name for path in described.media.iterdir()} == before | {path.replace("png", "txt") for path in paths}
    described.settings["datasets"][0] |= {"caption_strategy": "filename"}
    with pytest.raises(LatentpressError, match=r"photos .folder, filename."):
        described.run(caption.run, write_files=True)


def test_no_file_is_written_for_two_items_of_one_name(photos: Project) -> None:
    """Also if the second item is in another dataset, or is not usable."""
    photos.image("0.webp", (64, 48), None, 7)  # type: ignore[arg-type]
    (photos.media / "1.MP4").write_bytes(b"not a video of this dataset")
    photos.run(discover.run)
    report = photos.run(caption.run, write_files=True)
    named = {path.stem for path in photos.media.glob("*.txt")}
    assert not {"0", "1"} & named and report.details["files_written"] == len(named - {"own"})
    assert report.details["same_name_without_a_file"] == len({"0.png", "0.webp", "1.png"} & {*written(photos)})


def test_temporary_files_of_a_killed_run_are_removed(described: Project) -> None:
    temporary = described.media / f".0.txt.{'0' * 16}.tmp"
    user_files = [described.media / name for name in (".0.txt.tmp", f".a.arrow.{'0' * 16}.tmp")]
    for path in (temporary, *user_files):
        path.write_text("a c")
    described.run(caption.run, write_files=True)
    assert not temporary.exists() and all(path.exists() for path in user_files)


def test_several_prompts_are_alternatives_and_a_forbidden_word_is_not_written(photos: Project) -> None:
    photos.settings["caption"] |= {"prompts": ["plain", "What is it?"], "prefix": "ohwx"}
    photos.run(caption.run)
    captions = written(photos)
    assert {len(texts) for texts in captions.values()} <= {1, 2} and any(len(texts) == 2 for texts in captions.values())
    assert all(text.startswith("ohwx ") for texts in captions.values() for text in texts)
    word = max(
        (word for texts in captions.values() for text in texts for word in text.split()[1:] if word.isalpha()), key=len
    )
    photos.run(caption.run, f"caption.forbidden_words=[{word}]")
    second_captions = written(photos, f"caption.forbidden_words=[{word}]")
    assert second_captions != captions and not any(
        word in text.split() for texts in second_captions.values() for text in texts
    )


def test_without_the_section_or_a_model_that_writes_it_is_said(photos: Project, tiny: Any) -> None:
    with pytest.raises(LatentpressError, match="section `caption`"):
        photos.run(caption.run, "caption=null")
    photos.settings["caption"]["model"] = str(tiny("dinov2"))
    with pytest.raises(LatentpressError, match="dinov2, which"):
        photos.run(caption.run)
    photos.settings["caption"]["model"] = None
    photos.settings["model"] |= {"family": "sana", "flavour": "sana-1.6b-1024px", "path": str(tiny("sana"))}
    with pytest.raises(LatentpressError, match="is a gemma2, which does not describe pictures") as caught:
        photos.run(caption.run)
    assert "caption.model" in caught.value.next_step
