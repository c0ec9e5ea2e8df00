"""Projects whose pictures a tiny Qwen2.5-VL describes, and what it wrote."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cache.sets.item_rows import iter_item_rows
from cache.store.store import Store
from schemas.config.pipeline import Config
from stages.encoding.stage_registry import CAPTION
from tests.project import Project

SMALL = {"resolution": 56, "max_tokens": 24}  # four tokens a picture


def with_ends(checkpoint: Path, folder: Path) -> Path:
    """A copy of a checkpoint, by links, whose text encoder ends a caption at every tenth token: random weights hardly
    ever choose the one that a trained model ends with."""
    shutil.copytree(checkpoint, folder, copy_function=os.symlink)
    settings = folder / "text_encoder" / "generation_config.json"
    config = json.loads((checkpoint / "text_encoder" / "config.json").read_text())
    made = json.loads(settings.read_text()) | {"eos_token_id": [*range(9, config["text_config"]["vocab_size"], 10)]}
    settings.unlink()
    settings.write_text(json.dumps(made))
    return folder


def describing(
    project: Callable[..., Project], tiny: Callable[[str], Path], kind: str = "kandinsky5-image-t2i", **caption: Any
) -> Project:
    """A project without media whose `caption` describes what has none, in small pictures."""
    home = project(kind, caption=SMALL | caption)
    model = home.folder / "model"
    home.settings["model"]["path"] = str(with_ends(tiny(kind), model))
    home.settings["stages"] |= {"caption": {"threads": 1, "readers": 1}, "max_reject_fraction": 1.0}
    return home


def written(home: Project, *overrides: str) -> dict[str, list[str]]:
    """path -> captions, of the current set."""
    return captions_by_path(Store(home.root), home.config(*overrides))


def captions_by_path(store: Store, config: Config) -> dict[str, list[str]]:
    plan = CAPTION.find_plan(store, config)
    paths = dict(zip(*(plan.active.column(name).to_pylist() for name in ("sample_id", "path")), strict=True))
    rows = iter_item_rows(store, f"captions/{CAPTION.fingerprint(config)}")
    return {paths[row.id]: row.info["captions"] for _, _, row in rows}


IDEFICS_CHAT = (
    "{% for message in messages %}{{ message.role|capitalize }}:{% for line in message.content %}"
    "{% if line.type == 'text' %}{{ line.text }}{% else %}<image>{% endif %}{% endfor %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


def build_idefics3(folder: Path) -> Path:
    """A tiny random Idefics3 with its processor, as transformers saves one: one token a picture."""
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    from examples.tiny_models import weight_scale
    from examples.tiny_tokenizers import qwen_tokenizer

    qwen_tokenizer().save_pretrained(folder)
    tokenizer = type(qwen_tokenizer()).from_pretrained(folder)
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 28}, max_image_size={"longest_edge": 28}, do_image_splitting=False
    )
    processor = Idefics3Processor(images, tokenizer, image_seq_len=1, chat_template=IDEFICS_CHAT)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    text = {"model_type": "llama", "vocab_size": len(tokenizer), "num_key_value_heads": 1} | ids
    vision = {"image_size": 28, "patch_size": 14}
    config = Idefics3Config(
        image_token_id=processor.image_token_id, vision_config=sizes | vision, text_config=sizes | text
    )
    model = Idefics3ForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if (scale := weight_scale(name, parameter.shape)) is not None:
                parameter.normal_(0.0, scale, generator=generator)
    model.generation_config.eos_token_id = [*range(9, len(tokenizer), 10)]
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
