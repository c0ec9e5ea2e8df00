"""The model families and their flavours, as data.

A new family is its rows here and one file in `trainer/families/`. Sources: the model cards of
kandinskylab/Kandinsky-5.0-*-Diffusers and Efficient-Large-Model/Sana*_diffusers, and the pipelines of the
installed diffusers (pipelines/kandinsky5, pipelines/sana), with which tests compare templates and crops.
"""

from dataclasses import dataclass, field
from typing import Literal

Task = Literal["t2i", "i2i", "t2v", "i2v"]


@dataclass(frozen=True)
class Template:
    """What stands around a caption, and how much of the encoder's output belongs to it.

    text: the template, with `{}` where the caption goes. crop: tokens of constant prefix dropped from the
    output (None: decided by the encoder, as for Sana's instruction). max_length: tokens kept after the crop.
    """

    name: str
    text: str
    crop: int | None
    max_length: int
    cleaning: Literal["kandinsky", "sana"]
    negative_uses_template: bool = True
    with_image: bool = False


@dataclass(frozen=True)
class Flavour:
    """One published checkpoint.

    shift: the training default of sigma = s u / (1 + (s - 1) u). sizes: (width, height) in pixels that it was made
    with, where they are published. nabla: whether its transformer attends by NABLA.
    """

    name: str
    repo: str
    task: Task
    shift: float = 1.0
    sizes: tuple[tuple[int, int], ...] = ()
    nabla: bool = False


@dataclass(frozen=True)
class Family:
    """Everything a stage or the trainer must know of a family without loading it.

    side_multiple: both sides of a bucket are multiples of it (pixels). spatial_stride, temporal_stride: the
    autoencoder's. resolution: default edge length whose square is the bucket's area (pixels). text_width:
    channels of one stored text token. text_parts, latent_parts: sub-folders of the checkpoint that determine
    what the encoders give. latent_settings: what else determines the latents; the autoencoder checks at load
    that the installed diffusers still agrees. latent_precision: in which the autoencoder computes where nothing else
    is asked for (None: as the model). tile: side of the spatial tiles of `latents.tiling` and the distance between
    their beginnings (pixels). models: what the config of a sub-folder calls its model, so that
    another family's checkpoint is refused by name. transformer_config: task -> what the transformer's config has in
    a checkpoint made for it, as far as that tells tasks apart. autoencoder_config: likewise of the autoencoder's; of a
    list, its length. text_widths: tensor of a text -> what the transformer's config calls its width. pipelines: task
    -> the pipeline of a checkpoint made for it.
    nabla: whether a checkpoint's config may ask for NABLA attention. posterior: whether the autoencoder gives a
    distribution to sample from.
    """

    name: str
    flavours: dict[str, Flavour]
    default: str
    text_encoder: str
    autoencoder: str
    transformer: str
    latent_channels: int
    side_multiple: int
    spatial_stride: int
    temporal_stride: int
    resolution: int
    text_width: int
    text_parts: tuple[str, ...]
    latent_parts: tuple[str, ...]
    models: dict[str, str]
    transformer_config: dict[Task, dict[str, int | bool]]
    autoencoder_config: dict[str, int]
    text_widths: dict[str, str]
    pipelines: dict[Task, str]
    video: bool
    nabla: bool
    guidance: float
    steps: int
    negative_prompt: str = ""
    posterior: bool = True
    templates: dict[str, Template] = field(default_factory=dict)
    latent_settings: dict[str, int | bool | str] = field(default_factory=dict)
    latent_precision: Literal["float32"] | None = None
    tile: tuple[int, int] = (512, 384)


