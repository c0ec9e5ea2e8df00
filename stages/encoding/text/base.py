"""The common part of the families' text encoders: loading, with quantization or offloading, and reading texts."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Generic, TypeVar

import torch
from PIL import Image
from transformers import AutoTokenizer

from cache.models.places import locate
from cache.models.weights import WeightsError, config_errors, fetch_components, load_pretrained
from schemas.config.encoding import Caption, Model, Text
from schemas.devices import HostCopy
from schemas.errors import USAGE, LatentpressError
from schemas.family import Template
from schemas.libraries import QUANTIZATION_LIBRARIES, find_library, is_installed
from schemas.text_format import shorten
from stages.encoding import model_loading
from stages.encoding.text.reader import EncoderStats, PrefixCachedModel, TextReader, find_prefix_ids
from stages.media.files import MediaError

UNQUANTIZED = "with some matrices unquantized, since nf4-bnb can't pack their sides or the model needs them whole"
CLIP_MAX_TOKENS = 77  # CLIP's limit on the tokens of a caption, as in the pipelines
#: bitsandbytes packs 4-bit matrices in multiples of these sides on CPUs with AVX512-BF16. A matrix whose sides are not
#: multiples is not quantized, on any machine.
NF4_ROW_MULTIPLE, NF4_COLUMN_MULTIPLE = 32, 64
DEFAULT_OPTIONS = Text()
Reader = TypeVar("Reader", bound=TextReader)
CachedReader = TypeVar("CachedReader", bound=PrefixCachedModel)


class OptionError(LatentpressError, ValueError):
    """An option of text.* that this model, device or installation does not support."""

    exit_code = USAGE


@dataclass(frozen=True)
class TextRequest:
    """One caption to encode.

    text: cleaned caption, without its template. negative: whether to encode it as the pipeline encodes negative prompts
    (and null prompts). images: RGB images for templates with images: the source cropped to its bucket, or the
    references.
    """

    text: str
    negative: bool = False
    images: tuple[Image.Image, ...] = ()


@dataclass
class TextResult:
    """One encoded caption, on the CPU in the encoder's dtype.

    embeds: (L, D), real tokens only, unless the template is padded. pooled: (D2,), or None if the family has no pooled
    vector. tokens: L without the limit on the length. kept: L. clip_tokens: number of the caption's tokens for CLIP
    before they are cut to CLIP_MAX_TOKENS; None without CLIP. image_places: (references,), int32, number of tokens in
    embeds before each image, if the template drops the tokens of images; otherwise None.
    """

    embeds: torch.Tensor
    pooled: torch.Tensor | None
    tokens: int
    kept: int
    clip_tokens: int | None = None
    image_places: torch.Tensor | None = None


class RequestError(MediaError):
    """A caption that can't be encoded, because of its text or its image; it is rejected."""


def request_error(reason: str, request: TextRequest, problem: str, advice: str) -> RequestError:
    return RequestError(reason, f"caption {shorten(request.text)!r}", problem, advice)


