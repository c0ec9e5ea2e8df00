"""The worker of encode-text: texts -> embeddings."""

from collections.abc import Iterator

from PIL import Image

from cache.generations import Unit
from cache.shard import Row
from schemas.geometry import Bucket
from stages import loading
from stages.engines.jobs import Job
from stages.media.members import Read, Wanted
from stages.text import models
from stages.text.request import CLIP_LENGTH, Prepared, TextRequest
from stages.worker import UnitWorker

CUT_FOR_CLIP = f"captions cut to CLIP's {CLIP_LENGTH} tokens, as by the pipeline, for the pooled vector alone"
UNQUANTIZED = "texts encoded with some matrices as they are, since nf4-bnb can't pack their sides"
BATCHES_AHEAD = 4  # by an estimate of their size: of texts one is being filled while another is encoded


class TextWorker(UnitWorker):
    """Members are tokenised requests."""

    stage, kind, section, tensors = "encode-text", "text", "text", ("embeds", "pooled")
    limited_by = "batch_tokens"
    advice = "set text.offload: blocks or text.quantization, use a larger card, or --device cpu"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.precision = self.config.text.precision or self.config.model.precision
        self._encoder = models.text_encoder(self.config, self.device)

    def member_bytes(self, unit: Unit) -> int:
        geometry = self.plan.texts[unit.members[0]]["image_geometry"]
        if not geometry:
            return 1
        bucket = Bucket.parse(geometry["bucket"])
        return 3 * bucket.width * bucket.height

    def members_ahead(self, unit: Unit) -> int:
        """Of texts without an image some batches, so that the device waits for none to be tokenised: a batch of short
        captions has hundreds. In a unit they are in the order of their length."""
        text = self.plan.texts[unit.members[len(unit.members) // 2]]
        if text["image_geometry"]:
            return super().members_ahead(unit)
        tokens = 8 + len(text["text"]) // 4
        return max(super().members_ahead(unit), BATCHES_AHEAD * self.batch_limit // tokens)

    def wanted(self, name: str) -> Wanted | None:
        """The image inside an i2i prompt, cut as its sample's source is."""
        text = self.plan.texts[name]
        if not text["image_id"]:
            return None
        return Wanted(tuple(self.places.of_text(text["text_id"])), None, text["image_geometry"])

    def prepare(self, name: str, read: Read | None) -> Prepared:
        text = self.plan.texts[name]
        image = None
        if read is not None:
            assert read.image is not None
            image = Image.fromarray(read.image)
        return self._encoder.prepare(TextRequest(text=text["text"], negative=text["negative"], image=image))

    def cost(self, batch: list[Prepared]) -> int:
        """Tokens of the padded batch."""
        return len(batch) * max(item.cost for item in batch)

    def encode(self, names: list[str], batch: list[Prepared], limit: int) -> Iterator[Row]:
        for name, result in zip(names, self._encoder.encode(batch), strict=True):
            tensors = {"embeds": loading.array(result.embeds)}
            if result.pooled is not None:
                tensors["pooled"] = loading.array(result.pooled)
            info = {"tokens": result.tokens, "kept": result.kept}
            if result.clip_tokens is not None:
                info["clip_tokens"] = result.clip_tokens
            yield Row(name, tensors, info)

    def remarks(self, row: Row) -> Iterator[str]:
        if row.info.get("clip_tokens", 0) > CLIP_LENGTH:
            yield CUT_FOR_CLIP
        if self._encoder.unquantized:
            yield f"{UNQUANTIZED}: {', '.join(self._encoder.unquantized)}"
