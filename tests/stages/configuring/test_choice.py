"""The choice of a recipe by answers and media, and the text of the file."""

from pathlib import Path

import numpy as np
import pytest

from schemas.config.loading import parse_config
from schemas.config.yaml_reader import parse_yaml
from stages.configuring import text
from stages.configuring.choice import (
    TASKS,
    Answers,
    choose_candidate,
    choose_settings,
    default_at,
    list_candidates,
    list_recipes,
    list_tasks,
    parse_card_gib,
)
from stages.configuring.media import Media
from stages.configuring.questions import make_name, parse_card, parse_task, parse_time

FILE = Path("/project/pipeline.yaml")


def answers(task: str = "style", card: float = 16, hours: float | None = 8, **more: object) -> Answers:
    sources = "./before" if task == "editing" else None
    arguments = {"folder": "./photos", "name": "photos", "sources": sources} | more
    return Answers(**arguments, task=task, card_gib=card, seconds=None if hours is None else hours * 3600)  # type: ignore[arg-type]


def media(count: int = 60, size: tuple[int, int] = (1536, 1024), seconds: float = 6.0) -> Media:
    sides = (np.full(count, side, float) for side in size)
    return Media(count, *sides, np.full(count, seconds), count, prompts=(("A cat: it sits", "cat.png"),))


def proposed(choice_answers: Answers, choice_media: Media | None = None) -> str:
    return text.write_text(
        choose_settings(choice_answers, choose_candidate(choice_answers), choice_media or media()), "it"
    )


@pytest.mark.parametrize(
    ("task", "card", "hours", "recipe"),
    [
        ("style", 8, 8, "sana-lora-12gb"),
        ("style", 12, 8, "z-image-lora-12gb"),
        ("character", 12, 1, "klein-4b-lora-12gb"),
        ("object", 16, None, "z-image-lora-16gb"),
        ("style", 80, 8, "qwen-image-lora-24gb"),
        ("editing", 12, 8, "klein-4b-edit-lora-16gb"),
        ("motion", 12, 8, "wan-1.3b-lora-12gb"),
        ("motion", 24, 8, "kandinsky-video-lite-lora-24gb"),
    ],
)
def test_a_table_names_the_recipe(task: str, card: float, hours: float | None, recipe: str) -> None:
    assert choose_candidate(answers(task, card, hours)).recipe == recipe


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_has_a_task_and_can_be_asked_for(name: str) -> None:
    tasks = list_tasks(name)
    assert tasks and ("motion" in tasks) == name.startswith(("wan", "kandinsky-video"))
    candidate = choose_candidate(answers(tasks[0], 80, recipe=name))
    assert candidate.recipe == name and f"{parse_card_gib(name):g}gb" == name.rpartition("-")[2]


@pytest.mark.parametrize("task", TASKS)
def test_every_file_is_short_valid_and_has_no_default(task: str) -> None:
    for candidate in list_candidates(task):
        settings = choose_settings(answers(task, trigger="ohwx"), candidate, media())
        written = text.write_text(settings, candidate.describe())
        config = parse_config(written, FILE)
        assert written.count("\n") < 40 and config.model.family == candidate.model.family
        assert not [path for path, it in settings.items() if path[0] in ("text", "latents") and default_at(path) == it]
        assert config.validation.prompts[0].prompt == "ohwx A cat: it sits"


def test_small_media_lower_the_resolution_and_short_clips_the_frames() -> None:
    dataset = parse_config(proposed(answers("motion"), media(size=(640, 480), seconds=1.0)), FILE).datasets[0]
    assert (dataset.resolution, dataset.video.num_frames) == (512, 21) and dataset.video.min_frames <= 21


@pytest.mark.parametrize(("count", "steps", "rank"), [(4, 500, 16), (60, 1500, 32), (5000, 2000, 32)])
def test_steps_and_rank_follow_the_number_of_items(count: int, steps: int, rank: int) -> None:
    config = parse_config(proposed(answers(), media(count)), FILE)
    assert (config.train.steps, config.train.adapter.rank) == (steps, rank)
    assert (config.datasets[0].eval_fraction > 0) == (count >= 40)


