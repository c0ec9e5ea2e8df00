"""The program masks: its items, that masks are made once and reproducible, and their use in later stages."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from cache.sets.item_rows import iter_item_rows
from cache.sets.set_lookup import current_plan
from cache.store.store import Store
from schemas.errors import INCOMPLETE, LatentpressError
from stages import bucket, discover, encode_latents, encode_text, gc, index, masks, preview, run, status, verify
from stages.encoding.masks.segmenters import load_segmenter
from stages.encoding.stage_registry import MASKS
from stages.media.sample_reader import read_sample_frames
from tests.model_hub import branch_that_moves
from tests.project import Project
from tests.stages.segmenting import build_segmenter, made, masking, on_latent_grid

pytestmark = pytest.mark.slow
PERSON = {"classes": ["person"]}


@pytest.fixture
def photos(project: Any, built: Any) -> Project:
    """Six pictures of two shapes."""
    return built(masking(project, **PERSON), discover_six)


def discover_six(home: Project) -> None:
    for number in range(6):
        home.image(f"{number}.png", (80, 48) if number % 3 else (48, 80), f"picture {number}", number)
    home.run(discover.run)


@pytest.fixture
def masked(photos: Project, built: Any) -> Project:
    """The six pictures with their masks, planned."""
    return built(photos, mask_six)


def mask_six(home: Project) -> None:
    home.run(masks.run)
    home.run(bucket.run)


def planned_samples(home: Project, *overrides: str) -> dict[str, dict[str, Any]]:
    """Path -> sample in the current plan of `bucket`."""
    plan = current_plan(Store(home.root), home.config(*overrides))
    return {row["path"]: plan.samples[row["sample_id"]] for row in plan.active.to_pylist() if row["role"] == "train"}


def latent_masks(home: Project) -> dict[str, np.ndarray]:
    """Sample id -> mask on the grid of latents."""
    rows = [
        row
        for cache in (home.root / "latents").iterdir()
        for _, _, row in iter_item_rows(Store(home.root), f"latents/{cache.name}")
    ]
    return {row.id: row.tensors["mask"].numpy() for row in rows if "mask" in row.tensors}


def test_the_model_of_a_repository_is_that_of_the_commit_that_names_the_cache(
    photos: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The branch moves after the cache was named: a worker that starts later loads the commit of the cache's name."""
    weights, branch = branch_that_moves(photos.folder / "model", tmp_path / "hub", monkeypatch)
    photos.settings["masks"]["model"] = weights["repo"]
    assert MASKS.fingerprint_inputs(photos.config())["weights"] == weights
    branch.write_text("b" * 40)  # a commit without weights
    assert photos.run(masks.run).done >= 3


def test_masks_are_made_once_of_what_has_none(photos: Project) -> None:
    dry_report = photos.run(masks.run, dry_run=True)
    assert dry_report.remaining == 6 and not (photos.root / "masks").exists() and not (photos.root / "plans").exists()
    first = photos.run(masks.run)
    assert first.done + len(first.rejects) == 6 and first.done >= 3
    before = photos.shards("masks")
    second_report = photos.run(masks.run)
    assert (second_report.done, second_report.skipped, second_report.remaining) == (0, first.done, 0) and photos.shards(
        "masks"
    ) == before
    mask_pictures = made(photos)
    assert {mask.shape[1:] for mask in mask_pictures.values()} == {(48, 80), (80, 48)}
    assert all(set(np.unique(mask)) == {0, 255} for mask in mask_pictures.values())
    rows = {row["stage"]: row for row in photos.run(status.run).details["stages"]}
    assert rows["masks"]["done"] == first.done and rows["masks"]["rejected"] == len(first.rejects)


