"""Prompt files of kohya's projects: a prompt a line, with options behind it."""

import json
import re
from typing import Any

from schemas.foreign.draft import Draft, Files, is_off
from schemas.foreign.values import number, run_name, whole

_OPTION = re.compile(r"\s--([a-z]+)\s+(.*?)(?=\s--[a-z]+\s|$)")
#: Options of a line -> what they are here; g is the guidance that is embedded in other models.
_KNOWN = {"w": "width", "h": "height", "f": "frame_count", "d": "seed", "s": "sample_steps", "l": "cfg_scale",
          "n": "negative_prompt", "i": "image_path", "ci": "control_image_path"}  # fmt: skip
_SECTIONS = ("prompt", "prompts")


def carry_prompts(draft: Draft, files: Files, name: Any) -> None:
    """Put the prompts of the file `name` into the draft."""
    if is_off(name):
        return
    content = files.read(str(name))
    if content is None:
        draft.say("sample_prompts (its file)", "refused", f"{name} is not found; write validation.prompts")
        return
    found = [_prompt(item, number_) for number_, item in enumerate(_items(content), 1)]
    if found:
        draft.put(("validation", "prompts"), found)
        draft.say("sample_prompts (its file)", "carried over", "a prompt a line", ("validation", "prompts"))


def _items(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        lines = [line.strip() for line in content.splitlines()]
        return [_line(line) for line in lines if line and not line.startswith("#")]
    if isinstance(content, list):
        return [item if isinstance(item, dict) else _line(str(item)) for item in content]
    common = {key: value for key, value in content.get("prompt", {}).items() if key != "subset"}
    return [{**common, **item} for item in content.get("prompt", {}).get("subset", [])]


def _line(line: str) -> dict[str, Any]:
    text = f" {line}"
    options = {_KNOWN[key]: value.strip() for key, value in _OPTION.findall(text) if key in _KNOWN}
    return {"prompt": _OPTION.split(text)[0].strip(), **options}


def _prompt(item: dict[str, Any], index: int) -> dict[str, Any]:
    words = str(item.get("prompt", ""))
    short = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")[:40].rstrip("-")
    found: dict[str, Any] = {"name": run_name(f"{index:02}-{short}"), "prompt": words}
    for key, ours in (("negative_prompt", "negative_prompt"), ("image_path", "image"), ("control_image_path", "image")):
        if item.get(key):
            found[ours] = json.loads(json.dumps(item[key]))
    if item.get("width") and item.get("height"):
        frames = f"@{whole(item['frame_count'])}" if whole(item.get("frame_count") or 1) > 1 else ""
        found["size"] = f"{whole(item['width'])}x{whole(item['height'])}{frames}"
    for key, ours in (("sample_steps", "steps"), ("seed", "seed")):
        if item.get(key):
            found[ours] = whole(item[key])
    if item.get("cfg_scale"):
        found["guidance"] = number(item["cfg_scale"])
    return found
