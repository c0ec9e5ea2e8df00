"""The table of the conformance suite: one row per flavour that the tests use. Importing it loads no model library.

A row names the flavour, its tiny checkpoint, and the few facts of the diffusers pipeline that the pipeline's signature
does not give. `test_flavours.py` says what is checked of each row.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from schemas.catalog import FAMILIES, get_flavour
from schemas.family import Family, Task

Patch = Any  # pytest.MonkeyPatch

# --- texts: (pipeline, caption, images, negative) -> what the pipeline hands to its transformer for one prompt ---


def kandinsky_text(pipe: Any, caption: str, images: Sequence[Any], negative: bool) -> tuple[Any, Any]:
    options = {"image": [images[0]]} if images else {}
    embeds, pooled, lengths = pipe.encode_prompt(caption, device="cpu", **options)
    return embeds[0, : lengths[-1]], pooled[0]


def sana_text(pipe: Any, caption: str, images: Sequence[Any], negative: bool) -> tuple[Any, None]:
    """The instruction is the default of the pipeline's call; it is not a part of negative prompts."""
    import inspect

    instruction = inspect.signature(type(pipe).__call__).parameters["complex_human_instruction"].default
    prompts = {"prompt": "", "negative_prompt": caption} if negative else {"prompt": caption}
    result = pipe.encode_prompt(**prompts, device="cpu", complex_human_instruction=instruction)
    embeds_BLD, mask_BL = result[2:] if negative else result[:2]
    return embeds_BLD[mask_BL.bool()], None


def wan_text(pipe: Any, caption: str, images: Sequence[Any], negative: bool) -> tuple[Any, None]:
    prompts = ("", caption) if negative else (caption, "")
    embeds_LD = pipe.encode_prompt(*prompts, device="cpu", max_sequence_length=512)[negative][0]
    return embeds_LD[(embeds_LD != 0).any(1)], None


def qwen_text(pipe: Any, caption: str, images: Sequence[Any], negative: bool) -> tuple[Any, None]:
    embeds_BLD, mask = pipe.encode_prompt(caption, device="cpu", max_sequence_length=1024)
    assert mask is None, "one prompt has no padding"
    return embeds_BLD[0], None


def qwen_edit_text(pipe: Any, caption: str, images: Sequence[Any], negative: bool) -> tuple[Any, None]:
    """Images are resized as by the pipeline's call."""
    module = importlib.import_module(type(pipe).__module__)
    area, resized = getattr(module, "CONDITION_IMAGE_SIZE", 1024 * 1024), []
    for image in images:
        width, height = module.calculate_dimensions(area, image.width / image.height)[:2]
        resized.append(pipe.image_processor.resize(image, height, width))
    several = "CONDITION_IMAGE_SIZE" in vars(module)
    embeds_BLD, mask = pipe.encode_prompt(caption, image=resized if several else resized[0], device="cpu")
    assert mask is None, "one prompt has no padding"
    return embeds_BLD[0], None


def qwen_21_text(pipe: Any, caption: str, images: Sequence[Any], negative: bool) -> tuple[Any, None]:
    """Its states of text tokens. Images are resized as by the pipeline's call. The pipeline does not cut a caption."""
    module, resized = importlib.import_module(type(pipe).__module__), None
    if images:
        sizes = [module.calculate_dimensions(1024 * 1024, image.width / image.height)[:2] for image in images]
        pairs = zip(images, sizes, strict=True)
        resized = [pipe.image_processor.resize(image.convert("RGBA"), height=h, width=w) for image, (w, h) in pairs]
    ids = pipe.processor.tokenizer(caption)["input_ids"]
    room = QWEN_21_LONGEST - len(pipe.processor.tokenizer(pipe.prompt_template_t2i.format(""))["input_ids"]) + 14
    caption = pipe.processor.tokenizer.decode(ids[:room]) if len(ids) > room else caption
    embeds_BLD, mask, is_image_BL = pipe.encode_prompt(caption, image=resized, device="cpu")
    assert mask is None, "one prompt has no padding"
    return embeds_BLD[~is_image_BL], None