def test_caches_are_never_inside_the_media() -> None:
    config = parse_config(proposed(answers(folder=".", is_in_media=True)), FILE)
    assert (config.root, config.output) == ("/photos-work", "/photos-output")


@pytest.mark.parametrize(("family", "model"), [("z-image", "Qwen/Qwen2.5-VL-3B-Instruct"), ("qwen-image", None)])
def test_items_without_captions_are_described(family: str, model: str | None) -> None:
    config = parse_config(proposed(answers(card=48, family=family, needs_captions=True)), FILE)
    assert config.caption is not None and config.caption.model == model and not config.datasets[0].trigger


# --- a file that exists ---

MINE = """\
# mine
root: /elsewhere          # my disk
model: {family: z-image}  # as always
datasets:
  # the best ones
  - id: best
    instance_data_dir: ./photos
    resolution: 768   # tried
    repeats: 3
latents: {chunk_frames: 2}
train:
  steps: 123  # enough
  offload: {blocks: true}
validation:
  prompts: [{name: mine, prompt: my own}]
"""


def changed(mine: str) -> tuple[str, list[str]]:
    return text.change_text(mine, choose_settings(answers(), choose_candidate(answers()), media()), 0, ())


def test_a_file_keeps_its_comments_and_what_is_its_own() -> None:
    after, by_hand = changed(MINE)
    values, config = parse_yaml(after).value, parse_config(after, FILE)
    assert by_hand == [] and changed(after)[0] == after
    for comment in ("# mine", "# my disk", "# as always", "# the best ones", "# tried", "# enough"):
        assert comment in after
    assert (config.root, config.datasets[0].id, config.datasets[0].repeats) == ("/elsewhere", "best", 3)
    assert config.train.steps == 123 and [it.name for it in config.validation.prompts] == ["mine"]
    assert config.datasets[0].resolution == 1024 and config.train.base_precision == "int8-torchao"
    assert "latents" not in values and not config.train.offload.blocks
    changes = text.compare_texts(MINE, after, "pipeline.yaml").splitlines()
    assert "-    resolution: 768   # tried" in changes and "+    resolution: 1024  # tried" in changes


def test_another_family_takes_its_checkpoint_with_it() -> None:
    mine = MINE.replace("{family: z-image}", "{family: sana, path: ./sana, flavour: sana-600m-512px}")
    assert parse_yaml(changed(mine)[0]).value["model"] == {"family": "z-image", "flavour": "z-image"}


def test_a_file_of_several_datasets_is_changed_where_the_media_are() -> None:
    two = MINE.replace("latents:", "  - {id: other, instance_data_dir: ./other}\nlatents:")
    assert text.find_dataset(two, FILE, Path("/project/other")) == 1
    with pytest.raises(text.NotChanged, match="several datasets"):
        text.find_dataset(two, FILE, Path("/project/third"))


# --- answers ---


@pytest.mark.parametrize(
    ("card", "gib"), [("16", 16), ("24 GB", 24), ("15.9GiB", 15.9), ("RTX 4090", 24), ("NVIDIA H100 80GB", 80)]
)
def test_a_card_is_its_memory_or_its_name(card: str, gib: float) -> None:
    assert parse_card(card) == gib


def test_other_answers() -> None:
    assert (parse_task("char"), parse_time("90m"), parse_time("none")) == ("character", 5400.0, None)
    assert (make_name("My photos (2)"), make_name("猫")) == ("My-photos-2", "media")
    invalid_answers = (
        (parse_task, "cat"),
        (parse_task, ""),
        (parse_time, "soon"),
        (parse_card, "much"),
        (parse_card, "RTX 1234567"),
    )
    for parse, answer in invalid_answers:
        with pytest.raises(ValueError, match=answer or "valid"):
            parse(answer)
