from pathlib import Path

import pytest
from pydantic import ValidationError

from schemas.catalog import FAMILIES
from schemas.config.datasets import Dataset
from schemas.config.encoding import STAGE_ORDER, Model
from schemas.config.loading import explain_error
from schemas.config.pipeline import PACKAGES, Config
from schemas.config.section import InconsistentValues
from schemas.config.training import Train


def data(**changes):
    base = {
        "root": "/data/work",
        "model": {"family": "sana"},
        "datasets": [{"id": "photos", "instance_data_dir": "/data/photos"}],
    }
    return base | changes


def problems(**changes):
    """Path -> message of everything incoherent at the top level."""
    with pytest.raises(ValidationError) as caught:
        Config.model_validate(data(**changes))
    found = {}
    for error in caught.value.errors():
        cause = error["ctx"]["error"]
        assert isinstance(cause, InconsistentValues)
        found |= dict(cause.problems)
    return found


def dataset(id="photos", **changes):
    return {"id": id, "instance_data_dir": "/data"} | changes


def test_the_defaults_are_a_whole_configuration():
    config = Config.model_validate(data())
    assert config.stages.order == STAGE_ORDER
    assert config.model.flavour_spec.name == FAMILIES["sana"].default_flavour
    assert config.model.source == config.model.flavour_spec.repo
    assert config.stages.resources("encode-text").workers is None
    assert config.stages.resources("decode").workers == 1
    assert config.stages.resources("bucket").device == "auto"


@pytest.mark.parametrize(
    ("family", "flavour"),
    [(name, flavour) for name, family in FAMILIES.items() for flavour in family.flavours],
)
def test_every_flavour_of_the_catalogue_is_accepted_and_has_its_template(family, flavour):
    model = Model(family=family, flavour=flavour)
    assert model.flavour_spec.name == flavour
    assert model.template is FAMILIES[family].templates[model.task]


def test_a_flavour_of_another_family_is_refused_with_the_valid_ones():
    with pytest.raises(ValidationError, match=r"valid: sana-1\.6b-1024px, "):
        Model(family="sana", flavour="t2v-lite-sft-5s")


def test_an_unknown_family_gives_one_error():
    with pytest.raises(ValidationError) as caught:
        Model(family="sama", flavour="t2v-lite-sft-5s")
    assert [error["loc"] for error in caught.value.errors()] == [("family",)]


@pytest.mark.parametrize("key", ["root", "output"])
def test_folders_inside_the_source_packages_are_refused(key, tmp_path, monkeypatch):
    assert list(problems(**{key: str(PACKAGES[1] / "work")})) == [(key,)]
    monkeypatch.chdir(PACKAGES[1].parent)
    assert list(problems(**{key: "./cache"})) == [(key,)]
    (tmp_path / "link").symlink_to(PACKAGES[0])
    assert list(problems(**{key: str(tmp_path / "link" / "x")})) == [(key,)]
    Config.model_validate(data(**{key: str(tmp_path / "cache")}))


def test_root_may_be_a_url_and_output_may_not():
    Config.model_validate(data(root="memory://cache/x"))
    assert list(problems(output="s3://bucket/x")) == [("output",)]


def test_a_dataset_is_not_called_as_the_validation_prompts_are():
    assert list(problems(datasets=[dataset("validation")])) == [("datasets", 0, "id")]


@pytest.mark.parametrize(
    "wrong", [{"resolution": 8}, {"resolution": 1024, "resolution_type": "area"}, {"resolution": 1e6}]
)
def test_a_resolution_that_no_picture_can_have_is_refused(wrong):
    assert list(problems(datasets=[dataset("a", **wrong)])) == [("datasets", 0, "resolution")]


def test_dataset_ids_differ():
    assert list(problems(datasets=[dataset("a"), dataset("b"), dataset("a")])) == [("datasets", 2, "id")]


@pytest.mark.parametrize(
    ("family", "flavour", "values", "key"),
    [
        ("sana", None, {"dataset_type": "video"}, "dataset_type"),
        ("kandinsky5-video", "i2v-lite-5s", {"dataset_type": "image"}, "dataset_type"),
        ("kandinsky5-image", "i2i-lite-sft", {}, "conditioning_data"),
    ],
)
def test_datasets_fit_the_task(family, flavour, values, key):
    model = {"family": family, "flavour": flavour}
    bad, good = dataset("bad", **values), dataset("good", dataset_type="video", conditioning_data="/c")
    if not FAMILIES[family].video:
        good["dataset_type"] = "image"
    assert list(problems(model=model, datasets=[good, bad])) == [("datasets", 1, key)]
    Config.model_validate(data(model=model, datasets=[good, {**bad, "disabled": True}]))


