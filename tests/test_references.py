"""Several reference images of a sample, from the files to the batch, against the pipeline."""

from dataclasses import replace
from pathlib import Path

import diffusers
import numpy as np
import pytest
import skimage.data
import torch
from diffusers.modular_pipelines.flux3.image_processor import Flux3ImageProcessor
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from PIL import Image

from cache.sets.set_lookup import find_configured_id, open_set
from cache.sets.trainset import TrainSet
from cache.store.store import Store
from schemas.catalog import FAMILIES
from schemas.errors import LatentpressError
from schemas.family import PaddedSize
from schemas.geometry import Bucket, Crop
from stages import bucket, discover, encode_latents, encode_text, export, index, preview
from stages.discovery.media_table import read_media_table
from stages.media.image import load_image
from stages.media.sample_reader import normalize_pixels, resize_and_crop
from tests.forms import long
from tests.project import Project
from trainer.batch import Batch
from trainer.data import BatchReader, to_tensor

STAGES = (discover.run, bucket.run, encode_text.run, encode_latents.run, index.run)
SIZES = {"first": (96, 80), "second": (70, 100)}  # of the source images; the sides of the second are cut
BUCKETS = {"64x64@1+64x96+96x80", "64x64@1+96x80", "64x64@1+96x80+64x96"}
PROMPTS = [
    {"name": "own", "prompt": "a picture", "image": ["pictures/second.png", "pictures/first.png"]},
    {"name": "data", "prompt": "another"},
]


def pictures(home: Project) -> None:
    for seed, name in enumerate("abc"):
        home.image(f"{name}.png", (64, 64), seed=seed)
    for seed, (name, size) in enumerate(SIZES.items()):
        home.image(f"../pictures/{name}.png", size, seed=10 + seed)


def put(home: Project, **places: str) -> None:
    """Copy a picture to each place."""
    for place, name in places.items():
        path = home.folder / f"{place.replace('__', '/')}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes((home.folder / f"pictures/{name}.png").read_bytes())


@pytest.fixture
def referenced(project) -> Project:
    """a and b share their references, in another order; c has one of them."""
    home = project("flux2-klein-i2i", cache={"unit_mib": 1.0}, validation={"size": "64x64", "prompts": PROMPTS})
    home.settings["datasets"][0] |= {"conditioning_data": ["one", "two"]}
    pictures(home)
    put(home, one__a="first", two__a="second", one__b="second", two__b="first", one__c="first")
    return home


def encode(home: Project) -> None:
    assert [home.run(program).exit_code for program in STAGES] == [0] * len(STAGES)


def opened(home: Project, *overrides: str) -> TrainSet:
    config = home.config(*overrides)
    store = Store(config.root)
    return open_set(store, find_configured_id(store, config), config.model.family, config.model.task)


def batches(data: TrainSet) -> dict[str, Batch]:
    """Bucket -> the batch of its only sample."""
    reader, found = BatchReader(data), {}
    for row in range(len(data)):
        rows = np.array([row])
        found[data.bucket(row)] = reader.read(rows, data.row_texts.first(rows), data.bucket(row))
    return found