def test_latents_have_them_as_training_reads_them(photos: Project) -> None:
    photos.settings["cache"]["format"] = "webdataset"
    with pytest.raises(LatentpressError, match="6 of 6 items are not masked yet") as caught:
        photos.run(bucket.run)
    assert "latentpress masks" in caught.value.next_step
    photos.run(masks.run)
    report = photos.run(bucket.run)
    mask_pictures, samples = made(photos), planned_samples(photos)
    assert samples.keys() == mask_pictures.keys()
    lacking = {f"{number}.png" for number in range(6)} - mask_pictures.keys()
    assert photos.rejects(report) == dict.fromkeys(lacking, "no-mask")
    photos.run(encode_latents.run)
    for path, sample in samples.items():
        (cells,) = on_latent_grid(mask_pictures[path], sample["geometry"])
        assert np.allclose(latent_masks(photos)[sample["sample_id"]][0], cells, atol=1e-6)


def test_a_clip_has_masks_that_move(project: Any) -> None:
    """Each frame has a mask that depends only on this frame, and each clip of a video has its own masks."""
    home = masking(project, "kandinsky5-video-t2v", classes=["person", "sky"], min_area=0)
    home.settings["datasets"][0]["video"] |= {"clip_selection": "chunks"}
    home.video("a.mp4", frames=18, size=(80, 48))
    home.run(discover.run)
    assert home.run(masks.run).done == 2 and home.run(bucket.run).details["excluded"] == "nothing"
    home.run(encode_latents.run)
    config, store = home.config(), Store(home.root)
    plan, segmenter = MASKS.find_plan(store, config), load_segmenter(config.masks, torch.float32, torch.device("cpu"))
    expected, masks_by_id = {}, latent_masks(home)
    for item in plan.sample_table.to_pylist():
        frames = read_sample_frames(home.media / "a.mp4", item, "pyav")
        clip_masks = segmenter.find(frames, [(0, 0, 80, 48)] * 9).numpy().astype(np.uint8) * 255
        assert len(np.unique(clip_masks, axis=0)) > 1, "the masks move"
        expected[item["start"]] = clip_masks
    samples = current_plan(store, config).sample_table.to_pylist()
    assert len(samples) == len(masks_by_id) == 2 and samples[0]["mask_id"] != samples[1]["mask_id"]
    for sample in samples:
        cells = on_latent_grid(expected[sample["start"]], sample["geometry"])
        grid = np.stack([cells[0], cells[1:5].mean(0), cells[5:].mean(0)])
        assert np.allclose(masks_by_id[sample["sample_id"]], grid, atol=1e-6)
    page = Path(home.run(preview.run, plan=True).details["page"]).read_text()
    assert page.count("mask: red is not trained: ") >= 6 and "cannot be shown" not in page


def test_a_box_of_each_item(project: Any) -> None:
    """Boxes come from a manifest. An item without a box is rejected, and another box gives another mask."""
    model = build_segmenter("sam", project().folder / "sam")
    home = masking(project, model=str(model), box_column="box")
    home.settings["datasets"][0]["instance_data_dir"] = "media/all.csv"
    for number in range(3):
        home.image(f"{number}.png", (160, 96), "", number)

    def write(*boxes: str) -> None:
        rows = [f'{number}.png,picture,"{box}"\n' for number, box in enumerate(boxes)]
        (home.media / "all.csv").write_text("file_name,caption,box\n" + "".join(rows))
        home.run(discover.run)

    write("20, 10, 80, 60", "[0, 0, 160.0, 96.2]", "20, 10, 0, 60")
    report = home.run(masks.run)
    assert home.rejects(report) == {"2.png": "no-box"} and report.done == 2
    config = home.config()
    segmenter = load_segmenter(config.masks, torch.float32, torch.device("cpu"))
    with Image.open(home.media / "0.png") as picture:
        pixels = np.asarray(picture.resize((80, 48), Image.Resampling.LANCZOS))
    expected = segmenter.find([pixels], [(10.0, 5.0, 50.0, 35.0)]).numpy()
    assert (made(home)["0.png"] == expected * 255).all()
    before = made(home)
    write("20, 10, 81, 60", "[0, 0, 160.0, 96.2]", "20, 10, 9, 60")
    assert home.run(masks.run, dry_run=True).remaining == 2
    assert home.run(masks.run).done == 2 and (made(home)["1.png"] == before["1.png"]).all()
    assert home.run(bucket.run).details["excluded"] == "nothing"