_T2I = Template(
    name="kandinsky5-t2i",
    text="<|im_start|>system\nYou are a prompt engineer. Describe the image by detailing the color, shape, "
    "size, texture, quantity, text, spatial relationships of the objects and "
    "background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>",
    crop=40,
    max_length=512,
    cleaning="kandinsky",
)
_I2I = Template(
    name="kandinsky5-i2i",
    text="<|im_start|>system\nYou are a prompt engineer. Based on the provided source image (first image) "
    "and target image (second image), create an interesting text prompt that can be used together with the "
    "source image to create the target "
    "image:<|im_end|><|im_start|>user{}<|vision_start|><|image_pad|><|vision_end|><|im_end|>",
    crop=54,
    max_length=1024,
    cleaning="kandinsky",
    with_image=True,
)
_VIDEO = Template(
    name="kandinsky5-video",
    text="\n".join(
        [
            "<|im_start|>system\nYou are a prompt engineer. Describe the video in detail.",
            "Describe how the camera moves or shakes, describe the zoom and view angle, whether it follows "
            "the objects.",
            "Describe the location of the video, main characters or objects and their action.",
            "Describe the dynamism of the video and presented actions.",
            "Name the visual style of the video: whether it is a professional footage, user generated "
            "content, some kind of animation, video game or scren content.",
            "Describe the visual effects, postprocessing and transitions if they are presented in the video.",
            "Pay attention to the order of key actions shown in the scene.<|im_end|>",
            "<|im_start|>user\n{}<|im_end|>",
        ]
    ),
    crop=128,
    max_length=512,
    cleaning="kandinsky",
)
_SANA = Template(
    name="sana-complex-human-instruction",
    text="\n".join(
        [
            "Given a user prompt, generate an 'Enhanced prompt' that provides detailed visual descriptions "
            "suitable for image generation. Evaluate the level of detail in the user prompt:",
            "- If the prompt is simple, focus on adding specifics about colors, shapes, sizes, textures, "
            "and spatial relationships to create vivid and concrete scenes.",
            "- If the prompt is already detailed, refine and enhance the existing details slightly without "
            "overcomplicating.",
            "Here are examples of how to transform or refine prompts:",
            "- User Prompt: A cat sleeping -> Enhanced: A small, fluffy white cat curled up in a round "
            "shape, sleeping peacefully on a warm sunny windowsill, surrounded by pots of blooming red "
            "flowers.",
            "- User Prompt: A busy city street -> Enhanced: A bustling city street scene at dusk, featuring "
            "glowing street lamps, a diverse crowd of people in colorful clothing, and a double-decker bus "
            "passing by towering glass skyscrapers.",
            "Please generate only the enhanced description for the prompt below and avoid including any "
            "additional commentary or evaluations:",
            "User Prompt: {}",
        ]
    ),
    crop=None,
    max_length=300,
    cleaning="sana",
    negative_uses_template=False,
)


_HD_SIZES = ((1024, 1024), (640, 1408), (1408, 640), (768, 1280), (1280, 768), (896, 1152), (1152, 896))
_LITE_VIDEO_SIZES = ((512, 512), (512, 768), (768, 512))


def _kandinsky(task: Task, names: dict[str, str]) -> dict[str, Flavour]:
    """NABLA: as the configs of the original release have it (kandinskylab/kandinsky-5, configs/: 10 s and Pro HD), and
    where diffusers' documentation sets the flex backend. A bucket made for NABLA suits full attention too."""
    made = {}
    for name, repo in names.items():
        nabla = task in ("t2v", "i2v") and ("10s" in repo or "Pro" in repo)
        sizes = _LITE_VIDEO_SIZES if task in ("t2v", "i2v") and "Lite" in repo else _HD_SIZES
        made[name] = Flavour(name, f"kandinskylab/Kandinsky-5.0-{repo}-Diffusers", task, sizes=sizes, nabla=nabla)
    return made


def _sana(names: dict[str, tuple[str, float]]) -> dict[str, Flavour]:
    return {name: Flavour(name, repo, "t2i", shift) for name, (repo, shift) in names.items()}


_VIDEO_NEGATIVE = (
    "Static, 2D cartoon, cartoon, 2d animation, paintings, images, worst quality, low quality, ugly, "
    "deformed, walking backwards"
)

_QWEN_CLIP = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
_TEXT_WIDTHS = {"embeds": "in_text_dim", "pooled": "in_text_dim2"}
_QWEN_MODELS = {"transformer": "Kandinsky5Transformer3DModel", "text_encoder": "qwen2_5_vl"}

