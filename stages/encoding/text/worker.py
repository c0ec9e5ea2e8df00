"""The worker of encode-text: texts -> embeddings."""

from collections.abc import Callable, Iterator

import torch
from PIL import Image

from cache.sets.plans import Unit
from cache.shards.shard import ShardRow
from cache.shards.tensor_checks import IMAGE_PLACES, SCALE, SCALED_DTYPES
from schemas.geometry import Bucket
from stages.encoding import model_loading
from stages.encoding.member_reader import MemberPixels, ReadRequest
from stages.encoding.text import base
from stages.encoding.text.base import CLIP_MAX_TOKENS, UNQUANTIZED, TextRequest, TextResult
from stages.encoding.text.reader import PreparedPrompt
from stages.encoding.worker import UnitWorker
from stages.engines.jobs import Job, RoundingError

CLIP_TRUNCATED_REMARK = (
    f"captions cut to CLIP's {CLIP_MAX_TOKENS} tokens, as by the pipeline, for the pooled vector alone"
)
PREFETCHED_BATCHES = 4  # batches of texts without an image that are read ahead


class TextWorker(UnitWorker):
    """Members are tokenized requests."""

    stage, kind, section, tensors = "encode-text", "text", "text", ("embeds", "pooled")
    batch_limit_option = "batch_tokens"
    advice = "set text.offload: blocks or text.quantization, use a larger card, or --device cpu"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.precision = self.config.text.precision or self.config.model.precision
        self.embeds_dtype = self.config.text.embeds_dtype(self.precision)
        self._rounding: dict[str, RoundingError] = {}  # by text id, for rows that are not written yet
        self._encoder = base.load_text_encoder(self.config.model, self.config.text, self.device)

    def column_dtypes(self) -> dict[str, str]:
        scale = {SCALE: "float32"} if self.embeds_dtype in SCALED_DTYPES else {}
        places = {IMAGE_PLACES: "int32"} if self.config.model.template.drops_images else {}
        return super().column_dtypes() | {"embeds": self.embeds_dtype, **scale, **places}

    def member_bytes(self, unit: Unit) -> int:
        if (size := self.config.model.template.image_size) is not None:
            return 3 * size.area * len(self.plan.texts[unit.members[0]]["references"])
        geometry = self.plan.texts[unit.members[0]]["image_geometry"]
        if not geometry:
            return 1
        bucket = Bucket.parse(geometry["bucket"])
        return 3 * bucket.width * bucket.height

    def prefetch_count(self, unit: Unit) -> int:
        """For texts without an image, a few batches, so that the device never waits for the tokenizer: a batch of short
        captions has hundreds of texts. A unit's texts are ordered by length, so its middle text is typical."""
        text = self.plan.texts[unit.members[len(unit.members) // 2]]
        if self.config.model.template.with_image:
            return super().prefetch_count(unit)
        tokens = 8 + len(text["text"]) // 4
        return max(super().prefetch_count(unit), PREFETCHED_BATCHES * self.batch_limit // tokens)

    def read_request(self, name: str) -> ReadRequest | None:
        """The request for the image inside an i2i prompt, with the crop of its sample's source, or for its
        references."""
        text = self.plan.texts[name]
        if (size := self.config.model.template.image_size) is not None:
            return ReadRequest(tuple(self.locations.planned_files("text", name)), None, None, image_size=size)
        if not text["image_id"]:
            return None
        return ReadRequest(tuple(self.locations.planned_files("text", text["text_id"])), None, text["image_geometry"])

    def prepare(self, name: str, read: MemberPixels | None) -> PreparedPrompt:
        text = self.plan.texts[name]
        pictures = () if read is None else (read.image, *read.references)
        images = tuple(Image.fromarray(image) for image in pictures if image is not None)
        return self._encoder.prepare(TextRequest(text=text["text"], negative=text["negative"], images=images))

    def cost(self, batch: list[PreparedPrompt]) -> int:
        """Tokens of the padded batch."""
        return len(batch) * max(item.cost for item in batch)

    def encode(self, names: list[str], batch: list[PreparedPrompt], limit: int) -> Iterator[ShardRow]:
        return self._rows(names, self._encoder.queue(batch))

    def _rows(self, names: list[str], results: Callable[[], list[TextResult]]) -> Iterator[ShardRow]:
        for name, result in zip(names, results(), strict=True):
            tensors = {"embeds": result.embeds}
            if self.embeds_dtype in SCALED_DTYPES:
                dtype = getattr(torch, self.embeds_dtype)
                tensors["embeds"], tensors[SCALE], self._rounding[name] = quantize_tokens(
                    result.embeds, dtype, len(self.config.model.template.layers)
                )
            if result.pooled is not None:
                tensors["pooled"] = result.pooled
            if result.image_places is not None:
                tensors[IMAGE_PLACES] = result.image_places
            info = {"tokens": result.tokens, "kept": result.kept}
            if result.clip_tokens is not None:
                info["clip_tokens"] = result.clip_tokens
            yield ShardRow(name, {key: model_loading.to_array(tensor) for key, tensor in tensors.items()}, info)

    def rounding(self, row: ShardRow) -> RoundingError:
        return self._rounding.pop(row.id, RoundingError())

    def remarks(self, row: ShardRow) -> Iterator[str]:
        if row.info.get("clip_tokens", 0) > CLIP_MAX_TOKENS:
            yield CLIP_TRUNCATED_REMARK
        if self._encoder.unquantized:
            yield f"texts encoded {UNQUANTIZED}: {', '.join(self._encoder.unquantized)}"


#: dtype -> its largest number, to which a token's largest value is scaled.
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def quantize_tokens(
    embeds_LD: torch.Tensor, dtype: torch.dtype, layers: int = 1
) -> tuple[torch.Tensor, torch.Tensor, RoundingError]:
    """Quantize embeddings to 8 bits (`text.storage`). Returns values of `dtype` (L, D); scales, float32 and never zero,
    by which the trainer multiplies the values (`trainer/batch.py`); and the error of values x scales. A value that is
    not finite makes its scale NaN or infinite.

    layers: number of layers whose hidden states are concatenated along D. The scales are (L,) for one layer, and (L,
    layers) for several, since the numbers of a late layer are many times as large as the numbers of an early layer.
    """
    exact_LKD = embeds_LD.float().unflatten(1, (layers, -1))
    scale_LK = (exact_LKD.abs().amax(2) / LARGEST[dtype]).clamp(min=torch.finfo(torch.float32).tiny)
    scaled = exact_LKD / scale_LK[..., None]
    values = (scaled.round() if dtype == torch.int8 else scaled).to(dtype)
    error = (values.float() * scale_LK[..., None] - exact_LKD).double()
    squares = exact_LKD.double().square().sum().item()
    rounding = RoundingError(squares, error.square().sum().item(), error.abs().max().item())
    return values.flatten(1), scale_LK if layers > 1 else scale_LK[:, 0], rounding