def test_own_masks_win(photos: Project) -> None:
    """An item without a mask file is not rejected, because a model makes its mask."""
    folder = photos.folder / "drawn"
    folder.mkdir()
    Image.new("L", (80, 48), 255).save(folder / "1.png")
    photos.settings["datasets"][0]["mask_data"] = "drawn"
    photos.run(discover.run, "datasets.photos.make_masks=none")
    assert photos.run(bucket.run, "datasets.photos.make_masks=none").details["excluded"] == "nothing"
    assert planned_samples(photos, "datasets.photos.make_masks=none").keys() == {"1.png"}
    photos.run(discover.run)
    assert photos.run(masks.run, dry_run=True).remaining == 5
    photos.run(masks.run)
    photos.run(bucket.run)
    kinds = {path: (row["mask_kind"], row["mask_path"].split("/")[0]) for path, row in planned_samples(photos).items()}
    assert kinds.pop("1.png") == ("image", "1.png") and {*kinds.values()} == {("made", "masks")}
    photos.run(encode_latents.run)
    assert latent_masks(photos)[planned_samples(photos)["1.png"]["sample_id"]].all()


def test_other_settings_are_other_masks_and_other_samples(masked: Project) -> None:
    photos = masked
    before, first = planned_samples(photos), made(photos)
    inverted = "masks.invert=true"
    photos.run(masks.run, inverted)
    photos.run(bucket.run, inverted)
    after = planned_samples(photos, inverted)
    assert all((made(photos, inverted)[path] == 255 - mask).all() for path, mask in first.items())
    assert {row["sample_id"] for row in before.values()}.isdisjoint(row["sample_id"] for row in after.values())
    assert photos.run(masks.run).done == 0
    photos.run(bucket.run)
    assert planned_samples(photos) == before


def test_edges(masked: Project) -> None:
    """Masks are grown by pixels on all sides, and blurred."""
    photos = masked
    grown, blurred = ("masks.grow=2", "masks.min_area=0"), ("masks.blur=1.5", "masks.min_area=0")
    for overrides in (grown, blurred):
        photos.run(masks.run, *overrides)
    for path, mask in made(photos).items():
        white = np.argwhere(mask[0] > 0)
        expected = np.zeros_like(mask[0])
        for row, column in white:
            expected[max(0, row - 2) : row + 3, max(0, column - 2) : column + 3] = 255
        if not expected.all():
            assert (made(photos, *grown)[path][0] == expected).all()
        soft = made(photos, *blurred)[path][0]
        assert len(np.unique(soft)) > 4 and abs(float(soft.mean()) - float(mask.mean())) < 20


def test_an_empty_or_full_mask_is_rejected(photos: Project) -> None:
    least = "masks.min_area=0.45"
    report = photos.run(masks.run, least)
    reasons = photos.rejects(report)
    assert set(reasons.values()) == {"empty-mask", "full-mask"} and report.done
    row = next(row for row in report.rejects if row["reason"] == "empty-mask")
    assert "white" in row["message"]
    assert any("--retry-rejects" in step for step in report.next_steps)
    assert photos.rejects(photos.run(bucket.run, least)) == dict.fromkeys(reasons, "no-mask")


@pytest.mark.parametrize(
    "masked, message, step",
    [
        ({"classes": ["dog", "Person"]}, "has no label dog", "wall, person, sky, cat"),
        ({}, "masks.classes", "wall, person, sky, cat"),
        ({"model": "DINO"}, "is a dinov2", "segformer"),
        ({"model": "nowhere/at all", **PERSON}, "at all", "masks.model"),
    ],
)
def test_a_model_or_class_that_is_none(photos: Project, tiny: Any, masked: dict, message: str, step: str) -> None:
    model = (
        str(tiny("dinov2")) if masked.get("model") == "DINO" else masked.get("model", photos.settings["masks"]["model"])
    )
    photos.settings["masks"] = masked | {"model": model}
    with pytest.raises(LatentpressError, match=message) as caught:
        photos.run(masks.run)
    assert step in caught.value.next_step


