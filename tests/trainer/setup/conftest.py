"""Checkpoints that can be quantized."""

import shutil
from pathlib import Path

import pytest

from stages.rehearsing.tiny_models import make_model

# Sides in multiples of 64, which nf4-bnb needs.
WIDE = {
    "kandinsky5-image-t2i": ("image", {"model_dim": 128, "visual_cond": False}),
    "sana": ("sana", {"num_attention_heads": 4, "num_cross_attention_heads": 4, "cross_attention_dim": 128}),
    "qwen-image": ("qwen_image", {"attention_head_dim": 64, "axes_dims_rope": (16, 24, 24)}),
    "qwen-image-edit": ("qwen_image", {"attention_head_dim": 64, "axes_dims_rope": (16, 24, 24)}),
    "qwen-image-edit-plus": (
        "qwen_image",
        {"attention_head_dim": 64, "axes_dims_rope": (16, 24, 24), "zero_cond_t": True},
    ),
    "wan2.1-t2v": ("wan", {}),
    "flux2-klein": ("flux2", {"attention_head_dim": 64, "axes_dims_rope": (16, 16, 16, 16)}),
    "flux3": ("flux3", {"attention_head_dim": 64, "axes_dims_rope": (16, 16, 16, 16)}),
    "krea2": (
        "krea2",
        {"attention_head_dim": 64, "axes_dims_rope": (16, 24, 24), "num_attention_heads": 2, "num_key_value_heads": 1},
    ),
    "qwen-image-2.1": ("qwen_image_21", {"attention_head_dim": 64, "axes_dims_rope": (16, 24, 24)}),
    "z-image": ("z_image", {"dim": 192, "axes_dims": (32, 32, 32)}),
}


@pytest.fixture(scope="session")
def wide(tmp_path_factory, tiny):
    """kind -> a checkpoint's folder with a tiny transformer that nf4-bnb can quantize."""
    folders: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in folders:
            part, overrides = WIDE[kind]
            folders[kind] = tmp_path_factory.mktemp("wide")
            make_model(part, overrides=overrides).save_pretrained(folders[kind] / "transformer")
            if (scheduler := tiny(kind) / "scheduler").exists():  # a modular pipeline makes its own
                shutil.copytree(scheduler, folders[kind] / "scheduler")
        return folders[kind]

    return get
