"""pipeline.yaml, the example: valid, with every key and its default; and the JSON schema that editors read."""

import json
import re
from pathlib import Path

from schemas.config.datasets import TagShuffle
from schemas.config.error_messages import is_section, section_fields
from schemas.config.loading import json_schema, load_config
from schemas.config.pipeline import Config

ROOT = Path(__file__).resolve().parents[3]


def test_the_example_is_valid_and_for_people_with_one_card():
    config = load_config(ROOT / "pipeline.yaml")
    assert (config.model.family, config.model.task) == ("kandinsky5-video", "t2v")
    assert config.datasets[0].video.num_frames == 61
    assert config.root == str(ROOT / "work")


def uncommented(text):
    """The example with each key that is commented out put in force."""
    keys = "|".join({key for _, key in every_key(Config)})
    return re.sub(rf"^( *)# (?=(?:{keys}):(?: |$))", r"\1", text, flags=re.MULTILINE)


def every_key(section, above=()):
    for key, kind in section_fields(section).items():
        yield above, key
        inner = kind.__args__[0] if getattr(kind, "__origin__", None) is tuple else kind
        if is_section(inner):
            yield from every_key(inner, (*above, key))


def test_the_example_mentions_every_key_with_its_default(tmp_path):
    text = uncommented((ROOT / "pipeline.yaml").read_text())
    (tmp_path / "pipeline.yaml").write_text(text)
    whole = load_config(tmp_path / "pipeline.yaml")
    example = load_config(ROOT / "pipeline.yaml")
    here = {"instance_data_dir": whole.datasets[0].instance_data_dir}  # it starts at the file, as the others do
    datasets = tuple(dataset.model_copy(update=here) for dataset in example.datasets)
    same = {"root": whole.root, "output": whole.output, "datasets": datasets}
    assert whole == example.model_copy(update=same), "a commented key shows something other than its default"
    written = {"datasets": whole.datasets[0], "prompts": whole.validation.prompts[0]}
    missing = []
    for above, key in every_key(Config):
        section = whole
        for step in above:
            section = written.get(step) or getattr(section, step.replace("-", "_"))
        if section != () and key.replace("-", "_") not in section.model_fields_set:
            missing.append(".".join((*above, key)))
    assert missing == []
    assert re.search(r"groups: \[\] +# \[\{match: .*, lr: .*, weight_decay: .*\}\]", text), "its keys"
    assert re.search(r"tag_shuffle: .*\{variants: 4, delimiter: \",\", keep: 0\}", text), "its keys and defaults"
    assert TagShuffle().model_dump() == {"variants": 4, "delimiter": ",", "keep": 0}


def test_the_example_points_editors_at_the_schema():
    first = (ROOT / "pipeline.yaml").read_text().splitlines()[0]
    assert first == "# yaml-language-server: $schema=schemas/pipeline.schema.json"


def test_the_json_schema_is_up_to_date():
    written = json.loads((ROOT / "schemas" / "pipeline.schema.json").read_text())
    assert written == json_schema(), "run: python -m schemas.config.loading > schemas/pipeline.schema.json"


def test_the_json_schema_knows_families_flavours_and_every_key():
    schema = json_schema()
    model = schema["$defs"]["Model"]
    assert "sana" in model["properties"]["family"]["enum"]
    assert "t2v-lite-sft-5s" in model["allOf"][1]["then"]["properties"]["flavour"]["enum"]
    assert all(not part["additionalProperties"] for part in (schema, *schema["$defs"].values()))
    assert "encode-text" in schema["$defs"]["Stages"]["properties"]
