"""Types of model families: all data that the stages and the trainer need before they load a model. Also the
cleaning of captions by templates: FOLDED is the `prompt_clean` of the diffusers pipelines, LOWERCASE their
`_text_preprocessing` with `clean_caption=False`; tests compare both with the installed release. VERBATIM is for
pipelines without cleaning.

The rows are in `schemas/families/`; `schemas/catalog.py` joins them. No other code depends on a family's name.
"""

import html
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from schemas.geometry import Crop, Ints

if TYPE_CHECKING:  # `--help` imports the catalog, and need not load pyarrow
    import pyarrow as pa

MOST_REFERENCES = 10  # reference images of a sample, in any family
#: Roles of the companions that are source images. Tasks with several references use more than the first role.
SOURCE_ROLES = ("source", *(f"source_{number}" for number in range(2, MOST_REFERENCES + 1)))
#: The parts of a sample, or of a validation prompt, that are its references, in their order.
REFERENCE_PARTS = tuple(f"reference{number}" for number in range(1, MOST_REFERENCES + 1))


@dataclass(frozen=True)
class ReferenceSize:
    """The size to which a family's pipeline resizes a reference image, computed from the image's size. Pixels.

    area: largest area of a resized reference. multiple: both sides are multiples of this number. stretched: whether
    each reference is resized to about `area`, with both sides rounded to multiples; otherwise a reference with a
    larger area is scaled down, and the pixels beyond the last multiple are cropped evenly on both sides. least_side:
    length of the shortest side that the pipeline accepts. most_aspect: largest ratio of longer to shorter side; None:
    any ratio.
    """

    area: int
    multiple: int
    stretched: bool = False
    least_side: int = 1
    most_aspect: float | None = None

    def fit(self, width: Ints, height: Ints) -> tuple[Ints, Ints, Crop]:
        """(n,) width and (n,) height of n resized references, and their crops."""
        if self.stretched:
            aspect = width / height
            exact = np.sqrt(self.area * aspect)
            sides = [np.rint(side / self.multiple).astype(np.int64) * self.multiple for side in (exact, exact / aspect)]
            return sides[0], sides[1], Crop(*sides, *np.zeros((2, len(width)), np.int64))
        scale = np.where(width * height > self.area, np.sqrt(self.area / (width * height)), 1.0)
        scaled = [(side * scale).astype(np.int64) for side in (width, height)]
        sides = [side // self.multiple * self.multiple for side in scaled]
        offsets = [(side - cropped) // 2 for side, cropped in zip(scaled, sides, strict=True)]
        return sides[0], sides[1], Crop(*scaled, *offsets)

    def refused(self, width: Ints, height: Ints) -> np.ndarray:
        """(n,) whether the pipeline rejects a reference of this size."""
        shorter, longer = np.minimum(width, height), np.maximum(width, height)
        is_long = longer > self.most_aspect * shorter if self.most_aspect else np.zeros(len(longer), bool)
        return (shorter < self._shortest) | is_long

    @property
    def limits(self) -> str:
        """A description of the sizes that the pipeline accepts, for messages."""
        aspect = "" if self.most_aspect is None else f" and an aspect of at most {self.most_aspect:g}:1"
        return f"sides of {self._shortest} pixels or more{aspect}"

    @property
    def _shortest(self) -> int:
        return self.least_side if self.stretched else max(self.least_side, self.multiple)


@dataclass(frozen=True)
class PaddedSize(ReferenceSize):
    """The size of a reference image that the family's pipeline pads on all sides with its mirror image, instead of
    cropping it. The padded sides are the sides of the image rounded up to multiples, but at least `least_side` and at
    most `longest_side`. An image is scaled down until the padded image has at most `area` pixels. No image is rejected.
    """

    longest_side: int = 4096

    def fit(self, width: Ints, height: Ints) -> tuple[Ints, Ints, Crop]:
        """(n,) width and (n,) height of n padded references, and their crops, whose corners are not positive."""
        sides = np.stack([width, height])
        scale = np.minimum(np.sqrt(self.area / (sides[0] * sides[1])), self.longest_side / sides.max(0)).clip(max=1)
        while True:
            scaled = np.rint(sides * scale).astype(np.int64).clip(min=1)
            padded = (-(-scaled // self.multiple) * self.multiple).clip(self.least_side, self.longest_side)
            too_large = padded[0] * padded[1] > self.area
            if not too_large.any():
                return padded[0], padded[1], Crop(*scaled, *-((padded - scaled) // 2))
            scale = np.where(too_large, scale * 0.995, scale)  # like the pipeline

    @property
    def _shortest(self) -> int:
        return 1


# ftfy takes 65 to 220 us a caption. It does not change printable ASCII words with single spaces between them and
# without "&", which could begin an entity. If the text also has typographic punctuation, ftfy only straightens the
# quotes. Tests compare both cases with ftfy.
_ALREADY_CLEAN = "^[!-%'-~]+( [!-%'-~]+)*$"
_ONLY_TYPOGRAPHY = "^[ -%'-~\u2013\u2014\u2018\u2019\u201c\u201d\u2026]*$"
_QUOTES = (("[\u2018\u2019]", "'"), ("[\u201c\u201d]", '"'))


@dataclass(frozen=True)
class Cleaner:
    """text: cleans one caption. fast: cleans n captions at once, with the same results."""

    text: Callable[[str], str]
    fast: "Callable[[pa.Array], pa.Array] | None" = None

    def column(self, texts: "pa.Array") -> "pa.Array":
        """The n cleaned captions; null stays null."""
        return map_distinct(texts, self.text) if self.fast is None else self.fast(texts)


def map_distinct(texts: "pa.Array", function: Callable[[str], str]) -> "pa.Array":
    """Apply `function` to n texts, once for each distinct text."""
    import pyarrow as pa

    coded = texts.dictionary_encode()
    return pa.array([function(text) for text in coded.dictionary.to_pylist()], pa.string()).take(coded.indices)


def folded(text: str) -> str:
    """Apply ftfy, unescape HTML twice, make each run of whitespace one space."""
    import ftfy  # takes 0.2 s, which `--help` need not spend

    text = html.unescape(html.unescape(ftfy.fix_text(text))).strip()
    return re.sub(r"\s+", " ", text).strip()


def folded_column(texts: "pa.Array") -> "pa.Array":
    """`folded` of n captions."""
    import pyarrow.compute as pc

    is_unclean = pc.invert(pc.match_substring_regex(texts, _ALREADY_CLEAN))
    fixed = unclean = texts.filter(is_unclean)
    for pattern, quote in _QUOTES:
        fixed = pc.replace_substring_regex(fixed, pattern, quote)
    is_wide = pc.match_substring(fixed, "  ")
    fixed = pc.replace_with_mask(fixed, is_wide, pc.replace_substring_regex(fixed.filter(is_wide), " +", " "))
    needs_ftfy = pc.invert(pc.match_substring_regex(unclean, _ONLY_TYPOGRAPHY))
    by_ftfy = map_distinct(unclean.filter(needs_ftfy), folded)
    fixed = pc.replace_with_mask(pc.utf8_trim(fixed, " "), needs_ftfy, by_ftfy)
    return pc.replace_with_mask(texts, is_unclean, fixed)


def lowercase(text: str) -> str:
    return text.lower().strip()


def verbatim(texts: Any) -> Any:
    return texts


VERBATIM = Cleaner(verbatim, verbatim)
FOLDED = Cleaner(folded, folded_column)
LOWERCASE = Cleaner(lowercase)

Task = Literal["t2i", "i2i", "t2v", "i2v"]
#: Tensor of a text -> the component of the checkpoint that makes it.
TEXT_PARTS = {"embeds": "text_encoder", "pooled": "text_encoder_2"}


@dataclass(frozen=True)
class Template:
    """text: the prompt, with `{}` for the caption. crop: number of constant prefix tokens dropped from the encoder's
    output (None: the encoder decides). max_length: number of tokens kept after the crop. layers: layers with stored
    hidden states, concatenated along the channels; numbered like `hidden_states` of transformers (0: embeddings, -1:
    after the last norm). longest: largest number of tokens that the transformer reads; None: no limit.
    thinking: for a prompt made by the tokenizer's chat template, whether thinking is on. padded: whether the padding up
    to max_length is part of the text, so that its hidden states are stored, too. with_image: whether the prompt
    contains the sample's source image. image_size: size of each reference image in the prompt; None: no references.
    reference: text before the caption for each reference image, with `{}` for its number; "": no such text.
    sequential: whether an image's tokens have consecutive positions like text tokens, instead of rows and columns.
    keeps_end: whether an over-long prompt loses the end of its caption and keeps the text after the caption; otherwise
    it loses its end. window: number whose multiples are the lengths of texts in the transformer, which reads padding up
    to the next multiple (or `max_length`): the padding tokens of a text have one state, which is stored once, after the
    text's own tokens; None: the transformer reads no such padding. is_normed: whether the states after the last layer
    are normed by the text encoder's last norm. separator: text between the texts of two references. drops_images:
    whether the states of images' tokens are not stored, because the transformer reads latents in their places; the
    tensor `image_places` of a text has the number of its stored tokens before each image, and `max_length` does not
    count the images' tokens.
    """

    name: str
    text: str
    crop: int | None
    max_length: int
    cleaner: Cleaner
    negative_uses_template: bool = True
    with_image: bool = False
    layers: tuple[int, ...] = (-1,)
    longest: int | None = None
    thinking: bool = True
    padded: bool = False
    image_size: ReferenceSize | None = None
    reference: str = ""
    sequential: bool = False
    keeps_end: bool = False
    window: int | None = None
    is_normed: bool = True
    separator: str = ""
    drops_images: bool = False

    def render(self, cleaned: str, *, negative: bool = False) -> str:
        """The exact text that is tokenized for a caption. Some templates do not apply to negative and null prompts."""
        is_plain = negative and not self.negative_uses_template
        return cleaned if is_plain else self.text.replace("{}", cleaned, 1)

    def render_column(self, cleaned: "pa.Array", *, negative: bool = False) -> "pa.Array":
        """`render` of n captions."""
        import pyarrow.compute as pc

        prefix, suffix = self.text.split("{}", 1)
        is_plain = negative and not self.negative_uses_template
        return cleaned if is_plain else pc.binary_join_element_wise(prefix, cleaned, suffix, "")


@dataclass(frozen=True)
class Condition:
    """The pictures that a task gives the model in addition to the text, encoded separately by the autoencoder.

    kind: "source", a source image for each sample, with the sample's size; "first-frame", the first `frames` pixel
    frames of the clip; "references", one to `most` ordered images, each resized by `size` and encoded once, in a
    separate row. posterior: "mode" if the pipeline uses the mode of the autoencoder's distribution; None: the option
    `latents.posterior` decides. padded: whether zeros (the middle of -1..1) up to the clip's length follow the first
    frames before encoding. sole_size: rule that replaces `size` for the only reference of a sample.
    """

    kind: Literal["source", "first-frame", "references"]
    frames: int = 1
    posterior: Literal["mode"] | None = None
    padded: bool = False
    most: int = 1
    size: ReferenceSize | None = None
    sole_size: ReferenceSize | None = None

    def size_of(self, is_sole: bool) -> ReferenceSize:
        """The rule for the size of a reference. is_sole: whether its sample has no other reference."""
        size = self.sole_size if is_sole and self.sole_size is not None else self.size
        assert size is not None, f"a condition of the kind {self.kind} has no references"
        return size

    @property
    def in_row(self) -> bool:
        """Whether the condition is a tensor in the sample's row."""
        return self.kind != "references"


@dataclass(frozen=True)
class Normalization:
    """Normalization of the autoencoder's latents for the model: (z - mean) / deviation * scale.

    scale, mean, deviation: keys of the autoencoder's config, with a number or a list of one number per channel as the
    value. None: the term is omitted.
    """

    scale: str | None = "scaling_factor"
    mean: str | None = None
    deviation: str | None = None


@dataclass(frozen=True)
class ShiftByTokens:
    """The shift of noise levels by an image's visual tokens: exp(mu), mu on a line from `low` at `fewest` tokens to
    `high` at `most`. clamped: whether mu stays at the nearest end outside this range.

    `calculate_shift` of diffusers' pipelines, whose scheduler's exp(mu) / (exp(mu) + 1 / u - 1) is `flow.shift_sigma`
    by exp(mu). For a video, the tokens of one frame count; all frames would give a shift of about 100 at 24,576 tokens.
    The line is the default of diffusers. Families with a pipeline without this shift clamp mu, since the line was not
    made for other sizes.
    """

    fewest: int = 256
    most: int = 4096
    low: float = 0.5
    high: float = 1.15
    clamped: bool = True

    def __call__(self, tokens: int) -> float:
        tokens = min(max(tokens, self.fewest), self.most) if self.clamped else tokens
        share = (tokens - self.fewest) / (self.most - self.fewest)
        return math.exp(self.low + share * (self.high - self.low))


@dataclass(frozen=True)
class ComfyUINames:
    """The names of modules in ComfyUI. paths: pairs (diffusers path, ComfyUI path) for names that differ: paths of
    modules, or whole segments of such paths; replaced in order. prefix: text before each path in a file, either
    "diffusion_model." or, for models whose names ComfyUI maps only behind the prefix of diffusers, "transformer.".
    has_alpha: whether a file has an alpha tensor for each module. Otherwise the weights are multiplied by the strength,
    because diffusers reads these files, too, and ignores or rejects their alpha tensors."""

    paths: tuple[tuple[str, str], ...] = ()
    prefix: str = "diffusion_model."
    has_alpha: bool = True


@dataclass(frozen=True)
class OriginalNames:
    """The names of modules in the original release that differ from diffusers; other trainers use them in adapters.
    paths: pairs (diffusers path, original path), see ComfyUINames. joined: pairs (original module, diffusers modules
    whose concatenated outputs it computes); each name consists of the last segments of a path, equally many. swapped:
    diffusers paths of modules whose outputs have their second half first in the original release."""

    paths: tuple[tuple[str, str], ...] = ()
    joined: tuple[tuple[str, tuple[str, ...]], ...] = ()
    swapped: tuple[str, ...] = ()


@dataclass(frozen=True)
class SparseAttention:
    """Block-sparse attention, used by checkpoints with `value` at `key` of the transformer's config. side_multiple:
    divisor of both sides of a bucket (pixels)."""

    name: str
    key: str
    value: str
    side_multiple: int

    def is_used_by(self, transformer_config: Mapping[str, Any]) -> bool:
        return transformer_config.get(self.key) == self.value


@dataclass(frozen=True)
class ScaleWindow:
    """Scale factors (frames, height, width) of the transformer's positions: `inside` if both sides are within
    low..high pixels, else `outside`. `bucket` shows them as scale class.
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
class Expert:
    """One of the transformers of a checkpoint. Each predicts a range of noise levels, from `lowest` to below `highest`
    (1: inclusive). part: sub-folder of the transformer. guidance: default guidance scale of its denoising steps."""

    part: str
    lowest: float
    highest: float
    guidance: float

    def holds(self, sigma: float) -> bool:
        return self.lowest <= sigma < self.highest or sigma == self.highest == 1

    @property
    def range(self) -> tuple[float, float]:
        return self.lowest, self.highest


@dataclass(frozen=True)
class DistilledMark:
    """The key that is true for distilled checkpoints. part: sub-folder of the component that has the key in its
    config.json; "": the key is in the index of the pipeline. is_reversible: whether an assistant adapter can reverse
    the distillation."""

    key: str
    part: str = ""
    is_reversible: bool = True

    def __str__(self) -> str:
        return f"{self.key} in its {f'{self.part}/config.json' if self.part else 'model_index.json'}"


IS_DISTILLED = DistilledMark("is_distilled")


@dataclass(frozen=True)
class ModularPipeline:
    """A family whose `pipelines` are modular pipelines of diffusers. blocks: class of the pipeline's blocks. skipped:
    blocks that are removed, because they change the prompt. scheduler: config of the scheduler, a
    FlowMatchEulerDiscreteScheduler, which the pipeline makes itself, as well as its guider."""

    blocks: str
    skipped: tuple[str, ...]
    scheduler: Mapping[str, Any]


@dataclass(frozen=True)
class PublishedAdapter:
    """A published LoRA file. repo: its repository. file: path in the repository. revision: commit of the repository;
    None: the newest commit, because no commit was confirmed."""

    repo: str
    file: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.repo}/{self.file}"


@dataclass(frozen=True)
class Flavour:
    """One published checkpoint.

    shift: training default of s in sigma = s u / (1 + (s - 1) u). sizes: published (width, height) pairs of its
    training, in pixels. sparse: whether it uses the family's sparse attention. in_window: whether it was trained inside
    the family's scale window. shape, encoder_shape: keys of the transformer's and the text encoder's config that differ
    from the family. distilled_from: for a checkpoint distilled to few steps, the flavour to train instead, since
    training would undo the distillation. has_guidance: whether guidance was distilled into the checkpoint, which plain
    training would undo, although its number of steps was not reduced. assistant: published adapter that reverses the
    distillation, `model.assistant: default`. experts: "high" and "low", in the order of denoising, if the checkpoint
    has several transformers. steps, guidance: defaults of validation that differ from the family, as for a distilled
    checkpoint. scheduler: keys of the scheduler's config that the pipeline replaces for this checkpoint.
    """

    name: str
    repo: str
    task: Task
    shift: float = 1.0
    sizes: tuple[tuple[int, int], ...] = ()
    sparse: bool = False
    in_window: bool = False
    shape: Mapping[str, Any] = field(default_factory=dict)
    encoder_shape: Mapping[str, Any] = field(default_factory=dict)
    distilled_from: str | None = None
    has_guidance: bool = False
    assistant: PublishedAdapter | None = None
    experts: Mapping[str, Expert] = field(default_factory=dict)
    steps: int | None = None
    guidance: float | None = None
    scheduler: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """A model family.

    text_encoder, autoencoder, transformer: modules in stages/encoding/text/, stages/encoding/vae/, trainer/families/.
    text_components, latent_components: the checkpoint's sub-folders that determine embeddings and latents.
    model_classes: sub-folder -> the model that its config names, to refuse another family's checkpoint. side_multiple:
    both sides of a bucket are multiples of it (pixels). resolution: edge of the square that is a bucket's default area
    (pixels). frames: default number of frames of a validation clip. frame_rate: default frame rate of clips (frames per
    second). image_token: side of the square that one token of an image in a prompt covers (pixels), for estimates.
    transformer_config: task -> values of the transformer's config that distinguish the task. autoencoder_config: values
    of the autoencoder's config that identify the family; for a list, its length. text_width: channels of a stored text
    token. text_widths: tensor of a text -> keys of the transformer's config whose product is its width.
    pipelines: task -> diffusers class; without tasks that diffusers does not support.
    pipeline_settings: key of model_index.json -> value that the pipeline needs; a missing key means false.
    distilled_mark: key that marks distilled checkpoints; None if no key does.
    tokenizers: sub-folder -> class, without "Fast". negative_prompt: default of validation prompts; None
    if the pipeline does not accept one and guides with an empty prompt. conditions: task -> condition, for tasks with
    a condition. posterior: whether the autoencoder returns a distribution. latent_settings: further settings that
    determine latents; checked when the autoencoder is loaded. latent_precision (None: the model's precision),
    text_attention: defaults of the configuration. preview_autoencoder: diffusers class of tiny autoencoders for these
    latents; None if diffusers has no such class. layers: keys of the transformer's config whose sum is the number of
    blocks that compute visual tokens. convolves: whether these blocks convolve over the grid of tokens. frame_chunks:
    whether the autoencoder's convolutions can compute a few frames at a time (`latents.chunk_frames`). tile: side of
    the tiles of `latents.tiling`, and the distance between the starts of two tiles (pixels). own_sizes: attribute
    (`resolutions`) or argument (`use_resolution_binning`) that keeps the family's pipelines from replacing a requested
    size by a similar one. modular: description of the pipelines if they are modular. guidance_argument: name of the
    pipelines' argument for classifier-free guidance.
    pipeline_packages: packages that the pipelines need in addition to diffusers, transformers and their dependencies.
    shapes: sub-folder -> published config, reduced to the keys that differ from the defaults of the class, for
    predictions without a download. one_checkpoint: whether one checkpoint serves all tasks, so that its
    model_index.json may name the pipeline of any of them. comfyui_names: module names in ComfyUI. original_names:
    module names in adapters of other trainers. shift_by_tokens: function from the number of visual tokens
    of an image to the shift of `train.timesteps.auto_shift`.
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
    model_classes: dict[str, str]
    transformer_config: dict[Task, dict[str, int | bool]]
    autoencoder_config: dict[str, int]
    text_widths: dict[str, tuple[str, ...]]
    video: bool
    guidance: float
    steps: int
    templates: dict[Task, Template]
    pipelines: dict[Task, str] = field(default_factory=dict)
    pipeline_settings: dict[str, bool] = field(default_factory=dict)
    distilled_mark: DistilledMark | None = None
    tokenizers: dict[str, str] = field(default_factory=dict)
    conditions: dict[Task, Condition] = field(default_factory=dict)
    latent_components: tuple[str, ...] = ("vae",)
    negative_prompt: str | None = ""
    posterior: bool = True
    normalization: Normalization = Normalization()
    frames: int = 1
    frame_rate: float = 24.0
    image_token: int = 56
    sparse: SparseAttention | None = None
    scale_window: ScaleWindow | None = None
    latent_settings: dict[str, int | bool | str] = field(default_factory=dict)
    latent_precision: Literal["float32"] | None = None
    text_attention: Literal["sdpa", "eager"] = "sdpa"
    layers: tuple[str, ...] = ("num_layers",)
    convolves: bool = False
    frame_chunks: bool = False
    preview_autoencoder: Literal["AutoencoderTiny"] | None = None
    tile: tuple[int, int] = (512, 384)
    shift_by_tokens: Callable[[int], float] = ShiftByTokens()
    own_sizes: Literal["resolutions", "use_resolution_binning"] | None = None
    modular: ModularPipeline | None = None
    guidance_argument: str = "guidance_scale"
    pipeline_packages: tuple[str, ...] = ()
    shapes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    one_checkpoint: bool = False
    comfyui_names: ComfyUINames = ComfyUINames()
    original_names: OriginalNames = OriginalNames()

    def published_shape(self, part: str, flavour: Flavour) -> dict[str, Any]:
        """The keys of a component's config that differ from the defaults of its class."""
        if part in self.components:
            return {**self.shapes["transformer"], **self.transformer_config[flavour.task], **flavour.shape}
        return {**self.shapes[part], **(flavour.encoder_shape if part == "text_encoder" else {})}

    def published_text_width(self, flavour: Flavour) -> int:
        """Channels of a stored text token of the flavour's checkpoint."""
        return self.read_text_widths(flavour.shape).get("embeds", self.text_width)

    def read_text_widths(self, transformer_config: Mapping[str, Any]) -> dict[str, int]:
        """Tensor of a text -> the width that a transformer reads, without the tensors for which the config lacks a
        key."""
        numbers = {key: size for key, size in transformer_config.items() if isinstance(size, int)}
        complete = {name: keys for name, keys in self.text_widths.items() if numbers.keys() >= {*keys}}
        return {name: math.prod(numbers[key] for key in keys) for name, keys in complete.items()}

    def count_layers(self, transformer_config: Mapping[str, Any]) -> int | None:
        """The number of blocks that compute visual tokens; None if the config does not contain this number."""
        counts = [count for key in self.layers if isinstance(count := transformer_config.get(key), int)]
        return sum(counts) if len(counts) == len(self.layers) else None

    @property
    def components(self) -> tuple[str, ...]:
        """The checkpoint's sub-folders of transformers."""
        experts = self.flavours[self.default_flavour].experts.values()
        return tuple(expert.part for expert in experts) or ("transformer",)

    def condition_frames(self, task: Task) -> int | None:
        """Number of latent frames of the condition in a sample's row; 0 if the row has no condition, None if the
        condition has as many frames as the clip."""
        condition = self.conditions.get(task)
        if condition is not None and condition.padded:
            return None
        return 0 if condition is None or not condition.in_row else 1 + (condition.frames - 1) // self.temporal_stride
