"""Projects of which a tiny random segmentation model makes masks, and the masks that it made."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageSequence

from cache.sets.item_rows import PNG, iter_item_rows
from cache.store.store import Store
from stages.encoding.stage_registry import MASKS
from stages.media.sample_reader import parse_crop
from tests.project import Project

LABELS = {0: "wall", 1: "person", 2: "sky", 3: "cat"}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SIDE = 64  # pixels: what the tiny models see


def _segformer() -> tuple[Any, list[Any]]:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation
    from transformers.models.segformer.image_processing_pil_segformer import SegformerImageProcessorPil

    config = SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32], patch_sizes=[7, 3],
        strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, id2label=LABELS,
    )  # fmt: skip
    return SegformerForSemanticSegmentation(config), [SegformerImageProcessorPil(size={"height": SIDE, "width": SIDE})]


def _swin() -> Any:
    from transformers import SwinConfig

    stages = ["stage1", "stage2", "stage3", "stage4"]
    return SwinConfig(
        image_size=SIDE, embed_dim=16, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=4, out_features=stages
    )


def _maskformer() -> tuple[Any, list[Any]]:
    from transformers import DetrConfig, MaskFormerConfig, MaskFormerForInstanceSegmentation
    from transformers.models.maskformer.image_processing_pil_maskformer import MaskFormerImageProcessorPil

    decoder = DetrConfig(
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=64, decoder_ffn_dim=64,
        encoder_attention_heads=2, decoder_attention_heads=2, num_queries=12,
    )  # fmt: skip
    config = MaskFormerConfig(
        backbone_config=_swin(), decoder_config=decoder, fpn_feature_size=32, mask_feature_size=32, id2label=LABELS
    )
    processor = MaskFormerImageProcessorPil(size={"height": SIDE, "width": SIDE})
    return MaskFormerForInstanceSegmentation(config), [processor]


def _mask2former() -> tuple[Any, list[Any]]:
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation
    from transformers.models.mask2former.image_processing_pil_mask2former import Mask2FormerImageProcessorPil

    config = Mask2FormerConfig(
        backbone_config=_swin(), feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=64,
        dim_feedforward=64, encoder_layers=1, decoder_layers=2, num_attention_heads=2, num_queries=12,
        common_stride=4, id2label=LABELS,
    )  # fmt: skip
    return Mask2FormerForUniversalSegmentation(config), [
        Mask2FormerImageProcessorPil(size={"height": SIDE, "width": SIDE})
    ]


def _clipseg() -> tuple[Any, list[Any]]:
    from transformers import CLIPSegConfig, CLIPSegForImageSegmentation
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    from stages.rehearsing.tiny_tokenizers import clip_tokenizer

    tokenizer = clip_tokenizer()
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    text = VISION | {"vocab_size": len(tokenizer), "projection_dim": 16} | ids
    config = CLIPSegConfig(
        text_config=text, vision_config=VISION | {"image_size": SIDE, "patch_size": 16}, projection_dim=16,
        extract_layers=[0, 1], reduce_dim=16, decoder_num_attention_heads=2, decoder_intermediate_size=32,
    )  # fmt: skip
    return CLIPSegForImageSegmentation(config), [ViTImageProcessorPil(size={"height": SIDE, "width": SIDE}), tokenizer]


def _sam() -> tuple[Any, list[Any]]:
    from transformers import SamConfig, SamModel
    from transformers.models.sam.image_processing_pil_sam import SamImageProcessorPil

    vision = {
        "hidden_size": 32, "output_channels": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": SIDE,
        "patch_size": 8, "mlp_dim": 64, "window_size": 4, "global_attn_indexes": [1], "num_pos_feats": 16,
    }  # fmt: skip
    prompt = {"hidden_size": 32, "image_size": SIDE, "patch_size": 8, "mask_input_channels": 4}
    decoder = {
        "hidden_size": 32,
        "mlp_dim": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "iou_head_hidden_dim": 32,
    }
    config = SamConfig(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder)
    pad = {"height": SIDE, "width": SIDE}
    return SamModel(config), [SamImageProcessorPil(size={"longest_edge": SIDE}, pad_size=pad)]


MODELS = {
    **{"segformer": _segformer, "mask2former": _mask2former, "maskformer": _maskformer},
    **{"clipseg": _clipseg, "sam": _sam},
}


def build_segmenter(kind: str, folder: Path, seed: int = 0) -> Path:
    """A tiny random checkpoint with its processors, as transformers saves one: its masks are neither empty nor full."""
    import torch

    from stages.rehearsing.tiny_models import weight_scale

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, processors = MODELS[kind]()
        with torch.no_grad():
            for name, parameter in sorted(model.named_parameters()):
                if (scale := weight_scale(name, parameter.shape)) is not None:
                    parameter.normal_(0.0, scale)
    model.save_pretrained(folder)
    for processor in processors:
        processor.save_pretrained(folder)
    return folder


def masking(project: Callable[..., Project], kind: str = "kandinsky5-image-t2i", **masks: Any) -> Project:
    """A project without media of which a model, without another a SegFormer, makes masks in small pictures."""
    home = project(kind, masks={"model": "model", "resolution": 64} | masks)
    if "model" not in masks:
        build_segmenter("segformer", home.folder / "model")
    home.settings["stages"] |= {"masks": {"threads": 1, "readers": 1}, "max_reject_fraction": 1.0}
    return home


def made(home: Project, *overrides: str) -> dict[str, np.ndarray]:
    """path -> uint8 (T, H, W), of the current masks."""
    config, store = home.config(*overrides), Store(home.root)
    plan = MASKS.find_plan(store, config)
    paths = dict(zip(*(plan.active.column(name).to_pylist() for name in ("sample_id", "path")), strict=True))
    masks = {}
    for _, _, row in iter_item_rows(store, f"masks/{MASKS.fingerprint(config)}"):
        if row.id in paths:
            with Image.open(io.BytesIO(bytes(row.tensors[PNG].raw()))) as picture:
                frames = [np.asarray(frame.convert("L")) for frame in ImageSequence.Iterator(picture)]
            masks[paths[row.id]] = np.stack(frames)
    return masks


def on_latent_grid(mask_THW: np.ndarray, geometry: dict[str, Any]) -> np.ndarray:
    """(T, h, w) masks of whole frames, cropped as their sample is, as means over 8 x 8 pixels, of 0 to 1."""
    crop, size = parse_crop(geometry)
    cells = []
    for mask in mask_THW:
        whole = Image.fromarray(mask).resize((crop.resize_width, crop.resize_height), Image.Resampling.BILINEAR)
        cut = np.asarray(whole)[crop.y : crop.y + size.height, crop.x : crop.x + size.width]
        cells.append(cut.reshape(size.height // 8, 8, size.width // 8, 8).mean((1, 3)) / 255)
    return np.stack(cells)