class TextEncoder(ABC, Generic[Reader]):
    """Loads a family's text encoder once. `prepare` tokenizes, and may run at the same time as `encode`, the forward
    pass.

    Each family's `Encoder` defines its components and its reader's class, loads its language model in `_load`, converts
    a request to the model's input in `prepare`, and reads a batch of inputs in `_compute`.
    """

    components: tuple[str, ...]  # folders of the checkpoint
    tokenizer = "tokenizer"  # folder of the tokenizer

    def __init__(
        self,
        source: str,
        revision: str | None,
        template: Template,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        options: Text = DEFAULT_OPTIONS,
        share_prefix: bool = True,
    ) -> None:
        """max_length: the pipeline's max_sequence_length, in tokens. options: options, of which attention, quantization
        and offload apply. share_prefix: whether to compute the template's prefix once.

        Raises WeightsError if a component is missing, OptionError for an option that is not supported.
        """
        folder = fetch_components(source, revision, self.components)
        self.source, self.template, self.max_length = source, template, max_length
        self.dtype, self.device = dtype, device
        self.unquantized: list[str] = []  # matrices that nf4-bnb does not quantize
        self._options, self._share_prefix = options, share_prefix
        self._lock = Lock()
        self._tokenizer = AutoTokenizer.from_pretrained(folder / self.tokenizer, padding_side="right")
        self._reader = self._load(folder)

    @abstractmethod
    def _load(self, folder: Path) -> Reader:
        """Load the models from `folder` and return the language model's reader."""

    @abstractmethod
    def prepare(self, request: TextRequest) -> Any:
        """Tokenize a request. Returns a PreparedPrompt or a subclass. Raises RequestError if the request can't be
        encoded."""

    @abstractmethod
    def _compute(self, batch: Sequence[Any]) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Queue a batch of prepared requests on the device, without waiting for it. Returns embeds_LD of each text, and
        pooled_BD, or None if the family has no pooled vectors."""

    def _clip_tokens(self, prompt: Any) -> int | None:
        """Number of the caption's tokens for CLIP without the limit; None without CLIP."""
        return None

    def _image_places(self, prompt: Any) -> torch.Tensor | None:
        """See TextResult."""
        return None

    def queue(self, batch: Sequence[Any]) -> Callable[[], list[TextResult]]:
        """Queue a batch of prepared requests on the device. The returned function waits for the results."""
        embeds, pooled_BD = self._compute(batch)
        lengths = [len(embeds_LD) for embeds_LD in embeds]
        copied = HostCopy(*(tensor.to(self.dtype) for tensor in (torch.cat(embeds), pooled_BD) if tensor is not None))

        def results() -> list[TextResult]:
            arrived = copied.wait_all()
            texts = zip(batch, arrived[0].split(lengths), strict=True)
            return [
                TextResult(
                    embeds_LD,
                    arrived[1][row] if pooled_BD is not None else None,
                    len(embeds_LD) + prompt.untruncated - len(prompt.ids),
                    len(embeds_LD),
                    self._clip_tokens(prompt),
                    self._image_places(prompt),
                )
                for row, (prompt, embeds_LD) in enumerate(texts)
            ]

        return results

    def encode(self, batch: Sequence[Any]) -> list[TextResult]:
        """Encode a batch and wait for the results."""
        return self.queue(batch)()

    def _language_model(self, model_class: Any, folder: Path, unused: Sequence[str] = ()) -> Any:
        folder /= "text_encoder"
        model = load_language_model(model_class, folder, self.dtype, self.device, self._options, unused)
        table_size, token_count = model.get_input_embeddings().weight.shape[0], len(self._tokenizer)
        if token_count > table_size:
            raise WeightsError(
                f"{self.source}: its tokenizer has {token_count} tokens, and its text encoder only {table_size}",
                "use tokenizer/ of the repository that text_encoder/ comes from",
            )
        if self._options.quantization == "nf4-bnb":
            self.unquantized = unquantized_layers(model)
        return model

    def _make_reader(self, reader_class: type[CachedReader], model: Any, max_prefix: int) -> CachedReader:
        """A reader of a causal model. max_prefix: largest number of tokens at the template's beginning that are
        computed once for all texts."""
        prefix = find_prefix_ids(self._ids, self.template, max_prefix) if self._share_prefix else []
        return reader_class(model, prefix, self._pad_id, self.device, self.template.layers)

    @property
    def _pad_id(self) -> int:
        return self._tokenizer.pad_token_id or 0

    @property
    def stats(self) -> EncoderStats:
        return self._reader.stats

    def _ids(self, text: str) -> list[int]:
        # verbose=False: no warnings about the tokenizer's own limit, which does not apply here.
        return list(self._tokenizer(text, verbose=False)["input_ids"])


def load_text_encoder(model: Model, text: Text, device: torch.device) -> Any:
    """The family's text encoder, from the file under stages/encoding/text/ that the catalog names."""
    model_loading.disable_progress_bars()
    module = importlib.import_module(f"stages.encoding.text.{model.family_spec.text_encoder}")
    dtype = getattr(torch, text.precision or model.precision)
    template = text.stored_template(model.template)
    length = text.max_length or template.max_length
    with model_loading.loading_errors(model, "text_encoder"):
        place = locate(model, module.Encoder.components)
        return module.Encoder(*place, template, length, dtype, device, text)


