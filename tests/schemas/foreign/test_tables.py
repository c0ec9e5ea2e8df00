"""The tables of other trainers' keys: what they name is there."""

import re

import pytest

from schemas.config.error_messages import type_at
from schemas.foreign.trainers import TRAINERS

ROWS = [
    (f"{trainer.name}: {section.title}: {key}", section.in_dataset, row)
    for trainer in TRAINERS.values()
    for section in trainer.sections.values()
    for key, row in section.rows.items()
]
SECTIONS = r"train|model|text|latents|validation|video|cache|stages|hub|notify|vision|root|datasets\.N"


def exists(path: str, in_dataset: bool) -> bool:
    steps = tuple(path.removeprefix("datasets.N.").split("."))
    below = in_dataset or path.startswith("datasets.N.")
    return type_at(("datasets", 0, *steps)) is not None if below else type_at(steps) is not None


@pytest.mark.parametrize("trainer", TRAINERS.values(), ids=TRAINERS)
def test_every_key_has_one_answer_and_leads_to_a_key_that_is_there(trainer):
    own = [(name, in_dataset, row) for name, in_dataset, row in ROWS if name.startswith(f"{trainer.name}: ")]
    assert own
    for name, in_dataset, row in own:
        assert sum(map(bool, (row.to, row.drop, row.refuse, row.secret))) == 1, name
        if row.to:
            place = in_dataset and not row.to.startswith("train.")
            assert exists(row.to, place), name


def test_reasons_name_keys_that_exist():
    for name, _, row in ROWS:
        for words in (row.note, row.drop, row.refuse):
            for path in re.findall(rf"(?<![\w./-])(?:{SECTIONS})\.[a-z_]+(?:\.[a-z_]+)*", words):
                if path.startswith(("stages.", "root.")):
                    continue
                found = path.removeprefix("datasets.N.")
                assert exists(path, found.startswith("video.")), (name, path)


def test_trainers_are_told_apart_by_content():
    claimed = {
        "simpletuner": {"--model_family": "sana", "--data_backend_config": "b.json"},
        "musubi-tuner": {"(program)": "src/musubi_tuner/wan_train_network.py", "dataset_config": "d.toml", "dit": "x"},
        "ai-toolkit": {"job": "extension", "config": {"name": "a", "process": [{"type": "sd_trainer"}]}},
    }
    datasets = {
        "simpletuner": [{"id": "a", "type": "local", "instance_data_dir": "p"}],
        "musubi-tuner": {"datasets": [{"image_directory": "p"}]},
    }
    for contents, role in ((claimed, "arguments"), (datasets, "datasets")):
        for name, content in contents.items():
            found = {other: trainer.claims(content) for other, trainer in TRAINERS.items()}
            assert {other: word for other, word in found.items() if word} == {name: role}