TABLE = {"instance_data_dir": "/d/list.csv"}


def dataset_problems(**changes):
    """Dotted path below the dataset -> message."""
    with pytest.raises(ValidationError) as caught:
        Config.model_validate(data(datasets=[dataset(), dataset("bad", **changes)]))
    found = [problem for error in caught.value.errors() for problem in explain_error(error)]
    assert all(path[:2] == ("datasets", 1) for path, _ in found)
    return {".".join(map(str, path[2:])): message for path, message in found}


@pytest.mark.parametrize(
    ("values", "key", "said"),
    [
        ({"caption_strategy": "instanceprompt"}, "instance_prompt", "needs it"),
        ({"caption_strategy": "webdataset"}, "caption_strategy", "goes with source: webdataset; this one is folder"),
        ({"caption_strategy": "huggingface"}, "caption_strategy", "goes with source: huggingface"),
        ({"source": "huggingface", "caption_strategy": "textfile"}, "caption_strategy", "does not go with source"),
        ({"instance_data_dir": "/{0..9}.tar", "caption_strategy": "textfile"}, "caption_strategy", "does not go with"),
        ({"caption_strategy": "csv"}, "caption_file", "csv needs the table"),
        ({"crop_aspect": "closest"}, "crop_aspect_buckets", "needs a list"),
        ({"crop_aspect": "random"}, "crop_aspect_buckets", "needs a list"),
        ({"target_downsample_size": 512}, "maximum_image_size", "target_downsample_size needs it"),
        ({"maximum_image_size": 5, "target_downsample_size": 9}, "target_downsample_size", "more than maximum_image"),
        ({"minimum_image_size": 9, "maximum_image_size": 5}, "minimum_image_size", "9 is more than maximum_image"),
        (TABLE | {"conditioning_data": "/s", "conditioning_column": "s"}, "conditioning_column", "keep one"),
        (TABLE | {"mask_data": "/m", "mask_column": "m"}, "mask_column", "keep one"),
        ({"instance_prompt": "a cat"}, "instance_prompt", "it goes with caption_strategy: instanceprompt (this"),
        ({"caption_file": "/d/c.csv"}, "caption_file", "has no effect: it goes with caption_strategy csv"),
        (TABLE | {"caption_strategy": "filename", "caption_column": ["a"]}, "caption_column", "captions in a table"),
        ({"media_column": "file"}, "media_column", "it goes with a manifest"),
        ({"split": "test"}, "split", "it goes with source: huggingface"),
        ({"identity": "store"}, "identity", "it goes with media at a URL"),
        ({"instance_data_dir": "s3://b/f", "follow_links": True}, "follow_links", "it goes with local folders"),
        ({"conditioning_column": "s"}, "conditioning_column", "source: folder has no columns; use conditioning_data"),
        ({"instance_data_dir": "s3://b/f", "mask_column": "m"}, "mask_column", "source: remote has no columns"),
        ({"crop_aspect_buckets": [1.0]}, "crop_aspect_buckets", "it goes with crop_aspect: closest or random"),
        ({"video": {"num_frames": 9}}, "video.num_frames", "it goes with dataset_type: video"),
        ({"video": {"bucket_strategy": "aspect_ratio", "frame_interval": 8}}, "video.frame_interval", "; remove it"),
        ({"make_captions_where": "score > 5"}, "make_captions_where", "no model describes these items"),
        ({"made_captions": "beside"}, "made_captions", "no model describes these items"),
        ({"eval": True, "eval_fraction": 0.1}, "eval_fraction", "has no effect"),
        ({"video": {"num_frames": 5, "min_frames": 9}}, "video.min_frames", "9 is more than num_frames, 5"),
        ({"video": {"min_frames": 9, "max_frames": 5}}, "video.max_frames", "5 is less than min_frames, 9"),
        ({"video": {"clips": 2}}, "video.clips", "valid with random and uniform"),
        ({"video": {"clip": "chunks", "clips": 2}}, "video.clips", "valid with random and uniform"),
        ({"video": {"clip": "slide"}}, "video.clip_stride", "slide needs it"),
        ({"video": {"clip_stride": 8}}, "video.clip_stride", "goes with clip: slide"),
    ],
)
def test_what_does_not_go_together_in_a_dataset_is_refused_by_its_key(values, key, said):
    found = dataset_problems(**values)
    assert list(found) == [key]
    assert said in found[key]


