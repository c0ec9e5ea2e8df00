"""The page of `latentpress ui` for the configuration: the form, the text, their errors, and the written file."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from schemas.catalog import FAMILIES
from schemas.config.loading import ConfigError, load_config
from schemas.config.yaml_reader import parse_yaml
from stages.configuring.form import BASIC, apply_changes, apply_preset, build_form, compare_preset
from tests.project import Project
from tests.stages.browser import browser, note_errors, until  # noqa: F401 (a fixture)
from tests.stages.ui_server import UiServer

EXAMPLE = Path(__file__).parents[2] / "pipeline.yaml"


@pytest.fixture
def home(project: Callable[..., Project]) -> Project:
    new_project = project(train={"steps": 40})
    new_project.config()
    return new_project


def file_of(server: UiServer) -> Path:
    return server.site.options.config


def stamp_of(server: UiServer) -> str:
    return server.get("/settings").text.partition('name="stamp" value="')[2].partition('"')[0]


def test_the_form_has_a_field_for_every_option_of_the_example() -> None:
    text = EXAMPLE.read_text()
    fields = {each.path: each for each in build_form(text).all_fields()}
    assert fields["train.steps"].value == "2000" and fields["train.optimizer.lr"].value == "0.0001"
    assert fields["model.family"].value == "kandinsky5-video"
    assert fields["train.gradient_checkpointing"].choices == ["true", "false"]
    assert "webdataset" in fields["cache.format"].choices and fields["cache.format"].default == "arrow"
    assert "datasets.0.video.num_frames" in fields and "train.methods.tread.routes" not in fields
    assert all(each.about or each.name for each in fields.values())


@pytest.mark.parametrize("family", [*FAMILIES, "none of them", "[]"])
def test_the_flavours_are_those_of_the_family(family: str) -> None:
    families = [FAMILIES[family]] if family in FAMILIES else list(FAMILIES.values())
    fields = {each.path: each for each in build_form(f"model: {{family: {family}, flavour: old}}").all_fields()}
    flavour = fields["model.flavour"]
    assert flavour.choices == [name for one in families for name in one.flavours] and flavour.value == "old"
    assert flavour.default == (families[0].default_flavour if family in FAMILIES else "")


def test_what_the_form_changes_is_what_the_program_reads() -> None:
    base = EXAMPLE.read_text()
    changes = {
        "train.steps": "77",
        "train.optimizer.lr": "",
        "train.run": "a run: of mine",
        "validation.seed": "[1, 2]",
        "train.gradient_checkpointing": "false",
        "datasets.0.resolution": "512",
    }
    text, problems = apply_changes(base, base, changes)
    assert problems == []
    fields = {each.path: each.value for each in build_form(text).all_fields()}
    assert {path: fields[path] for path in changes} == changes
    before = {each.path: each.value for each in build_form(base).all_fields()}
    assert {path: value for path, value in fields.items() if path not in changes} == {
        path: value for path, value in before.items() if path not in changes
    }
    assert text.count("#") >= base.count("#") - 1, "only the comment of a removed line is removed"


def test_fields_that_were_not_touched_leave_what_was_typed_into_the_text() -> None:
    base = "train:\n  steps: 5\n"
    typed = "train:\n  steps: 6  # typed\n"
    assert apply_changes(typed, base, {"train.steps": "5", "train.seed": "3"}) == (typed + "  seed: 3\n", [])


def test_a_search_and_what_is_set(server: UiServer) -> None:
    def search(query: str) -> list[str]:
        text = server.get(f"/settings?{query}").text
        return re.findall(r'<div class="field"><label for="field:([^"]+)"', text)

    assert "train.optimizer.lr" in search("find=OPTIMIZER+rate") and "train.steps" not in search("find=OPTIMIZER+rate")
    assert "train.steps" in search("only_set=on") and "train.optimizer.lr" not in search("only_set=on")
    assert search("find=train.steps&only_set=on") == ["train.steps"]
    assert search("find=no+such+option") == []
    assert "No option matches" in server.get("/settings?find=no+such+option").text


def test_items_are_added_and_removed(server: UiServer) -> None:
    text = file_of(server).read_text()

    def change(text: str, base: str = "", **fields: str) -> tuple[str, list[str]]:
        answer = server.post("/settings/check", text=text, base=base or text, **fields).json
        return answer["text"], answer["problems"]

    added, problems = change(text, add="datasets", **{"new:datasets": "/data/My <photos>/"})
    assert problems == [] and parse_yaml(added).value["datasets"][1] == {
        "id": "my-photos",
        "instance_data_dir": "/data/My <photos>/",
    }
    twice, _ = change(added, add="datasets", **{"new:datasets": "photos"})
    assert [dataset["id"] for dataset in parse_yaml(twice).value["datasets"]] == ["photos", "my-photos", "photos-2"]
    prompted, _ = change(text, add="validation.prompts", **{"new:validation.prompts": "A fox: in the snow"})
    assert parse_yaml(prompted).value["validation"]["prompts"] == [
        {"name": "a-fox-in-the-snow", "prompt": "A fox: in the snow"}
    ]
    assert parse_yaml(change(twice, remove="datasets.1")[0]).value["datasets"][1]["id"] == "photos-2"
    assert "prompts" not in change(prompted, remove="validation.prompts.0")[0]
    for fields in (
        {"add": "datasets"},
        {"remove": "train"},
        {"remove": "datasets.9"},
        {"remove": "datasets.0", "base": twice},  # the form was made from another text
    ):
        unchanged, problems = change(text, **fields)
        assert unchanged == text and len(problems) == 1, fields


def test_errors_are_those_of_the_command_line(server: UiServer) -> None:
    text = file_of(server).read_text().replace('"steps": 40', '"steps": -4')
    answer = server.post("/settings/check", text=text, base=text).json
    with pytest.raises(ConfigError) as error:
        copy_path = file_of(server).with_name("other.yaml")
        copy_path.write_text(text)
        load_config(copy_path)
    errors = [f"{copy_path}:{line}: {message}" for line, message in answer["errors"]]
    assert errors == error.value.errors and len(errors) == 1
    assert "train.steps" in answer["errors"][0][1]
    broken = server.post("/settings/check", text="a: [", base=text).json
    assert "not valid YAML" in broken["errors"][0][1] and broken["values"] == {}


def test_prompts_are_read_only_where_the_page_reads_anyway(
    home: Project, server: UiServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Errors of a prompts file quote it, so a request with another file gets no error about its content."""
    outside_file = tmp_path_factory.mktemp("outside") / "keys.txt"
    outside_file.write_text("a <s3cret> word\n")
    (home.folder / "link.txt").symlink_to(outside_file)
    (home.folder / "own.txt").write_text("a <lost> word\n")
    (home.folder / "output").mkdir(exist_ok=True)
    (home.folder / "output/own.txt").write_text("a <lost> word\n")
    settings = dict(home.settings)

    def errors_of(name: str) -> str:
        text = json.dumps(settings | {"validation": {"prompts_file": name}})
        return str(server.post("/settings/check", text=text, base=text).json["errors"])

    climbing = os.path.relpath(outside_file, home.folder)
    (home.folder / "circle.txt").symlink_to(home.folder / "circle.txt")
    for name in (str(outside_file), climbing, "link.txt", f"file://{outside_file}", "/dev/stdin", "circle.txt"):
        errors = errors_of(name)
        assert "is outside of root, output" in errors and "s3cret" not in errors, name
    for name in ("own.txt", "output/own.txt"):
        assert "<lost> is not in validation.placeholders" in errors_of(name)
    outside_file.write_text("a sound word\n")
    home.settings["validation"] = {"prompts_file": str(outside_file)}
    home.config()  # written by an editor, not by the page
    assert errors_of(str(outside_file)) == "[]"


