"""README and docs/: their configurations are valid, their commands parse, their links lead somewhere."""

import importlib
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from ruamel.yaml import YAML

from schemas.config.error_messages import section_fields
from schemas.config.loading import load_config
from schemas.config.pipeline import Config
from stages.cli import PROGRAMS, program_module
from tests.documents import DOCUMENTS, Block, blocks, shell_commands

#: What completes a part of a configuration.
MODEL = {"family": "kandinsky5-video"}
DATASET = {"id": "clips", "dataset_type": "video", "instance_data_dir": "clips"}
#: First keys of a block that is no configuration: prompts of a file, a part of train.optimizer.
OTHER_KEYS = {"harbour", "groups"}


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_a_configuration_is_valid(block: Block, tmp_path: Path) -> None:
    given: Any = YAML(typ="safe", pure=True).load(block.text)
    if isinstance(given, list):  # datasets alone
        given, block = {"datasets": given}, block._replace(text="datasets:\n" + block.text)
    if given.keys() & OTHER_KEYS:
        return
    assert given.keys() <= {*section_fields(Config)}, "name it in OTHER_KEYS, if it is no configuration"
    for name in re.findall(r"prompts_file: (\S+)", block.text):
        (tmp_path / name).write_text("street: Rain on a narrow street.")
    missing = {"root": "/data/work", "model": MODEL, "datasets": [DATASET]}
    missing = {} if "/" in given.get("train", {}).get("set", "") else missing
    overrides = [f"{key}={value}" for key, value in missing.items() if key not in given]
    path = tmp_path / "pipeline.yaml"
    path.write_text(block.text)
    load_config(path, overrides)


def commands(document: Path) -> Iterator[str]:
    """Those of `latentpress`."""
    for command in shell_commands(document):
        if found := re.search(r"(?:^|[\s])latentpress ([\w-].*)$", command):
            yield re.split(r" [|&>]", found[1])[0]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_parse(document: Path) -> None:
    for command in commands(document):
        program, *arguments = shlex.split(command)
        if program in ("--version", "--help") or program.isupper():  # PROGRAM stands for any
            continue
        assert program in PROGRAMS, command
        module = program_module(program)
        app = importlib.import_module(f"{module}.__main__" if module == "trainer" else module).app
        typer.main.get_command(app).make_context(program, arguments)


@cache
def anchors(document: Path) -> frozenset[str]:
    """Of the headings, as GitHub and the site make them; equal headings would be numbered, and are left out."""
    text = re.sub(r"^( *)```.*?^\1```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = [re.sub(r"`|\[(.*?)\]\(.*?\)", r"\1", title) for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    made = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
    return frozenset(anchor for anchor in made if made.count(anchor) == 1)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"^( *)```.*?^\1```$|`[^`\n]*`", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for link in re.findall(r"\]\(([^()\s]+)\)", text):
        name, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = (document.parent / name).resolve() if name else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []
