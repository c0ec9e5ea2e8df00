"""What is chosen for which answers and media, and the text of the file."""

from pathlib import Path

import numpy as np
import pytest

from schemas.config.loading import parse_config
from schemas.config.yaml_reader import parse_yaml
from stages.configuring import files
from stages.configuring.answers import Answers, make_name, parse_card, parse_task, parse_time
from stages.configuring.choice import choose_settings
from stages.configuring.folder import Media
from stages.configuring.recipes import Candidate, attempts, default_at, list_candidates

FILE = Path("/project/pipeline.yaml")


def answers(task: str = "style", card: float = 16, hours: float | None = 8, **others: object) -> Answers:
    sources = "./before" if task == "editing" else None
    seconds = None if hours is None else hours * 3600
    return Answers(
        **{"folder": "./photos", "name": "photos", "sources": sources} | others,
        task=task,
        card_gib=card,
        seconds=seconds,
    )  # type: ignore[arg-type]


def media(count: int = 60, size: tuple[int, int] = (1536, 1024), seconds: float = 6.0) -> Media:
    sides = (np.full(count, side, float) for side in size)
    return Media(*sides, np.full(count, seconds), count, prompts=(("A cat: it sits", "cat.png"),))


@pytest.mark.parametrize(
    ("task", "card", "hours", "recipe"),
    [
        ("style", 8, 8, "sana-lora-12gb"),
        ("style", 12, 8, "z-image-lora-12gb"),
        ("character", 12, 1, "klein-4b-lora-12gb"),
        ("concept", 16, None, "z-image-lora-16gb"),
        ("style", 80, 8, "qwen-image-lora-24gb"),
        ("editing", 12, 8, "klein-4b-edit-lora-16gb"),
        ("motion", 12, 8, "wan-1.3b-lora-12gb"),
        ("motion", 16, 8, "kandinsky-video-lite-lora-16gb"),
        ("motion", 24, 8, "kandinsky-video-lite-lora-24gb"),
    ],
)
def test_the_first_recipe_is_that_of_the_card(task: str, card: float, hours: float | None, recipe: str) -> None:
    assert next(attempts(answers(task, card, hours))).recipe == recipe


def test_with_memory_to_spare_nothing_is_saved_first() -> None:
    roomy, as_it_is, *_ = attempts(answers(card=24))
    assert roomy.recipe == as_it_is.recipe and ("train", "base_precision") in as_it_is.settings
    assert ("train", "base_precision") not in roomy.settings and roomy.tightened({"train"}) is None


def test_what_does_not_fit_is_tried_with_its_memory_saved() -> None:
    candidate = next(attempts(answers(card=8)))
    tighter = candidate.tightened({"train", "encode-text"})
    assert tighter is not None and tighter.settings["text", "offload"] == "blocks"
    parse_config(files.write_text(choose_settings(answers(card=8), tighter, media()), "it"), FILE)
    assert tighter.tightened({"train", "encode-text"}) is None


def every_candidate() -> list[tuple[str, Candidate]]:
    return [(task, it) for task in ("style", "editing", "motion") for it in list_candidates(task)]


@pytest.mark.parametrize(("task", "candidate"), every_candidate(), ids=lambda it: getattr(it, "recipe", it))
def test_every_file_is_short_valid_and_says_no_default(task: str, candidate: Candidate) -> None:
    given = answers(task, caption="a picture")
    settings = choose_settings(given, candidate, media())
    text = files.write_text(settings, candidate.describe())
    config = parse_config(text, FILE)
    assert text.count("\n") < 40 and max(map(len, text.splitlines())) <= 100
    assert config.model.family == candidate.family and config.datasets[0].id == "photos"
    assert not [
        path for path, value in settings.items() if path[0] in ("text", "latents") and default_at(path) == value
    ]
    assert config.validation.prompts[0].prompt == "A cat: it sits"


def test_small_media_lower_the_resolution_and_short_clips_the_frames() -> None:
    candidate = next(attempts(answers("motion")))
    settings = choose_settings(answers("motion"), candidate, media(size=(640, 480), seconds=1.0))
    dataset = parse_config(files.write_text(settings, "it"), FILE).datasets[0]
    assert (dataset.resolution, dataset.video.num_frames) == (512, 21)
    assert dataset.video.min_frames <= 21


