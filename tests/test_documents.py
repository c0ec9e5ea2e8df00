"""README and docs/: their configurations are valid, their commands parse, their links lead somewhere, the files and
options that they name exist."""

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

from schemas.catalog import FAMILIES
from schemas.config.loading import load_config, section_fields
from schemas.config.pipeline import Config
from stages.cli import PROGRAMS, program_module
from tests.documents import DOCUMENTS, ROOT, Block, blocks, shell_commands

FOLDERS = ("schemas", "cache", "stages", "trainer", "tests", "examples", "benchmarks", "docs")
SETTINGS = ("Makefile", "pyproject.toml", "pipeline.yaml", "constraints.txt", "compose.yaml", "Dockerfile")
#: Names of libraries, of the system, or in an example.
FOREIGN = {"0", "is_", "has_", "lora_unet_blocks_0_self_attn_q", "fixed_size_binary", "IMG_0012", "IMG", "latent_BCTHW"}
FOREIGN |= {"CUDA_VISIBLE_DEVICES", "COMPOSE_FILE", "GLOO_SOCKET_IFNAME", "NCCL_SHM_DISABLE", "NCCL_SOCKET_IFNAME"}
FOREIGN |= {"TMPDIR", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"}
#: Options of torchrun and accelerate launch, as far as the pattern below takes them.
LAUNCHERS = {"machine", "main", "multi", "nnodes", "num", "rdzv-backend", "rdzv-endpoint", "rdzv-id"}
LAUNCHERS |= {"master-addr", "master-port", "node-rank", "shm-size"}
LAUNCHERS |= {"entrypoint", "userns"}  # of docker and podman, as is the one before
#: What completes a part of a configuration.
MODEL = {"family": "kandinsky5-video"}
DATASET = {"id": "clips", "dataset_type": "video", "instance_data_dir": "clips"}
#: First keys of a block that is no configuration: prompts of a file, a part of train.optimizer.
OTHER_KEYS = {"harbor", "groups"}


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


def quoted(document: Path) -> list[str]:
    """What stands in backticks, in a line or in a block."""
    text = document.read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [*blocks, *re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_exist(document: Path) -> None:
    named = {name for text in quoted(document) for name in re.findall(r"[\w./-]+\.py\b|[\w./-]+/(?=\s|$)", text)}
    ours = {name for name in named if name.split("/")[0] in FOLDERS and "example" not in name}
    assert [name for name in sorted(ours) if not (ROOT / name).exists()] == []


@cache
def sources() -> str:
    """Everything that can define a name or an option: code, templates, settings."""
    kinds = (".py", ".toml", ".yaml", ".html", ".json")
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in kinds]
    paths += [ROOT / name for name in SETTINGS]
    return "\n".join([*(path.read_text(errors="replace") for path in paths), *(path.stem for path in paths)])


@cache
def words() -> frozenset[str]:
    return frozenset(re.findall(r"[A-Za-z_]\w*", sources()))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_names_exist(document: Path) -> None:
    """Identifiers that no prose has: with an underscore, a capital inside, or arguments."""
    found = set()
    for text in quoted(document):
        name = re.fullmatch(r"([A-Za-z_][\w.]*)(\(.*\))?", text)
        if name and (re.search(r"_|[a-z][A-Z]|[A-Z]{3}", name[1]) or name[2]):
            found |= {part for part in name[1].split(".") if "example" not in part and "Example" not in part}
    assert sorted(found - words() - FOREIGN) == []


@pytest.mark.parametrize("document", [it for it in DOCUMENTS if it.name != "programs.md"], ids=lambda path: path.name)
def test_options_exist(document: Path) -> None:
    given = {option for text in quoted(document) for option in re.findall(r"(?<![\w-])--([a-z][a-z-]+)", text)}
    assert [it for it in given - LAUNCHERS if it.replace("-", "_") not in words() and f"--{it}" not in sources()] == []


def test_the_published_sizes_are_those_of_the_catalog() -> None:
    page = (ROOT / "docs" / "datasets.md").read_text()
    paragraph = page[page.index("**buckets: family**") :].split("\n\n", 1)[0]
    named = {tuple(map(int, size)) for size in re.findall(r"(\d+)x(\d+)", paragraph)}
    published = {size for family in FAMILIES.values() for flavour in family.flavours.values() for size in flavour.sizes}
    assert named == published