def z_image_text(pipe: Any, caption: str, images: Sequence[Any], negative: bool) -> tuple[Any, None]:
    return pipe.encode_prompt(caption, device="cpu", do_classifier_free_guidance=False)[0][0], None


def klein_text(pipe: Any, caption: str, images: Sequence[Any], negative: bool) -> tuple[Any, None]:
    return pipe.encode_prompt(caption, device="cpu")[0][0], None


def krea2_text(pipe: Any, caption: str, images: Sequence[Any], negative: bool) -> tuple[Any, None]:
    """Its layers on an axis of their own, and padding before the template's end."""
    embeds_BLKD, mask_BL = pipe.encode_prompt(caption, device="cpu")
    return embeds_BLKD[mask_BL].flatten(1), None


def flux3_text(pipe: Any, caption: str, images: Sequence[Any], negative: bool) -> tuple[Any, None]:
    """The text's tokens, and the first padding token: all padding tokens are equal."""
    import torch

    embeds_WD = pipe.encode_prompt(caption, "", FLUX3_LONGEST)[0][0]
    messages = [{"role": "user", "content": caption}]
    text = pipe.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    length = min(len(pipe.tokenizer.tokenizer(text)["input_ids"]), FLUX3_LONGEST)
    assert len(embeds_WD) == -(-length // 80) * 80
    torch.testing.assert_close(embeds_WD[length:], embeds_WD[length : length + 1].expand(len(embeds_WD) - length, -1))
    return embeds_WD[: length + 1], None


# --- latents: (autoencoder, z) -> the model's latents. z: (B, C, T, h, w), a draw of the autoencoder's posterior ---


def scaled(vae: Any, z_BCTHW: Any) -> Any:
    return z_BCTHW * vae.config.scaling_factor


def shifted(vae: Any, z_BCTHW: Any) -> Any:
    return (z_BCTHW - vae.config.shift_factor) * vae.config.scaling_factor


def by_channel(vae: Any, z_BCTHW: Any) -> Any:
    means, deviations = (
        z_BCTHW.new_tensor(vae.config[key]).view(1, -1, 1, 1, 1) for key in ("latents_mean", "latents_std")
    )
    return (z_BCTHW - means) / deviations


def in_squares(vae: Any, z_BCTHW: Any) -> Any:
    """FLUX.2: squares of 2x2 latents are one latent of four times the channels, normalized by buffers."""
    from diffusers import Flux2KleinPipeline

    z_BCHW = Flux2KleinPipeline._patchify_latents(z_BCTHW[:, :, 0])
    means = vae.bn.running_mean.view(1, -1, 1, 1)
    deviations = (vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps).sqrt()
    return ((z_BCHW - means) / deviations)[:, :, None]


# --- layouts: latents (B, C, T, h, w) -> as the pipeline holds them while it denoises ---


def as_they_are(x_BCTHW: Any) -> Any:
    return x_BCTHW


def without_frames(x_BCTHW: Any) -> Any:
    return x_BCTHW[:, :, 0]


def channels_last(x_BCTHW: Any) -> Any:
    return x_BCTHW.movedim(1, -1)


def tokens(x_BCTHW: Any) -> Any:
    return x_BCTHW.flatten(2).transpose(1, 2)


def tokens_of_squares(x_BCTHW: Any) -> Any:
    squares = x_BCTHW[:, :, 0].unflatten(3, (-1, 2)).unflatten(2, (-1, 2))  # B C h 2 w 2
    return squares.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


# --- patches for the tests of a row ---


def float32_rotary(patch: Patch, family: Family) -> None:
    """Kandinsky's rotary embeddings are rounded to bfloat16, there and here, which turns differences of 1e-7 into
    1e-4."""
    import torch
    from diffusers.models.transformers import transformer_kandinsky

    from trainer.families.kandinsky5 import MaskedAttnProcessor

    class WithoutBfloat16:
        bfloat16 = torch.float32

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    patch.setattr(transformer_kandinsky, "torch", WithoutBfloat16())
    unchanged = property(lambda _: torch.float32, lambda *_: None)
    patch.setattr(MaskedAttnProcessor, "rotary_dtype", unchanged, raising=False)


def small_references(patch: Patch, family: Family) -> None:
    """Pictures of smaller areas, here and in the pipelines, which have constants for them."""
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus

    condition, template = family.conditions["i2i"], family.templates["i2i"]
    assert condition.size is not None and template.image_size is not None
    sizes = [replace(size, area=edge**2) for size, edge in ((condition.size, 128), (template.image_size, 96))]
    if condition.most == 1:  # the prompt has the reference itself
        sizes[1] = sizes[0]
    conditions = {"i2i": replace(condition, size=sizes[0])}
    templates = {"i2i": replace(template, image_size=sizes[1])}
    patch.setitem(FAMILIES, family.name, replace(family, conditions=conditions, templates=templates))
    for name, size, before in zip(("VAE", "CONDITION"), sizes, (condition.size, template.image_size), strict=True):
        if condition.most > 1:
            assert before.area == getattr(pipeline_qwenimage_edit_plus, f"{name}_IMAGE_SIZE")
            patch.setattr(pipeline_qwenimage_edit_plus, f"{name}_IMAGE_SIZE", size.area)
    whole, expected = pipeline_qwenimage_edit.calculate_dimensions, condition.size.area

    def smaller(area: int, ratio: float) -> tuple:
        assert area == expected
        return whole(sizes[0].area, ratio)

    patch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", smaller)


def small_references_21(patch: Patch, family: Family) -> None:
    """Likewise of Qwen-Image-2.1."""
    from diffusers.pipelines.qwenimage21 import pipeline_qwenimage21

    condition, template = family.conditions["i2i"], family.templates["i2i"]
    assert condition.size is not None and condition.size == template.image_size
    size = replace(condition.size, area=128**2)
    conditions = {"i2i": replace(condition, size=size)}
    templates = {**family.templates, "i2i": replace(template, image_size=size)}
    patch.setitem(FAMILIES, family.name, replace(family, conditions=conditions, templates=templates))
    whole, expected = pipeline_qwenimage21.calculate_dimensions, condition.size.area

    def smaller(area: int, ratio: float) -> tuple:
        assert area == expected
        return whole(size.area, ratio)

    patch.setattr(pipeline_qwenimage21, "calculate_dimensions", smaller)


@dataclass(frozen=True)
class Row:
    """family, flavour: names in the catalog. text, latents, layout, patch: see the functions above. checkpoint: kind of
    `examples/tiny_models.py`; None: the row's own name. frames: frames of its clips. longest: value of text.max_length;
    None: the template's. roundings: largest error of a text state in bfloat16, in roundings of a number.
    same_in_bfloat16: whether a sample in bfloat16 equals the pipeline's in every bit. refused: training method -> a
    part of the reason for which the family rejects it. has_alpha: whether pixels of the autoencoder have alpha.
    is_long: whether the row is checked in the long form alone, because another row has the same classes.
    """

    family: str
    flavour: str
    text: Callable[[Any, str, Sequence[Any], bool], tuple[Any, Any]]
    latents: Callable[[Any, Any], Any]
    layout: Callable[[Any], Any]
    checkpoint: str | None = None
    frames: int = 9
    longest: int | None = None
    roundings: float = 25
    same_in_bfloat16: bool = False
    patch: Callable[[Patch, Family], None] = lambda patch, family: None
    refused: Mapping[str, str] = field(default_factory=dict)
    has_alpha: bool = False
    is_long: bool = False

    @property
    def spec(self) -> Family:
        return FAMILIES[self.family]

    @property
    def task(self) -> Task:
        return get_flavour(self.family, self.flavour).task


def _kandinsky(family: str, flavour: str, **more: Any) -> Row:
    # More frames than the autoencoder's window, and as many as the pipeline of i2v needs for its last step.
    return Row(family, flavour, kandinsky_text, scaled, channels_last, frames=21, patch=float32_rotary, **more)


def _edit(family: str, flavour: str, **more: Any) -> Row:
    return Row(family, flavour, qwen_edit_text, by_channel, tokens_of_squares, patch=small_references, **more)


def _qwen_21(flavour: str, **more: Any) -> Row:
    options = {"checkpoint": "qwen-image-2.1", "longest": QWEN_21_LONGEST, "patch": small_references_21}
    return Row("qwen-image-2.1", flavour, qwen_21_text, by_channel, tokens, has_alpha=True, **options, **more)


def _wan(family: str, flavour: str, **more: Any) -> Row:
    return Row(family, flavour, wan_text, by_channel, as_they_are, **more)


def _klein(flavour: str, **more: Any) -> Row:
    # Its text encoder has 28 layers, and roundings add up.
    options = {"checkpoint": "flux2-klein", "roundings": 50}
    return Row("flux2-klein", flavour, klein_text, in_squares, tokens, **options, **more)


def _flux3(flavour: str, **more: Any) -> Row:
    # Its text encoder has 36 layers, and roundings add up.
    options = {"checkpoint": "flux3", "longest": FLUX3_LONGEST, "roundings": 50}
    return Row("flux3", flavour, flux3_text, in_squares, tokens, **options, **more)


QWEN_21_LONGEST = 1000  # tokens
FLUX3_LONGEST = 960  # tokens: a multiple of 80
_LOW_EXPERT = {"scheduled_sampling": "set train.experts to high"}  # its rollouts begin with more noise
#: Name of the row, by which tests ask for a project, a checkpoint or a transformer of it -> row.
ROWS = {
    "kandinsky5-image-t2i": _kandinsky("kandinsky5-image", "t2i-lite-sft", same_in_bfloat16=True),
    "kandinsky5-image-i2i": _kandinsky("kandinsky5-image", "i2i-lite-sft", is_long=True),
    "kandinsky5-video-t2v": _kandinsky("kandinsky5-video", "t2v-lite-sft-5s", is_long=True),
    "kandinsky5-video-i2v": _kandinsky("kandinsky5-video", "i2v-lite-5s"),
    "sana": Row("sana", "sana-1.6b-1024px", sana_text, scaled, without_frames),
    "z-image": Row("z-image", "z-image", z_image_text, shifted, without_frames),
    "qwen-image": Row(
        "qwen-image", "qwen-image", qwen_text, by_channel, tokens_of_squares, longest=1024, same_in_bfloat16=True
    ),
    "qwen-image-edit": _edit("qwen-image-edit", "qwen-image-edit", is_long=True),
    "qwen-image-edit-plus": _edit("qwen-image-edit-plus", "qwen-image-edit-2511"),
    "qwen-image-2.1": _qwen_21("qwen-image-2.1"),
    "qwen-image-2.1-i2i": _qwen_21("qwen-image-2.1-i2i"),
    "wan2.1-t2v": _wan("wan2.1", "t2v-1.3b", is_long=True),
    "wan2.2-5b-t2v": _wan("wan2.2-5b", "t2v-5b", is_long=True),
    "wan2.2-5b-i2v": _wan("wan2.2-5b", "i2v-5b"),
    "wan2.2-a14b-t2v": _wan("wan2.2-a14b", "t2v-a14b", refused=_LOW_EXPERT, is_long=True),
    "wan2.2-a14b-i2v": _wan("wan2.2-a14b", "i2v-a14b", refused=_LOW_EXPERT),
    "flux2-klein": _klein("klein-base-4b", same_in_bfloat16=True, is_long=True),
    "flux2-klein-i2i": _klein("klein-base-4b-i2i"),
    "flux3": _flux3("klein-base", is_long=True),
    "flux3-i2i": _flux3("klein-base-i2i"),
    "krea2": Row("krea2", "krea-2-raw", krea2_text, by_channel, tokens_of_squares, roundings=50),
}
