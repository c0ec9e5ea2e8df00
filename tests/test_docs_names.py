"""README, CONTRIBUTING and docs/ name only files, names, options and keys that exist."""

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from tests.documents import DOCUMENTS

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("schemas", "cache", "stages", "trainer")
FOLDERS = (*PACKAGES, "tests", "examples", "benchmarks", "docs")
#: Of libraries, of the system, or in an example.
FOREIGN = {"0", "lora_unet_blocks_0_self_attn_q", "fixed_size_binary", "IMG_0012", "IMG", "latent_BCTHW"}
FOREIGN |= {
    "CUDA_VISIBLE_DEVICES",
    "COMPOSE_FILE",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "TMPDIR",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
}  # environment variables
#: Options of torchrun and accelerate launch, as far as the pattern below takes them.
LAUNCHERS = {"machine", "main", "multi", "nnodes", "num", "rdzv-backend", "rdzv-endpoint", "rdzv-id"}
LAUNCHERS |= {"master-addr", "master-port", "node-rank", "shm-size"}
LAUNCHERS |= {"entrypoint", "userns"}  # of docker and podman, as is the one before
#: Files of Python itself that the documents speak of.
OF_PYTHON = {"runpy.py", "pkgutil.py", "sitecustomize.py", "usercustomize.py"}


#: Beside those of the folders.
NAMING = ("Makefile", "pyproject.toml", "pipeline.yaml", "constraints.txt", "compose.yaml", "Dockerfile")


@cache
def sources() -> str:
    """Everything that can define a name: code, templates, settings."""
    suffixes = {".py", ".toml", ".yaml", ".html", ".json"}
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    paths += [ROOT / name for name in NAMING]
    return "\n".join(path.read_text(errors="replace") for path in paths)


@cache
def words() -> frozenset[str]:
    """Those of the sources, and the names of their files."""
    stems = {path.stem for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    return frozenset(re.findall(r"[A-Za-z_]\w*", sources())) | stems


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
    bare = {name for name in named if "/" not in name and name not in OF_PYTHON and "example" not in name}
    there = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    assert bare - there == set()


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
    known = words()
    assert [
        option
        for option in sorted(given - LAUNCHERS)
        if option.replace("-", "_") not in known and f"--{option}" not in sources()
    ] == []


def test_the_diagram_of_imports_is_that_of_the_contracts() -> None:
    """It names every folder, from those that import to those that are imported, as the contracts have them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = {it["containers"][0]: it["layers"] for it in contracts if it["type"] == "layers" and "containers" in it}
    text = (ROOT / "docs/architecture.md").read_text()
    for package in ("stages", "trainer", "cache"):
        (line,) = re.findall(rf"^{package}: (.*)$", text, re.MULTILINE)
        floors = [floor.split(", ") for floor in line.split(" -> ")]
        level = {name: number for number, layer in enumerate(layers[package]) for name in layer.split(" : ")}
        level["programs"] = 0
        assert [level[name] for floor in floors for name in floor] == sorted(
            level[name] for floor in floors for name in floor
        )
        assert all(len({level[name] for name in floor}) == 1 for floor in floors)
        folders = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
        assert folders <= {name for floor in floors for name in floor}
    packages = next(it["layers"] for it in contracts if it["type"] == "layers" and "containers" not in it)
    assert f"packages: {' -> '.join(packages).replace(' | ', ', ')}\n" in text