def test_saving_writes_the_file_once_it_is_sound(server: UiServer) -> None:
    path, text = file_of(server), file_of(server).read_text()
    path.chmod(0o640)
    stamp = stamp_of(server)
    refused = server.post("/settings/save", text=text.replace("40", "-4"), base=text, stamp=stamp)
    assert refused.status == 409 and path.read_text() == text and "1 error" in refused.json["problems"][0]

    saved = server.post("/settings/save", text=text, base=text, stamp=stamp, **{"field:train.steps": "41"})
    assert saved.status == 200 and load_config(path).train.steps == 41
    assert path.stat().st_mode & 0o777 == 0o640 and "saved to" in saved.json["message"]
    assert server.site.config().train.steps == 41

    late_answer = server.post("/settings/save", text=text, base=text, stamp=stamp)
    assert late_answer.status == 409 and "load this page again" in late_answer.json["problems"][0]
    assert load_config(path).train.steps == 41
    assert not list(path.parent.glob("*.tmp*"))


def test_a_link_stays_a_link_and_a_folder_that_can_not_be_written_is_named(home: Project, server: UiServer) -> None:
    path = file_of(server)
    real = path.with_name("real.yaml")
    path.rename(real)
    path.symlink_to(real)
    text = real.read_text()
    fields = {"text": text, "base": text, "stamp": stamp_of(server), "field:train.steps": "41"}
    assert server.post("/settings/save", **fields).status == 200
    assert path.is_symlink() and load_config(real).train.steps == 41