@pytest.mark.parametrize(("count", "steps", "rank"), [(4, 500, 16), (60, 1500, 32), (5000, 2000, 32)])
def test_steps_and_rank_follow_the_number_of_items(count: int, steps: int, rank: int) -> None:
    text = files.write_text(choose_settings(answers(), next(attempts(answers())), media(count)), "it")
    config = parse_config(text, FILE)
    assert (config.train.steps, config.train.adapter.rank) == (steps, rank)
    assert (config.datasets[0].eval_fraction > 0) == (count >= 40)


def test_steps_end_where_the_time_does() -> None:
    settings = choose_settings(answers(), next(attempts(answers())), media(), steps_limit=120)
    train = parse_config(files.write_text(settings, "it"), FILE).train
    assert (train.steps, train.checkpoint_every, train.optimizer.warmup) == (120, 50, 12)


def test_caches_are_never_inside_the_media() -> None:
    given = answers(folder=".", around=True)
    config = parse_config(files.write_text(choose_settings(given, next(attempts(given)), None), "it"), FILE)
    assert (config.root, config.output) == ("/photos-work", "/photos-output")


# --- a file that is there ---

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


def test_a_file_keeps_its_comments_and_what_is_its_own() -> None:
    settings = choose_settings(answers(), next(attempts(answers())), media())
    text, by_hand = files.change_text(MINE, settings, 0)
    now, config = parse_yaml(text).value, parse_config(text, FILE)
    assert by_hand == [] and parse_yaml(files.change_text(text, settings, 0)[0]).value == now
    for comment in ("# mine", "# my disk", "# as always", "# the best ones", "# tried", "# enough"):
        assert comment in text
    assert (config.root, config.datasets[0].id, config.datasets[0].repeats) == ("/elsewhere", "best", 3)
    assert config.train.steps == 123 and [it.name for it in config.validation.prompts] == ["mine"]
    assert config.datasets[0].resolution == 1024 and config.train.base_precision == "int8-torchao"
    assert "latents" not in now and not config.train.offload.blocks
    changes = files.compare_texts(MINE, text, "pipeline.yaml").splitlines()
    assert "-    resolution: 768   # tried" in changes and "+    resolution: 1024   # tried" in changes


def test_another_family_takes_its_checkpoint_with_it() -> None:
    mine = MINE.replace("{family: z-image}", "{family: sana, path: ./sana, flavour: sana-600m-512px}")
    text, _ = files.change_text(mine, choose_settings(answers(), next(attempts(answers())), media()), 0)
    assert parse_yaml(text).value["model"] == {"family": "z-image", "flavour": "z-image"}


def test_a_file_of_several_datasets_is_changed_where_the_media_are() -> None:
    two = MINE.replace("latents:", "  - {id: other, instance_data_dir: ./other}\nlatents:")
    assert files.find_dataset(two, FILE, Path("/project/other")) == 1
    with pytest.raises(files.NotChanged, match="several datasets"):
        files.find_dataset(two, FILE, Path("/project/third"))


# --- answers ---


@pytest.mark.parametrize(
    ("text", "gib"), [("16", 16), ("24 GB", 24), ("15.9GiB", 15.9), ("RTX 4090", 24), ("NVIDIA H100 80GB", 80)]
)
def test_a_card_is_its_memory_or_its_name(text: str, gib: float) -> None:
    assert parse_card(text) == gib


@pytest.mark.parametrize("text", ["", "0", "much", "RTX 1234567"])
def test_what_is_no_card_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no memory in GiB"):
        parse_card(text)


def test_other_answers() -> None:
    assert (parse_task("char"), parse_time("90m"), parse_time("none")) == ("character", 5400.0, None)
    assert (make_name("My photos (2)"), make_name("猫")) == ("My-photos-2", "media")
    for parse, text in ((parse_task, "c"), (parse_task, ""), (parse_time, "soon")):
        with pytest.raises(ValueError, match=text or "none of"):
            parse(text)
