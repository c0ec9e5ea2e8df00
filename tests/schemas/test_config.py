from pathlib import Path

import pytest
from pydantic import ValidationError

from schemas.catalogue import FAMILIES
from schemas.config import PACKAGES, STAGE_ORDER, Config, Incoherent, Model


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
        assert isinstance(cause, Incoherent)
        found |= dict(cause.problems)
    return found


def dataset(id="photos", **changes):
    return {"id": id, "instance_data_dir": "/data"} | changes


def test_the_defaults_are_a_whole_configuration():
    config = Config.model_validate(data())
    assert config.stages.order == STAGE_ORDER
    assert config.model.chosen.name == FAMILIES["sana"].default
    assert config.model.source == config.model.chosen.repo
    assert config.stages.resources("encode-text").workers == 1
    assert config.stages.resources("bucket").device == "auto"


@pytest.mark.parametrize(
    ("family", "flavour"),
    [(name, flavour) for name, family in FAMILIES.items() for flavour in family.flavours],
)
def test_every_flavour_of_the_catalogue_is_accepted_and_has_its_template(family, flavour):
    model = Model(family=family, flavour=flavour)
    assert model.chosen.name == flavour
    assert model.template is FAMILIES[family].templates[model.task]


def test_a_flavour_of_another_family_is_refused_with_the_valid_ones():
    with pytest.raises(ValidationError, match=r"valid flavours: sana-1\.6b-1024px, "):
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
    "wrong", [{"resolution": 8}, {"resolution": 1024, "resolution_type": "area"}, {"resolution": 1e7}]
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


def test_one_dataset_is_enabled():
    assert list(problems(datasets=[dataset(disabled=True)])) == [("datasets",)]


def test_prompts_have_their_own_name_and_the_image_their_task_needs():
    video = {"family": "kandinsky5-video", "flavour": "i2v-lite-5s"}
    clips = [dataset(dataset_type="video")]
    prompts = [{"name": "a", "prompt": "x", "image": "/i.png"}, {"name": "a", "prompt": "y"}]
    found = problems(model=video, datasets=clips, validation={"prompts": prompts})
    assert list(found) == [("validation", "prompts", 1, "name"), ("validation", "prompts", 1, "image")]
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


def test_several_problems_are_told_at_once():
    found = problems(root=str(PACKAGES[0]), datasets=[dataset("a"), dataset("a", dataset_type="video")])
    assert set(found) == {("root",), ("datasets", 1, "id"), ("datasets", 1, "dataset_type")}


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
        {"datasets": [dataset(video={"num_frames": 5, "min_frames": 9})]},
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