def test_without_a_script_the_page_keeps_what_was_typed(server: UiServer) -> None:
    text = "train:\n  steps: <b>\n"
    body = "text=" + text.replace("\n", "%0A").replace("<", "%3C").replace(">", "%3E") + "&base="
    answer = server.request("POST", "/settings/save", body, Origin=server.url)
    assert answer.status == 409 and "steps: &lt;b&gt;" in answer.text and "<b>" not in answer.text
    assert "train.steps: expected an integer" in answer.text


@pytest.mark.slow
def test_form_and_text_follow_each_other_in_a_browser(server: UiServer, browser: Any) -> None:  # noqa: F811
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    errors = note_errors(page)
    page.goto(f"{server.url}/settings")
    steps, text = page.locator('[id="field:train.steps"]'), page.locator("#text")
    steps.fill("-4")
    steps.press("Tab")
    until(page, "document.querySelector('#errors a')")
    assert "train.steps" in page.locator("#errors li").inner_text() and '"steps": -4' in text.input_value()
    page.locator("#errors a").click()
    selection = page.evaluate("text.value.slice(text.selectionStart, text.selectionEnd)")
    assert "steps" in selection and page.locator("#numbers mark").inner_text().strip() == page.evaluate(
        "String(text.value.slice(0, text.selectionStart).split('\\n').length)"
    )
    text.fill(text.input_value().replace("-4", "77"))
    until(page, "document.getElementById('field:train.steps').value === '77'")
    until(page, "!document.getElementById('no-errors').hidden")
    page.locator('[id="group:model"] > summary').click()
    family, flavour = (page.locator(f'[id="field:model.{name}"]') for name in ("family", "flavour"))
    family_name, flavour_name = family.input_value(), flavour.input_value()
    other_family = next(name for name in FAMILIES if name != family_name)
    # A flavour that the family does not have stays until another is chosen.
    for name, more_flavours in ((other_family, [flavour_name]), (family_name, [])):
        family.select_option(name)
        listed = ",".join(["", *FAMILIES[name].flavours, *more_flavours])
        until(
            page, f"[...document.getElementById('field:model.flavour').options].map((one) => one.value) == '{listed}'"
        )
        assert flavour.input_value() == flavour_name
    page.locator("input[name=find]").fill("steps warm")
    until(page, "document.getElementById('field:train.steps').closest('.field').hidden")
    page.locator("input[name=find]").fill("")
    page.locator('[id="group:validation"] > summary').click()
    page.locator("[name='new:validation.prompts']").fill("a fox")
    page.locator("[name='new:validation.prompts']").press("Enter")
    until(page, "document.getElementById('group:validation.prompts.0')?.open")
    assert "a fox" in text.input_value() and steps.input_value() == "77"
    page.get_by_role("button", name="Remove prompts: a-fox").click()
    until(page, "document.getElementById('group:validation.prompts.0') === null")
    until(page, "!document.getElementById('no-errors').hidden")
    page.get_by_role("button", name="Save").press("Enter")
    until(page, "document.getElementById('said').textContent.startsWith('saved to')")
    assert load_config(file_of(server)).train.steps == 77 and errors == []


def test_a_preset_shows_its_difference_and_changes_the_text(home: Project, server: UiServer) -> None:
    text = server.get("/settings").text
    assert text.index('id="basic"') < text.index('id="group:train"') and "Learning rate" in text
    assert 'value="Less memory"' in text and "train.offload.blocks" in text
    source = (home.folder / "pipeline.yaml").read_text()
    answer = server.post("/settings/check", text=source, base=source, preset="Less memory").json
    assert answer["values"]["train.offload.blocks"] == "true" and (home.folder / "pipeline.yaml").read_text() == source
    changed = answer["text"]
    assert apply_preset(changed, "Less memory") == changed and not compare_preset(changed, "Less memory")
    assert len(build_form(source).basic) == len(BASIC)