def wanted_latents(home: Project) -> dict[str, torch.Tensor]:
    """(1, C, 1, h, w) of each picture, by the pipeline's own code; by size as buckets have it."""
    pipe = diffusers.Flux2KleinPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=diffusers.AutoencoderKLFlux2.from_pretrained(Path(home.settings["model"]["path"]) / "vae"),
        transformer=None,
        scheduler=None,
    )
    latents = {}
    for name, size in SIZES.items():
        width, height = (side // 16 * 16 for side in size)
        image = Image.open(home.folder / f"pictures/{name}.png")
        pixels = pipe.image_processor.preprocess(image, height=height, width=width, resize_mode="crop")
        with torch.no_grad():
            latents[f"{width}x{height}"] = pipe._encode_vae_image(pixels, None)[:, :, None]
    return latents


class SizeAlone:
    """Of a picture."""

    def __init__(self, size: tuple[int, int]) -> None:
        self.size = size

    def resize(self, size: tuple[int, int], _: object) -> "SizeAlone":
        return SizeAlone(size)


@pytest.mark.slow
def test_a_reference_is_sized_and_cropped_as_by_the_pipeline(tmp_path, often) -> None:
    """Sizes of any pictures, and all pixels of a photograph's; those of more than 1024x1024 pixels are scaled down."""
    processor = Flux2ImageProcessor()
    fit = FAMILIES["flux2-klein"].conditions["i2i"].size.fit
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.uniform(np.log(300), np.log(9000), (often(200, 100_000), 2))).astype(int)
    sizes = np.concatenate([sizes, [(1024, 1024), (1024, 1025), (1025, 1023), (2048, 2048)]])
    *sides, crop = fit(*sizes.T)
    wanted = [processor._resize_if_exceeds_area(SizeAlone((int(w), int(h)))).size for w, h in sizes]
    assert np.array_equal(np.stack([crop.resize_width, crop.resize_height], 1), wanted)
    assert np.array_equal(np.stack(sides, 1), np.array(wanted) // 16 * 16)
    photo = Image.fromarray(skimage.data.chelsea())
    for size in ((971, 1203), (1024, 1025), (451, 300), (1501, 1003))[: often(3, 4)]:
        photo.resize(size, Image.Resampling.BICUBIC).save(tmp_path / "photo.png", compress_level=0)
        width, height, crop = fit(*np.array([size]).T)
        geometry = Crop(*(int(value[0]) for value in vars(crop).values())), Bucket(int(width[0]), int(height[0]))
        found = normalize_pixels(resize_and_crop(load_image(tmp_path / "photo.png"), *geometry))
        image = processor._resize_if_exceeds_area(processor.check_image_input(Image.open(tmp_path / "photo.png")))
        across, down = (side // 16 * 16 for side in image.size)
        [expected] = processor.preprocess(image, height=down, width=across, resize_mode="crop")
        assert torch.equal(torch.from_numpy(found), expected), size


@pytest.mark.slow
def test_a_reference_that_is_not_cropped_is_padded_as_by_the_pipeline(tmp_path, often) -> None:
    """Sizes of any pictures, and all pixels of a few: of less than a token, and in the long form of more than 4
    megapixels. The sizes include a canvas that rounds up to more than 4 megapixels."""
    processor, fit = Flux3ImageProcessor(), PaddedSize(area=4 * 1024 * 1024, multiple=16, least_side=64).fit
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.uniform(0, np.log(9000), (often(200, 20_000), 2))).astype(int)
    sizes = np.concatenate([sizes, [(1, 1), (16, 40), (2047, 2049), (2048, 2048), (30, 5000), (9000, 20)]])
    *sides, crop = fit(*sizes.T)
    processor.resize = lambda image, height, width: SizeAlone((width, height))  # type: ignore[method-assign]
    scaled = [processor._resize_if_canvas_exceeds_area(SizeAlone((int(w), int(h)))).size for w, h in sizes]
    wanted = [processor._get_canvas_height_width(height, width)[::-1] for width, height in scaled]
    assert np.array_equal(np.stack([crop.resize_width, crop.resize_height], 1), scaled)
    assert np.array_equal(np.stack(sides, 1), wanted)
    del processor.resize
    photo = Image.fromarray(skimage.data.chelsea())
    for size in ((451, 300), (17, 33), (16, 40), (5, 1), (64, 65), (2047, 2050))[: often(5, 6)]:
        photo.resize(size, Image.Resampling.BICUBIC).save(tmp_path / "photo.png", compress_level=0)
        width, height, crop = fit(*np.array([size]).T)
        geometry = Crop(*(int(value[0]) for value in vars(crop).values())), Bucket(int(width[0]), int(height[0]))
        found = normalize_pixels(resize_and_crop(load_image(tmp_path / "photo.png"), *geometry))
        [expected] = processor.preprocess(Image.open(tmp_path / "photo.png"))[0]
        assert torch.equal(torch.from_numpy(found), expected), size


@pytest.mark.slow
def test_an_only_reference_has_a_size_rule_of_its_own(referenced, monkeypatch) -> None:
    """c has one reference, and so has the prompt "own"; the picture that two samples share is encoded in both sizes."""
    family = FAMILIES["flux2-klein"]
    alone = PaddedSize(area=4 * 1024 * 1024, multiple=16, least_side=64)
    condition = replace(family.conditions["i2i"], sole_size=alone)
    monkeypatch.setitem(FAMILIES, "flux2-klein", replace(family, conditions={"i2i": condition}))
    image = "pictures/second.png"
    referenced.settings["validation"]["prompts"] = [{"name": "own", "prompt": "a picture", "image": image}]
    put(referenced, one__c="second")
    encode(referenced)
    data = opened(referenced)
    assert batches(data).keys() == {"64x64@1+64x96+96x80", "64x64@1+80x112", "64x64@1+96x80+64x96"}
    [prompt] = data.validation
    assert prompt.references[0].shape[-2:] == (112 // 16, 80 // 16)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, long(10)])
def test_references_are_encoded_as_by_a_pipeline_with_a_rule_for_the_only_one(project, count, record_property) -> None:
    """Of sizes that are no multiples: the only one is padded, several are cropped."""
    home = project("flux3-i2i", cache={"unit_mib": 1.0}, validation={"prompts": []})
    folders = [f"references{number}" for number in range(count)]
    home.settings["datasets"][0] |= {"conditioning_data": folders if count > 1 else folders[0]}
    home.image("a.png", (64, 64))
    for number, folder in enumerate(folders):
        home.image(f"../{folder}/a.png", (70 + number, 101 - number), seed=number)
    encode(home)
    [batch] = batches(opened(home)).values()
    blocks = diffusers.Flux3AutoBlocks().sub_blocks["vae_encoder"]
    pipe = blocks.init_pipeline(home.settings["model"]["path"])
    pipe.load_components("vae")
    images = [Image.open(home.folder / folder / "a.png").convert("RGB") for folder in folders]
    wanted = pipe(image=images if count > 1 else images[0], output="image_cond_latents")
    pairs = [*zip(batch.references, wanted, strict=True)]
    gaps = [((found[:, :, 0] - each).abs().max() / each.abs().max().clamp(min=1)).item() for found, each in pairs]
    record_property("largest difference", max(gaps))
    assert len(gaps) == count and max(gaps) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("form", ["arrow", long("webdataset")])
def test_references_are_encoded_once_and_are_read_in_their_order(referenced, form, tmp_path, record_property) -> None:
    """By batches, by samples, by prompts, and from an export and what was imported of it."""
    referenced.settings["cache"]["format"] = form
    encode(referenced)
    home, latents = referenced, wanted_latents(referenced)
    data = opened(home)
    read = batches(data)
    assert read.keys() == BUCKETS
    gaps = [
        (found - latents[size]).abs().max().item()
        for name, batch in read.items()
        for found, size in zip(batch.references, name.split("+")[1:], strict=True)
    ]
    own, shown = ([to_tensor(array)[None] for array in prompt.references] for prompt in data.validation)
    gaps += [(found - wanted).abs().max().item() for found, wanted in zip(own, reversed(latents.values()), strict=True)]
    record_property("largest difference", max(gaps))
    assert max(gaps) <= 1e-5 and len(shown) in (1, 2)
    for row in range(len(data)):
        tensors, batch = data.sample(row).tensors, read[data.bucket(row)]
        for number, reference in enumerate(batch.references, 1):
            assert torch.equal(to_tensor(tensors[f"reference{number}"])[None], reference)
    shards = data.tables["shards"].to_pylist()
    assert sum(shard["kind"] == "latents" for shard in shards) == 3  # of the targets, and of each size of reference
    assert {bucket.run: 0, encode_latents.run: 0} == {
        run: home.run(run).done for run in (bucket.run, encode_latents.run)
    }
    page = Path(home.run(preview.run, plan=True).details["page"]).read_text()
    assert "reference 2: " in page and page.count("reference 1: ") == 3
    home.run(export.run, to=str(tmp_path / "out"))
    copied = opened(home, f"root={tmp_path / 'out'}")
    assert copied.id == data.id
    for name, batch in batches(copied).items():
        pairs = zip(batch.references, read[name].references, strict=True)
        assert torch.equal(batch.latents_BCTHW, read[name].latents_BCTHW) and all(torch.equal(*pair) for pair in pairs)
    assert copied.validation == data.validation


def listed(home: Project) -> dict[str, tuple[str | None, ...]]:
    home.run(discover.run)
    table = read_media_table(Store(home.root), "photos")
    roles = [role for role in ("source", "source_2", "source_3") if role in table.column_names]
    return {row["path"]: tuple(row[role] for role in roles) for row in table.to_pylist()}


def test_numbered_companions_and_columns_are_references(project) -> None:
    """The same plan in each of the three ways, and the rejects: without the first, and with a gap."""
    home = project("flux2-klein-i2i")
    pictures(home)
    put(home, refs__a_1="first", refs__a_2="second", refs__b_1="second", refs__c_2="first", refs__d="first")
    home.settings["datasets"][0] |= {"conditioning_data": "refs", "conditioning_count": 3}
    assert listed(home) == {"a.png": ("a_1.png", "a_2.png", None), "b.png": ("b_1.png", None, None)}
    report = home.run(discover.run)
    assert home.rejects(report) == {"c.png": "no-source"}
    home.run(bucket.run)
    put(home, refs__b_2="first", refs__b_3="first", refs__b_4="second")
    assert home.rejects(home.run(discover.run)) == {"b.png": "many-sources", "c.png": "no-source"}
    rows = "".join(f"{name}.png,{first},{second},a picture\n" for name, first, second in (
        ("a", "../refs/a_1.png", "../refs/a_2.png"), ("b", "../refs/b_1.png", ""), ("c", "../refs/a_1.png", "gone.png"),
    ))  # fmt: skip
    (home.media / "table.csv").write_text("path,first,second,caption\n" + rows)
    dataset = home.settings["datasets"][0]
    del dataset["conditioning_data"], dataset["conditioning_count"]
    dataset |= {"instance_data_dir": "media/table.csv", "conditioning_column": ["first", "second"]}
    report = home.run(discover.run, accept_removed=True)
    assert home.rejects(report) == {"c.png": "no-source_2"}
    assert {name: len([*filter(None, paths)]) for name, paths in listed(home).items()} == {"a.png": 2, "b.png": 1}
    assert home.run(bucket.run).exit_code == 0


def test_what_a_family_does_not_take_is_refused_by_name(referenced) -> None:
    dataset = referenced.settings["datasets"][0]
    dataset["conditioning_data"] = ["one"] * 5
    with pytest.raises(LatentpressError, match=r"conditioning_data: up to 5 source images .*flux2-klein: at most 4"):
        referenced.config()
    dataset |= {"conditioning_data": "one", "conditioning_count": 5}
    with pytest.raises(LatentpressError, match=r"conditioning_count: up to 5 source images"):
        referenced.config()
    dataset |= {"conditioning_data": ["one", "two"], "conditioning_count": 2}
    with pytest.raises(LatentpressError, match="conditioning_count: "):
        referenced.config()
    del dataset["conditioning_count"]
    referenced.image("../two/a.png", (40, 200))
    referenced.run(discover.run)
    report = referenced.run(bucket.run)
    assert referenced.rejects(report) == {"a.png": "reference-size"}
    assert "its source image 2 is 40x200" in report.rejects[0]["message"]
    for name in "abc":
        referenced.image(f"../one/{name}.png", (40, 200))
    referenced.run(discover.run)
    with pytest.raises(LatentpressError, match="3 reference-size"):
        referenced.run(bucket.run)


@pytest.mark.slow
def test_a_reference_that_is_damaged_rejects_the_samples_that_have_it(referenced) -> None:
    referenced.settings["validation"]["prompts"] = []
    referenced.run(discover.run)
    referenced.run(bucket.run)
    for place in ("two/a.png", "one/b.png"):  # the same file: either is opened
        (referenced.folder / place).write_bytes(b"no picture")
    referenced.run(encode_text.run)
    assert len(referenced.run(encode_latents.run).rejects) == 1
    report = referenced.run(index.run)
    assert sorted(referenced.rejects(report)) == ["a.png", "b.png"] and len(opened(referenced)) == 1