def test_all_that_is_wrong_with_a_dataset_is_told_at_once():
    wrong = {"caption_strategy": "csv", "crop_aspect": "closest", "eval": True, "eval_fraction": 0.5}
    assert set(dataset_problems(**wrong)) == {"caption_file", "crop_aspect_buckets", "eval_fraction"}


@pytest.mark.parametrize(
    "values",
    [
        {"caption_strategy": "instanceprompt", "instance_prompt": "a cat"},
        {"caption_strategy": "parquet", "caption_file": "/d/captions.parquet"},
        {"instance_data_dir": "/d/list.jsonl", "caption_strategy": "textfile"},
        {"crop_aspect": "closest", "crop_aspect_buckets": [1, 0.75]},
        {"minimum_image_size": 256, "maximum_image_size": 256, "target_downsample_size": 256},
        {"dataset_type": "video", "video": {"clip": "slide", "clip_stride": 8}},
        {"dataset_type": "video", "video": {"clip": "uniform", "clips": 3}},
        {"dataset_type": "video", "video": {"num_frames": 5, "min_frames": 5, "max_frames": 5}},
        {"made_captions": "beside", "caption_sets": ["0123456789abcdef01234567"]},
        {"instance_data_dir": "s3://b/{0..9}.tar", "identity": "store", "mask_data": "/m", "follow_links": True},
        {"caption_strategy": "csv", "caption_file": "/d/c.csv", "media_column": "a", "caption_column": ["b"]},
        {"eval_fraction": 1},
    ],
)
def test_what_goes_together_in_a_dataset_is_taken(values):
    model = {"family": "kandinsky5-video"}
    (taken,) = Config.model_validate(data(model=model, datasets=[dataset(**values)])).datasets
    assert taken.model_dump(mode="json", include=values.keys(), exclude_unset=True) == values


@pytest.mark.parametrize(
    ("location", "source", "captions"),
    [
        ("/data/photos", "folder", "textfile"),
        ("s3://bucket/photos", "remote", "textfile"),
        ("https://host/photos/", "remote", "textfile"),
        ("/data/{00000..00012}.tar", "webdataset", "webdataset"),
        ("s3://bucket/shards/*.tar", "webdataset", "webdataset"),
        ("/data/list.csv", "manifest", "csv"),
        ("/data/LIST.JSONL", "manifest", "jsonl"),
        ("https://host/list.parquet?token=1", "manifest", "parquet"),
    ],
)
def test_the_place_says_what_kind_of_source_it_is(location, source, captions):
    found = Dataset(id="a", instance_data_dir=location)
    assert (found.resolved_source, found.resolved_caption_strategy) == (source, captions)


def test_a_source_that_is_named_is_taken_whatever_the_place_looks_like():
    found = Dataset(id="a", instance_data_dir="user/photos.parquet", source="huggingface")
    assert (found.resolved_source, found.resolved_caption_strategy) == ("huggingface", "huggingface")
    assert Dataset(id="a", instance_data_dir="/d/shards", source="webdataset").resolved_caption_strategy == "webdataset"
    assert Dataset(id="a", instance_data_dir="/d/rows", source="manifest").resolved_caption_strategy == "csv"


def test_one_dataset_is_enabled():
    assert list(problems(datasets=[dataset(disabled=True)])) == [("datasets",)]


def test_prompts_have_their_own_name_and_no_image_that_their_task_does_not_take():
    video = {"family": "kandinsky5-video", "flavour": "i2v-lite-5s"}
    clips = [dataset(dataset_type="video")]
    prompts = [{"name": "a", "prompt": "x", "image": "/i.png"}, {"name": "a", "prompt": "y"}]
    found = problems(model=video, datasets=clips, validation={"prompts": prompts})
    assert list(found) == [("validation", "prompts", 1, "name")], "without an image it starts from one of the data"
    assert list(problems(validation={"prompts": prompts[:1]})) == [("validation", "prompts", 0, "image")]


@pytest.mark.parametrize(
    ("family", "size", "message"),
    [
        ("sana", "1000x1024", "multiples of 32"),
        ("sana", "1024x1024@5", "makes images"),
        ("kandinsky5-video", "768x512@60", "the next below is 57"),
        ("kandinsky5-video", "760x512@61", "multiples of 16"),
    ],
)
def test_the_validation_size_fits_the_family(family, size, message):
    found = problems(model={"family": family}, validation={"size": size})
    assert message in found["validation", "size"]


