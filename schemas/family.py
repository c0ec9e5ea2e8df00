"""What a model family is, as types: the rows are in `schemas/families/`, and `schemas/catalogue.py` joins them.

Everything a stage or the trainer must know of a family without loading its model is stated here, so that no other code
asks which family it deals with.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from schemas.cleaning import Cleaner

Task = Literal["t2i", "i2i", "t2v", "i2v"]


@dataclass(frozen=True)
class Template:
    """What stands around a caption, and how much of the encoder's output belongs to it.

    text: the template, with `{}` where the caption goes. crop: tokens of constant prefix dropped from the output
    (None: decided by the encoder). max_length: tokens kept after the crop. cleaner: applied to captions before the
    template. layers: of which the hidden states are stored, concatenated along the channels, numbered as
    transformers numbers `hidden_states` (0: embeddings, -1: after the last layer and its norm).
    """

    name: str
    text: str
    crop: int | None
    max_length: int
    cleaner: Cleaner
    negative_uses_template: bool = True
    with_image: bool = False
    layers: tuple[int, ...] = (-1,)


@dataclass(frozen=True)
class Condition:
    """The picture that a task gives the model beside the text, encoded by the autoencoder by itself.

    kind: "source", an image of its own that belongs to each sample; "first-frame", the first `frames` frames of the
    clip itself. frames: pixel frames, which the autoencoder's temporal stride must allow.
    """

    kind: Literal["source", "first-frame"]
    frames: int = 1


@dataclass(frozen=True)
class Normalisation:
    """From the autoencoder's latents to the model's: (z - mean) / deviation * scale.

    Each names a key of the autoencoder's config: a number, or a list with one number for each channel. None: left out.
    """

    scale: str | None = "scaling_factor"
    mean: str | None = None
    deviation: str | None = None


@dataclass(frozen=True)
class SparseAttention:
    """Attention over blocks, which asks for larger multiples of the sides.

    A checkpoint uses it when its transformer's config has `value` at `key`. side_multiple: pixels.
    """

    name: str
    key: str
    value: str
    side_multiple: int

    def asked(self, transformer_config: Mapping[str, Any]) -> bool:
        return transformer_config.get(self.key) == self.value


@dataclass(frozen=True)
class ScaleWindow:
    """A range of sizes for which the transformer scales its positions otherwise, shown by `bucket` as scale class.

    inside: factors (frames, height, width) where both sides are within low..high pixels; outside: elsewhere.
    """

    low: int
    high: int
    inside: tuple[float, float, float]
    outside: tuple[float, float, float]

    def holds(self, width: int, height: int) -> bool:
        return all(self.low <= side <= self.high for side in (width, height))

    def factors(self, width: int, height: int) -> tuple[float, float, float]:
        return self.inside if self.holds(width, height) else self.outside


@dataclass(frozen=True)
class Flavour:
    """One published checkpoint.

    shift: the training default of sigma = s u / (1 + (s - 1) u). sizes: (width, height) in pixels that it was made
    with, where they are published. sparse: whether its transformer uses the family's sparse attention. in_window:
    whether it was made for sizes inside the family's scale window alone.
    """

    name: str
    repo: str
    task: Task
    shift: float = 1.0
    sizes: tuple[tuple[int, int], ...] = ()
    sparse: bool = False
    in_window: bool = False


@dataclass(frozen=True)
class Family:
    """Everything a stage or the trainer must know of a family without loading it.

    text_encoder, autoencoder, transformer: names of modules in stages/encoding/text/, stages/encoding/vae/ and
    trainer/families/.
    conditions: task -> what the model is given beside the text; tasks that are not there give nothing.
    components: sub-folders of the checkpoint that hold its transformers (`trainer.experts.Experts`
    of several).
    side_multiple: both sides of a bucket are multiples of it (pixels). spatial_stride, temporal_stride: the
    autoencoder's. resolution: default edge length whose square is the bucket's area (pixels). frames: of a validation
    clip by default. text_width: channels of one stored text token. image_token: side in pixels of what one token of an
    image inside a prompt covers, for estimates. text_parts, latent_parts: sub-folders of the checkpoint that determine
    what the encoders give. latent_settings: what else determines the latents; the autoencoder checks at load
    that the installed diffusers still agrees. latent_precision: in which the autoencoder computes where nothing else
    is asked for (None: as the model). text_attention: the language model's attention where nothing else is asked for.
    tile: side of the spatial tiles of `latents.tiling` and the distance between
    their beginnings (pixels). models: what the config of a sub-folder calls its model, so that
    another family's checkpoint is refused by name. transformer_config: task -> what the transformer's config has in
    a checkpoint made for it, as far as that tells tasks apart. autoencoder_config: likewise of the autoencoder's; of a
    list, its length. text_widths: tensor of a text -> what the transformer's config calls its width. pipelines: task
    -> the pipeline of a checkpoint made for it, a class of diffusers.
    posterior: whether the autoencoder gives a distribution to sample from.
    """

    name: str
    flavours: dict[str, Flavour]
    default_flavour: str
    text_encoder: str
    autoencoder: str
    transformer: str
    latent_channels: int
    side_multiple: int
    spatial_stride: int
    temporal_stride: int
    resolution: int
    text_width: int
    text_components: tuple[str, ...]
    latent_components: tuple[str, ...]
    model_classes: dict[str, str]
    transformer_config: dict[Task, dict[str, int | bool]]
    autoencoder_config: dict[str, int]
    text_widths: dict[str, str]
    pipelines: dict[Task, str]
    video: bool
    guidance: float
    steps: int
    templates: dict[Task, Template]
    conditions: dict[Task, Condition] = field(default_factory=dict)
    components: tuple[str, ...] = ("transformer",)
    negative_prompt: str = ""
    posterior: bool = True
    normalisation: Normalisation = Normalisation()
    frames: int = 1
    image_token: int = 56
    sparse: SparseAttention | None = None
    scale_window: ScaleWindow | None = None
    latent_settings: dict[str, int | bool | str] = field(default_factory=dict)
    latent_precision: Literal["float32"] | None = None
    text_attention: Literal["sdpa", "eager"] = "sdpa"
    tile: tuple[int, int] = (512, 384)

    def condition_frames(self, task: Task) -> int:
        """Latent frames of the task's condition; 0 where it has none."""
        condition = self.conditions.get(task)
        return 0 if condition is None else 1 + (condition.frames - 1) // self.temporal_stride
