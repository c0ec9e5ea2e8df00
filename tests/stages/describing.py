"""Projects whose pictures a tiny Qwen2.5-VL describes, and the resulting captions."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from cache.sets.item_rows import iter_item_rows
from cache.store.store import Store
from schemas.config.pipeline import Config
from stages.encoding.captions.describer import QWEN_CHAT
from stages.encoding.stage_registry import CAPTION
from tests.project import Project
from tests.qwen_processor import Processor

SMALL = {"resolution": 56, "max_tokens": 24}  # four tokens a picture


def with_ends(checkpoint: Path, folder: Path) -> Path:
    """A copy of a checkpoint, by links, whose text encoder ends a caption at every tenth token: random weights
    hardly ever generate the end token of a trained model."""
    shutil.copytree(checkpoint, folder, copy_function=os.symlink)
    settings = folder / "text_encoder" / "generation_config.json"
    config = json.loads((checkpoint / "text_encoder" / "config.json").read_text())
    generation_config = json.loads(settings.read_text()) | {
        "eos_token_id": [*range(9, config["text_config"]["vocab_size"], 10)]
    }
    settings.unlink()
    settings.write_text(json.dumps(generation_config))
    return folder


def describing(
    project: Callable[..., Project], tiny: Callable[[str], Path], kind: str = "kandinsky5-image-t2i", **caption: Any
) -> Project:
    """A project without media whose `caption` describes small pictures without a caption. All of a process have one
    checkpoint, whose files are hashed once."""
    home = project(kind, caption=SMALL | caption)
    model = home.folder.parents[1] / f"describing-{kind}"
    home.settings["model"]["path"] = str(model if model.exists() else with_ends(tiny(kind), model))
    home.settings["stages"] |= {"caption": {"threads": 1, "readers": 1}, "max_reject_fraction": 1.0}
    return home


def written(home: Project, *overrides: str) -> dict[str, list[str]]:
    """Path -> captions in the current set."""
    return captions_by_path(Store(home.root), home.config(*overrides))


def captions_by_path(store: Store, config: Config) -> dict[str, list[str]]:
    plan = CAPTION.find_plan(store, config)
    paths = dict(zip(*(plan.active.column(name).to_pylist() for name in ("sample_id", "path")), strict=True))
    rows = iter_item_rows(store, f"captions/{CAPTION.fingerprint(config)}")
    return {paths[row.id]: row.info["captions"] for _, _, row in rows}


def generated(home: Project, model: Any, question: str, picture: Image.Image) -> tuple[str, bool]:
    """The caption of one picture by transformers' own `generate`, and whether it is complete. model: a Qwen2.5-VL."""
    processor = Processor(Path(home.settings["model"]["path"], "tokenizer"))
    text = QWEN_CHAT.replace("{}", f"<|vision_start|><|image_pad|><|vision_end|>{question}")
    inputs = processor(text=[text], images=[picture], return_tensors="pt", return_mm_token_type_ids=True)
    most, begin = home.settings["caption"]["max_tokens"], inputs["input_ids"].shape[1]
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=most, do_sample=False)[0, begin:].tolist()
    ends = model.generation_config.eos_token_id
    end = next((place for place, token in enumerate(ids) if token in ends), None)
    return " ".join(processor.tokenizer.decode(ids[:end], skip_special_tokens=True).split()), end is not None
