"""The files that installing and building start from agree with each other."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import check_jsonschema
import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ruamel.yaml import YAML

import latentpress

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def pins() -> dict[str, str]:
    lines = [line.partition(";")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()]
    return dict(line.strip().split("==") for line in lines if not line.startswith("#"))


@pytest.mark.parametrize("extra", [None, *EXTRAS])
def test_every_requirement_has_a_pin_that_it_allows(extra: str | None) -> None:
    """What `make constraints` sees to."""
    for line in PROJECT["dependencies"] if extra is None else EXTRAS[extra]:
        requirement = Requirement(line)
        assert pins()[canonicalize_name(requirement.name)] in requirement.specifier


def test_torch_is_the_same_everywhere() -> None:
    expected = f"torch=={pins()['torch']}"
    for name in ("Makefile", "Dockerfile", "compose.cpu.yaml"):
        assert set(re.findall(r"torch==[\d.]*\d", (ROOT / name).read_text())) == {expected}, name


def test_the_image_has_every_extra_that_a_user_needs() -> None:
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)", DOCKERFILE, re.MULTILINE)
    assert set(extras.split(",")) == set(EXTRAS) - {"demo", "dev"}


def test_what_the_dockerfile_copies_reaches_the_build() -> None:
    """.dockerignore leaves out all that it does not name."""
    copied = {name for line in re.findall(r"^COPY (.*)", DOCKERFILE, re.MULTILINE) for name in line.split()[:-1]}
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert let_through == copied and all((ROOT / name).exists() for name in copied)


def read_compose(name: str) -> dict[str, Any]:
    """`!reset`, which takes away what another file has, is None."""
    yaml = YAML(typ="safe", pure=True)
    yaml.constructor.add_constructor("!reset", lambda *_: None)
    return yaml.load(ROOT / name)


def compose(name: str) -> dict[str, Any]:
    """The services of compose.yaml, or of it with compose.cpu.yaml over it, with defaults in the place of variables."""
    services = read_compose("compose.yaml")["services"]
    if name == "cpu":
        for service, over in read_compose("compose.cpu.yaml")["services"].items():
            args = services[service]["build"]["args"] | over["build"]["args"]
            services[service] |= over | {"build": services[service]["build"] | {"args": args}}
            services[service] = {key: value for key, value in services[service].items() if value is not None}
    return services


@pytest.mark.parametrize("name", ["cuda", "cpu"])
def test_compose_is_valid_and_gives_the_dockerfile_its_own_arguments(name: str, tmp_path: Path) -> None:
    services = compose(name)
    file = tmp_path / "compose.json"
    file.write_text(json.dumps({"services": services}))
    done = CliRunner().invoke(check_jsonschema.main, ["--builtin-schema", "vendor.compose-spec", str(file)])
    assert done.exit_code == 0, done.output
    arguments = set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    for service in services.values():
        assert set(service["build"]["args"]) == arguments
        assert ("deploy" in service) == (name == "cuda")
        assert service["image"].endswith(f"-{name}}}")
        (home,) = re.findall(r"^ENV .*\bHOME=(\S+)", DOCKERFILE, re.MULTILINE)
        assert service["volumes"][2]["target"] == f"{home}/.cache/huggingface"
        assert "WORKDIR " + service["volumes"][0]["target"] in DOCKERFILE


def test_on_windows_the_command_says_what_to_use(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(SystemExit) as ended:
        latentpress.main()
    assert ended.value.code == 2 and "WSL 2" in capsys.readouterr().err