def load_language_model(
    model_class: Any,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    options: Text | Caption,
    unused: Sequence[str] = (),
    section: str = "text",
) -> Any:
    """The model of `folder`, in eval mode, computing in `dtype` on `device` (bf16: in bfloat16).

    int8-quanto and nf4-bnb quantize the matrices of the language model's blocks, except those in `unquantized_layers`;
    embeddings, norms and the vision model are not quantized. nf4-bnb also skips matrices that the class keeps in
    float32, since T5's forward converts a layer's input to the dtype of its weight. options.offload "blocks": the
    weights stay on the host, and each block's weights are on the device while the block computes, with the same result.
    unused: names of submodules that are removed because nothing calls them; their weights may be missing. section:
    section of the configuration that holds `options`. Raises OptionError, and WeightsError if weights are pickled or
    missing.
    """
    _check_options(model_class, device, options, section)
    if options.quantization == "bf16":
        dtype = torch.bfloat16
    settings: dict[str, Any] = {"dtype": dtype}
    if options.attention:
        settings["attn_implementation"] = options.attention
    if options.quantization == "nf4-bnb":
        settings |= {"quantization_config": _nf4_config(model_class, folder, dtype), "device_map": {"": device}}
    model = load_pretrained(model_class, folder, unused, **settings).eval()
    for part in unused:
        model.set_submodule(part, torch.nn.Identity())
    if options.quantization == "int8-quanto":
        from optimum.quanto import freeze, qint8, quantize

        # Quantized on the host, so that the device only needs memory for the smaller weights.
        layers = text_blocks(model)
        quantize(layers, weights=qint8)
        freeze(layers)
    if options.offload == "blocks":
        from accelerate import cpu_offload

        blocks = sorted({type(block).__name__ for block in text_blocks(model)})
        return cpu_offload(model, device, preload_module_classes=blocks)
    return model if options.quantization == "nf4-bnb" else model.to(device)


def text_blocks(model: Any) -> torch.nn.ModuleList:
    """The blocks of a causal language model, or of a T5's encoder."""
    if hasattr(model, "encoder"):
        return model.encoder.block
    inner = getattr(model, "model", model)
    return getattr(inner, "language_model", getattr(inner, "text_model", inner)).layers


def unquantized_layers(model: Any) -> list[str]:
    """Names of matrices in a quantized model's blocks that are not quantized, without the blocks' numbers."""
    parts = (part for block in text_blocks(model) for part in block.named_modules())
    return sorted({name for name, part in parts if type(part) is torch.nn.Linear})


def _check_options(model_class: Any, device: torch.device, options: Text | Caption, section: str) -> None:
    # A private attribute: transformers has no public way to ask before the weights are loaded.
    if options.attention == "sdpa" and not model_class._supports_sdpa:
        raise OptionError(
            f"{section}.attention: sdpa does not support {model_class.__name__}, which soft-caps its attention scores",
            f"remove {section}.attention, or use eager or flash_attention_2",
        )
    if options.attention == "flash_attention_2" and not model_class._supports_flash_attn:
        raise OptionError(
            f"{section}.attention: flash_attention_2 does not support {model_class.__name__}, which adds a bias to its "
            "scores",
            f"remove {section}.attention, or use eager or sdpa",
        )
    if options.attention == "flash_attention_2" and (device.type != "cuda" or not is_installed("flash_attn")):
        raise OptionError(
            f"{section}.attention: flash_attention_2 needs a CUDA device (this is {device.type}) and the package "
            "flash-attn",
            f"remove {section}.attention, or install flash-attn for your torch and card",
        )
    library = QUANTIZATION_LIBRARIES.get(options.quantization)
    if library is None:
        return
    if options.offload != "none":
        raise OptionError(
            f"{section}.quantization: {options.quantization} and {section}.offload: {options.offload} can't be "
            "combined",
            "use one of them; a quantized Qwen2.5-VL-7B takes 5 to 9 GB and needs no offload",
        )
    if not is_installed(library):
        problem = f"{section}.quantization: {options.quantization} needs {library}"
        raise OptionError(problem, f"install it: {find_library(library).command}")


def _nf4_config(model_class: Any, folder: Path, dtype: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig

    with torch.device("meta"), config_errors(f"{folder}/config.json"):
        model = model_class(model_class.config_class.from_pretrained(folder))
    layers = {part for part in text_blocks(model).modules() if isinstance(part, torch.nn.Linear)}
    packed = {p for p in layers if p.out_features % NF4_ROW_MULTIPLE == 0 == p.in_features % NF4_COLUMN_MULTIPLE}
    linear = [(name, part) for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=[name for name, part in linear if part not in packed],
    )
