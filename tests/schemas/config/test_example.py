"""Files generated from the configuration's sections: pipeline.yaml and the JSON schema."""

import re
import shutil
from pathlib import Path

from schemas.config.generated import commented_example, description, json_schema, options, write_all
from schemas.config.loading import is_section, load_config, section_fields
from schemas.config.pipeline import Config

ROOT = Path(__file__).resolve().parents[3]


def test_the_example_is_valid_and_for_people_with_one_card():
    config = load_config(ROOT / "pipeline.yaml")
    assert (config.model.family, config.model.task) == ("kandinsky5-video", "t2v")
    assert config.datasets[0].video.num_frames == 61
    assert config.root == str(ROOT / "work")


def uncommented(text):
    """The example with the commented keys active."""
    keys = "|".join({key for _, key in every_key(Config)})
    return re.sub(rf"^( *)# (?=(?:{keys}):(?: |$))", r"\1", text, flags=re.MULTILINE)


def every_key(section, parent=()):
    for key, kind in section_fields(section).items():
        yield parent, key
        inner = kind.__args__[0] if getattr(kind, "__origin__", None) is tuple else kind
        if is_section(inner):
            yield from every_key(inner, (*parent, key))


def test_the_example_mentions_every_key_with_its_default(tmp_path):
    text = uncommented((ROOT / "pipeline.yaml").read_text())
    (tmp_path / "pipeline.yaml").write_text(text)
    active = load_config(tmp_path / "pipeline.yaml")
    example = load_config(ROOT / "pipeline.yaml")
    location = {"instance_data_dir": active.datasets[0].instance_data_dir}  # relative to the file
    datasets = tuple(dataset.model_copy(update=location) for dataset in example.datasets)
    paths = {"root": active.root, "output": active.output, "datasets": datasets}
    assert active == example.model_copy(update=paths), "a commented key shows something other than its default"
    items = {"datasets": active.datasets[0], "prompts": active.validation.prompts[0]}
    absent = []
    for parent, key in every_key(Config):
        section = active
        for step in parent:
            section = items.get(step) or getattr(section, step.replace("-", "_"))
        fields = type(section).model_fields.items() if section != () else ()
        if fields and {info.alias or name: name for name, info in fields}[key] not in section.model_fields_set:
            absent.append(".".join((*parent, key)))
    assert absent == []


def test_the_example_points_editors_at_the_schema():
    first = (ROOT / "pipeline.yaml").read_text().splitlines()[0]
    assert first == "# yaml-language-server: $schema=schemas/pipeline.schema.json"


def test_the_generated_files_are_up_to_date(tmp_path):
    schemas = ("schemas/pipeline.schema.json", "examples/recipes/pipeline.schema.json")
    for name in (*schemas, "pipeline.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    assert write_all(tmp_path) == [], "run: make generated"


def test_every_option_has_a_description():
    def undescribed(section, prefix=""):
        for key, info, inner in options(section):
            if not inner and not description(info):
                yield prefix + key
            if inner:
                yield from undescribed(inner, f"{prefix}{key}.")

    assert [*undescribed(Config)] == []


def test_the_example_keeps_values_and_remarks_and_gets_missing_options():
    text = (ROOT / "pipeline.yaml").read_text()
    changed = re.sub(r"(?m)^ +# (repeats|clip|order):.*\n", "", text).replace("rank: 32 ", "rank: 8  # my remark ")
    changed = changed.replace("\n    # -- captions\n", "\n    # -- texts of the items\n").replace("# null ", "")
    example = commented_example(changed)
    assert example == text.replace("rank: 32 ", "rank: 8  ").replace("# -- captions", "# -- texts of the items")
    assert load_config(ROOT / "pipeline.yaml").train.adapter.rank == 32


def test_the_json_schema_has_families_flavours_and_every_key():
    schema = json_schema()
    model = schema["$defs"]["Model"]
    assert "sana" in model["properties"]["family"]["enum"]
    assert "t2v-lite-sft-5s" in model["allOf"][1]["then"]["properties"]["flavour"]["enum"]
    assert all(not part["additionalProperties"] for part in (schema, *schema["$defs"].values()))
    assert "encode-text" in schema["$defs"]["Stages"]["properties"]