def test_masks_are_verified_repaired_and_kept_by_gc(masked: Project) -> None:
    photos = masked
    shards = photos.shards("masks")
    assert photos.run(verify.run).exit_code == 0
    name = max(shards, key=lambda name: len(shards[name]))
    (photos.root / "masks" / name).write_bytes(shards[name][:-40])
    assert photos.run(verify.run).exit_code == 4
    assert photos.run(verify.run, repair=True).details["encoded_again"] == 1
    assert photos.shards("masks") == shards
    [settings] = (photos.root / "masks").glob("*/provenance.json")
    settings.write_bytes(settings.read_bytes()[:-9])  # does not damage shards
    assert [row["path"] for row in photos.run(verify.run, repair=True).damage] == [
        str(settings.relative_to(photos.root))
    ]
    photos.run(masks.run)
    assert photos.run(verify.run).exit_code == 0 and photos.shards("masks") == shards
    photos.run(gc.run, keep_days=0, yes=True)
    assert photos.shards("masks") == shards


def test_masks_that_are_gone_stop_a_stage_and_change_nothing(masked: Project) -> None:
    shutil.rmtree(masked.root / "masks")
    with pytest.raises(LatentpressError, match="checked files are missing") as caught:
        masked.run(encode_latents.run)
    assert "latentpress masks" in caught.value.next_step and not (masked.root / "latents").exists()


def test_a_damaged_mask_is_made_again_and_then_encoded(masked: Project) -> None:
    """Its sample is not silently trained on, and not lost from the set."""
    photos = masked
    for program in (encode_text, encode_latents):
        photos.run(program.run)
    expected = photos.run(index.run).details
    shutil.rmtree(photos.root / "latents")
    [path, *_] = (photos.root / "masks").rglob("*.arrow")
    data = bytearray(path.read_bytes())
    data[data.index(b"IDAT") + 9] ^= 1
    path.write_bytes(data)
    report = photos.run(encode_latents.run)
    assert [row["reason"] for row in report.rejects] == ["missing"]
    assert "its checksum does not match; run `latentpress verify --repair`" in report.rejects[0]["message"]
    report = photos.run(index.run)
    assert report.exit_code == INCOMPLETE and "media of 1 samples" in report.details["no_set_made"]
    photos.run(verify.run, repair=True)
    photos.run(encode_latents.run)
    assert photos.run(index.run).details == expected


@pytest.mark.long
def test_run_makes_them_between_discover_and_bucket_and_training_reads_them(photos: Project) -> None:
    assert photos.config().stage_order[:3] == ["discover", "masks", "bucket"]
    order = ["discover", "masks", "bucket", "encode-text", "encode-latents", "index", "train"]
    photos.settings["stages"]["order"] = order
    photos.settings["train"] = {"steps": 1, "device": "cpu", "methods": {"masked_loss": {}}}
    report = photos.run(run.run)
    assert [row["stage"] for row in report.details["stages"]] == order and report.exit_code == 0
    assert planned_samples(photos).keys() == made(photos).keys()


@pytest.mark.long
def test_targets_of_edits_have_them(project: Any) -> None:
    home = masking(project, "qwen-image-edit-plus", **PERSON)
    home.settings["datasets"][0]["conditioning_data"] = "source"
    for number in range(3):
        home.image(f"{number}.png", (80, 48), f"picture {number}", number)
        home.image(f"../source/{number}.png", (80, 48), None, number + 9)  # type: ignore[arg-type]
    for program in (discover, masks, bucket):
        home.run(program.run)
    targets = {path: row["mask_kind"] for path, row in planned_samples(home).items()}
    assert targets == dict.fromkeys(made(home), "made") and targets
