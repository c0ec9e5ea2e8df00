"""The tables of other trainers' keys: the options that they name exist, and no key has two answers."""

from typing import Any

import pytest

from schemas.config.loading import type_at
from stages.importing.trainers import TRAINERS


@pytest.mark.parametrize("trainer", TRAINERS.values(), ids=TRAINERS)
def test_every_row_names_an_option_and_every_key_has_one_answer(trainer: Any) -> None:
    for section, table in trainer.tables.items():
        assert not table.rows.keys() & {*table.idle.split()}, section
        assert table.defaults.keys() <= table.rows.keys()
        for option in (*(option for option, _ in table.rows.values()), *table.fixed):
            steps = tuple(option.split("."))
            section_steps = ("datasets", 0) if section in ("datasets", "video") and steps[0] != "train" else ()
            assert type_at((*section_steps, *steps)) is not None, (section, option)


def test_trainers_are_told_apart_by_content() -> None:
    claimed: dict[str, Any] = {
        "simpletuner": {"--model_family": "sana", "--data_backend_config": "b.json"},
        "musubi-tuner": {"(program)": "src/musubi_tuner/wan_train_network.py", "dataset_config": "d.toml", "dit": "x"},
        "ai-toolkit": {"job": "extension", "config": {"name": "a", "process": [{"type": "sd_trainer"}]}},
    }
    datasets: dict[str, Any] = {
        "simpletuner": [{"id": "a", "type": "local", "instance_data_dir": "p"}],
        "musubi-tuner": {"datasets": [{"image_directory": "p"}]},
    }
    for contents, role in ((claimed, "arguments"), (datasets, "datasets")):
        for name, content in contents.items():
            roles = {key: trainer.find_role(content) for key, trainer in TRAINERS.items()}
            assert {key: role_name for key, role_name in roles.items() if role_name} == {name: role}
