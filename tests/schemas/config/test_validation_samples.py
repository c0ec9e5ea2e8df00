"""Validation samples: their names contain only the options with several values."""

import pytest

from schemas.catalog import FAMILIES
from schemas.config.validation import SizedPrompt, Validation, sized_prompts, validation_samples

FAMILY = FAMILIES["kandinsky5-video"]
FLAVOUR = FAMILY.flavours[FAMILY.default_flavour]


def make_samples(prompts=({"name": "cat"},), **options) -> list:
    settings = Validation.model_validate({"prompts": [{"prompt": "a cat", **each} for each in prompts], **options})
    return validation_samples(settings, FAMILY, FLAVOUR)


def test_a_prompt_of_one_size_and_seed_has_its_own_name_and_noise() -> None:
    (sample,) = make_samples(size="64x64@5", steps=[3], guidance=2.5, seed=7)
    assert (sample.name, sample.group, sample.draw) == ("cat", "cat", "7/cat")
    assert (sample.size, sample.steps, sample.guidance, sample.seed) == ("64x64@5", 3, 2.5, 7)


def test_defaults_are_the_familys() -> None:
    (sample,) = make_samples()
    assert (sample.size, sample.steps, sample.guidance, sample.seed) == (None, FAMILY.steps, FAMILY.guidance, 0)


def test_defaults_of_a_distilled_flavour_are_its_own() -> None:
    family = FAMILIES["krea2"]
    settings = Validation.model_validate({"prompts": [{"name": "cat", "prompt": "a cat"}]})
    (sample,) = validation_samples(settings, family, family.flavours["krea-2-turbo"])
    assert (sample.steps, sample.guidance) == (8, 0.0) and (family.steps, family.guidance) == (28, 4.5)
    settings = Validation.model_validate({"prompts": [{"name": "cat", "prompt": "a cat"}], "steps": 4, "guidance": 2})
    (sample,) = validation_samples(settings, family, family.flavours["krea-2-turbo"])
    assert (sample.steps, sample.guidance) == (4, 2)


def test_names_contain_varying_options_and_seeds_of_a_group_follow_each_other() -> None:
    samples = make_samples(size=["64x64", "96x64@5"], guidance=[1, 4.5], steps=30, seed=[0, 8])
    assert [sample.name for sample in samples] == [
        "cat_64x64_guidance1_seed0",
        "cat_64x64_guidance1_seed8",
        "cat_64x64_guidance4.5_seed0",
        "cat_64x64_guidance4.5_seed8",
        "cat_96x64x5_guidance1_seed0",
        "cat_96x64x5_guidance1_seed8",
        "cat_96x64x5_guidance4.5_seed0",
        "cat_96x64x5_guidance4.5_seed8",
    ]
    assert [sample.group for sample in samples[:3]] == [*["cat_64x64_guidance1"] * 2, "cat_64x64_guidance4.5"]
    assert [sample.prompt_index for sample in samples] == [0] * 4 + [1] * 4
    assert samples[0].draw == samples[2].draw != samples[1].draw, "guidances have the same noise, seeds their own"


def test_guidances_that_print_alike_have_names_of_their_own() -> None:
    names = {sample.name for sample in make_samples(guidance=[4.5, 4.5000001, 1e-7])}
    assert names == {"cat_guidance4.5", "cat_guidance4.5000001", "cat_guidance1e-07"}


def test_a_prompt_overrides_each_option_for_itself() -> None:
    prompts = [{"name": "cat", "seed": [1, 2], "size": "96x96"}, {"name": "dog", "steps": [2, 4], "guidance": 0}]
    samples = make_samples(prompts, size=["64x64", "32x32"], seed=5, steps=9)
    assert [sample.name for sample in samples] == [
        "cat_seed1",
        "cat_seed2",
        *("dog_64x64_2steps", "dog_64x64_4steps", "dog_32x32_2steps", "dog_32x32_4steps"),
    ]
    assert [(sample.size, sample.steps) for sample in samples[:2]] == [("96x96", 9)] * 2
    assert {sample.guidance for sample in samples[2:]} == {0} and {sample.seed for sample in samples[2:]} == {5}


def test_prompts_of_a_set_replace_those_of_the_configuration() -> None:
    settings = Validation.model_validate({"prompts": [{"name": "cat", "prompt": "a cat", "seed": 3}], "seed": [1, 2]})
    assert sized_prompts(settings) == [SizedPrompt("cat", None)]
    samples = validation_samples(
        settings, FAMILY, FLAVOUR, [SizedPrompt("cat", "64x64@1"), SizedPrompt("owl", "64x64@5")]
    )
    named = [(sample.name, sample.size, sample.seed) for sample in samples]
    assert named == [("cat", "64x64@1", 3), ("owl_seed1", "64x64@5", 1), ("owl_seed2", "64x64@5", 2)]


@pytest.mark.parametrize("option, values", [("seed", [1, 1]), ("size", ["8x8", "8x8@1"]), ("guidance", [2, 2.0])])
def test_a_value_may_stand_in_a_list_once(option, values) -> None:
    with pytest.raises(ValueError, match="is already in the list"):
        make_samples(**{option: values})