@pytest.mark.parametrize(
    ("family", "size"),
    [
        ("sana", "1024x992"),
        ("sana", "64x64@1"),
        ("kandinsky5-video", "768x512@61"),
        ("kandinsky5-video", "768x512"),
    ],
)
def test_validation_sizes_that_fit(family, size):
    assert Config.model_validate(data(model={"family": family}, validation={"size": size})).validation.size == size


def test_several_sizes_of_validation_each_fit():
    found = problems(
        model={"family": "sana"},
        validation={"size": ["64x64", "65x64"], "prompts": [{"name": "a", "prompt": "b", "size": "64x64@5"}]},
    )
    assert "multiples of 32" in found["validation", "size", 1]
    assert "makes images" in found["validation", "prompts", 0, "size"]


def test_samples_of_two_prompts_have_no_name_in_common():
    prompts = [{"name": "a", "prompt": "b"}, {"name": "a_seed2", "prompt": "b", "seed": 1}]
    Config.model_validate(data(validation={"prompts": prompts}))
    found = problems(validation={"prompts": prompts, "seed": [1, 2]})
    assert "'a_seed2' would name samples of prompts 'a' and 'a_seed2'" in found["validation", "prompts", 1, "name"]


def test_validation_samples_are_limited():
    prompts = [{"name": f"p{i}", "prompt": "b"} for i in range(11)]
    found = problems(validation={"prompts": prompts, "seed": list(range(100)), "steps": list(range(1, 11))})
    assert "11,000 validation samples" in found[("validation",)]


def test_several_problems_are_told_at_once():
    found = problems(root=str(PACKAGES[0]), datasets=[dataset("a"), dataset("a", dataset_type="video")])
    assert set(found) == {("root",), ("datasets", 1, "id"), ("datasets", 1, "dataset_type")}


@pytest.mark.parametrize(
    ("values", "key", "reason"),
    [
        ({"compile_backend": "eager"}, "compile_backend", "no effect with compile none; set that, or remove this"),
        ({"quantize_via": "cpu"}, "quantize_via", "no effect with base_precision no_change, which quantizes nothing"),
        ({"quantize_via": "cpu", "base_precision": "bf16"}, "quantize_via", "no effect with base_precision bf16"),
    ],
)
def test_options_of_training_without_effect_are_refused(values, key, reason):
    with pytest.raises(ValidationError) as caught:
        Train.model_validate(values)
    (found,) = (problem for error in caught.value.errors() for problem in explain_error(error))
    assert found[0] == (key,) and reason in found[1]
    used = {"compile": "blocks", "base_precision": "nf4-bnb"} | {key: values[key]}
    assert Train.model_validate(used)


@pytest.mark.parametrize(
    "section",
    [
        {"train": {"optimizer": {"lr": "1e-4"}}},
        {"train": {"optimizer": {"lr": float("nan")}}},
        {"train": {"optimizer": {"lr": True}}},
        {"train": {"optimizer": {"betas": [0.9, 1.0]}}},
        {"train": {"resume": "false"}},
        {"train": {"resume": 0}},
        {"train": {"steps": 10.0}},
        {"train": {"run": "a/b"}},
        {"train": {"device": "gpu"}},
        {"train": {"adapter": {"targets": ["("]}}},
        {"cache": {"format": "zip"}},
        {"cache": {"unit_mib": float("inf")}},
        {"datasets": []},
        {"datasets": [dataset("..")]},
        {"datasets": [dataset(crop="center")]},
        {"datasets": [dataset(caption_column="caption")]},
        {"datasets": [dataset(weight=0)]},
        {"datasets": [dataset(eval_fraction=1.5)]},
        {"datasets": [dataset(crop_aspect_buckets=[0])]},
        {"datasets": [dataset(tag_shuffle={"variants": 0})]},
        {"datasets": [dataset(tag_shuffle={"delimiter": ""})]},
        {"stages": {"item_timeout_s": 0}},
        {"stages": {"item_memory_mib": 100}},
        {"validation": {"size": "0x64"}},
        {"unknown": 1},
    ],
)
def test_values_of_the_wrong_kind_are_refused(section):
    with pytest.raises(ValidationError):
        Config.model_validate(data(**section))


def test_integers_serve_as_numbers_and_lists_as_tuples():
    config = Config.model_validate(data(train={"optimizer": {"lr": 1, "betas": [0, 0.5]}}))
    assert config.train.optimizer.lr == 1.0
    assert config.train.optimizer.betas == (0.0, 0.5)


def test_the_packages_are_those_of_the_source_tree():
    assert all((folder / "__init__.py").is_file() for folder in PACKAGES)
    assert Path(__file__).resolve().parents[2] == PACKAGES[0].parent