FAMILIES: dict[str, Family] = {
    "kandinsky5-image": Family(
        name="kandinsky5-image",
        flavours=_kandinsky("t2i", {"t2i-lite-sft": "T2I-Lite-sft", "t2i-lite-pretrain": "T2I-Lite-pretrain"})
        | _kandinsky("i2i", {"i2i-lite-sft": "I2I-Lite-sft", "i2i-lite-pretrain": "I2I-Lite-pretrain"}),
        default="t2i-lite-sft",
        text_encoder="kandinsky5",
        autoencoder="flux",
        transformer="kandinsky5",
        latent_channels=16,
        side_multiple=16,
        spatial_stride=8,
        temporal_stride=1,
        resolution=1024,
        text_width=3584,
        text_parts=_QWEN_CLIP,
        latent_parts=("vae",),
        models={**_QWEN_MODELS, "vae": "AutoencoderKL"},
        transformer_config={
            "t2i": {"in_visual_dim": 16, "visual_cond": False},
            "i2i": {"in_visual_dim": 16, "visual_cond": True},
        },
        autoencoder_config={"latent_channels": 16, "block_out_channels": 4},
        text_widths=_TEXT_WIDTHS,
        pipelines={"t2i": "Kandinsky5T2IPipeline", "i2i": "Kandinsky5I2IPipeline"},
        latent_settings={"tiling": False},
        video=False,
        nabla=False,
        guidance=3.5,
        steps=50,
        templates={"t2i": _T2I, "i2i": _I2I},
    ),
    "kandinsky5-video": Family(
        name="kandinsky5-video",
        flavours=_kandinsky(
            "t2v",
            {
                "t2v-lite-sft-5s": "T2V-Lite-sft-5s",
                "t2v-lite-sft-10s": "T2V-Lite-sft-10s",
                "t2v-lite-pretrain-5s": "T2V-Lite-pretrain-5s",
                "t2v-lite-pretrain-10s": "T2V-Lite-pretrain-10s",
                "t2v-pro-sft-5s-hd": "T2V-Pro-sft-5s",
                "t2v-pro-sft-10s-hd": "T2V-Pro-sft-10s",
                "t2v-pro-pretrain-5s-hd": "T2V-Pro-pretrain-5s",
                "t2v-pro-pretrain-10s-hd": "T2V-Pro-pretrain-10s",
            },
        )
        | _kandinsky("i2v", {"i2v-lite-5s": "I2V-Lite-5s", "i2v-pro-sft-5s": "I2V-Pro-sft-5s"}),
        default="t2v-lite-sft-5s",
        text_encoder="kandinsky5",
        autoencoder="hunyuan_video",
        transformer="kandinsky5",
        latent_channels=16,
        side_multiple=16,
        spatial_stride=8,
        temporal_stride=4,
        resolution=512,
        text_width=3584,
        text_parts=_QWEN_CLIP,
        latent_parts=("vae",),
        models={**_QWEN_MODELS, "vae": "AutoencoderKLHunyuanVideo"},
        transformer_config={"t2v": {"in_visual_dim": 16}, "i2v": {"in_visual_dim": 16}},
        autoencoder_config={
            "latent_channels": 16,
            "spatial_compression_ratio": 8,
            "temporal_compression_ratio": 4,
        },
        text_widths=_TEXT_WIDTHS,
        pipelines={"t2v": "Kandinsky5T2VPipeline", "i2v": "Kandinsky5I2VPipeline"},
        latent_settings={"tiling": False, "framewise": True, "window": 16, "stride": 12},
        tile=(256, 192),
        video=True,
        nabla=True,
        guidance=5.0,
        steps=50,
        negative_prompt=_VIDEO_NEGATIVE,
        templates={"t2v": _VIDEO, "i2v": _VIDEO},
    ),
    "sana": Family(
        name="sana",
        flavours=_sana(
            {
                "sana-1.6b-1024px": ("terminusresearch/sana-1.6b-1024px", 3.0),
                "sana1.5-1.6b-1024px": ("Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers", 3.0),
                "sana1.5-4.8b-1024px": ("Efficient-Large-Model/SANA1.5_4.8B_1024px_diffusers", 3.0),
                "sana-1600m-1024px-bf16": ("Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers", 3.0),
                "sana-1600m-2kpx-bf16": ("Efficient-Large-Model/Sana_1600M_2Kpx_BF16_diffusers", 3.0),
                "sana-600m-1024px": ("Efficient-Large-Model/Sana_600M_1024px_diffusers", 4.0),
                "sana-600m-512px": ("Efficient-Large-Model/Sana_600M_512px_diffusers", 4.0),
            }
        ),
        default="sana-1.6b-1024px",
        text_encoder="gemma",
        autoencoder="dc_ae",
        transformer="sana",
        latent_channels=32,
        side_multiple=32,
        spatial_stride=32,
        temporal_stride=1,
        resolution=1024,
        text_width=2304,
        text_parts=("text_encoder", "tokenizer"),
        latent_parts=("vae",),
        models={"transformer": "SanaTransformer2DModel", "text_encoder": "gemma2", "vae": "AutoencoderDC"},
        transformer_config={"t2i": {"in_channels": 32}},
        autoencoder_config={"latent_channels": 32, "encoder_block_out_channels": 6},
        text_widths={"embeds": "caption_channels"},
        pipelines={"t2i": "SanaPipeline"},
        latent_settings={"tiling": False},
        latent_precision="float32",
        tile=(512, 448),
        video=False,
        nabla=False,
        guidance=4.5,
        steps=20,
        posterior=False,
        templates={"t2i": _SANA},
    ),
}


@dataclass(frozen=True)
class VisionModel:
    """A DINOv2 by the name that CREPA's users know it by. size: pixels of a square input, as they use it."""

    repo: str
    size: int


VISION_MODELS = {
    "dinov2_vits14": VisionModel("facebook/dinov2-small", 224),
    "dinov2_vitg14": VisionModel("facebook/dinov2-giant", 518),
}


def flavour_of(family: str, flavour: str) -> Flavour:
    """The flavour's row; an unknown family or flavour raises ValueError with the valid list."""
    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}; valid families: {', '.join(FAMILIES)}")
    flavours = FAMILIES[family].flavours
    if flavour not in flavours:
        raise ValueError(f"unknown flavour {flavour!r} of {family}; valid flavours: {', '.join(flavours)}")
    return flavours[flavour]
