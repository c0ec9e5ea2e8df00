"""The worker of encode-text: texts -> embeddings."""

from collections.abc import Iterator

from PIL import Image

from cache.shard import Row
from stages import loading
from stages.media.members import Wanted
from stages.media.places import Places
from stages.stage import Job
from stages.text.request import TextRequest
from stages.worker import UnitWorker


class TextWorker(UnitWorker):
    """Members are (request, its length in tokens)."""

    stage, kind, tensors = "encode-text", "text", ("embeds", "pooled")

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.precision = self.config.text.precision or self.config.model.precision
        self.batch_limit = self.config.text.batch_tokens
        self._encoder = loading.text_encoder(self.config, self.device)
        self._places = Places(self.config, self.plan)

    def cost(self, batch: list[tuple[TextRequest, int]]) -> int:
        """Tokens of the padded batch."""
        return len(batch) * max(length for _, length in batch)

    def read(self, name: str) -> tuple[TextRequest, int]:
        text = self.plan.texts[name]
        image = self._image(text) if text["image_id"] else None
        request = TextRequest(text=text["text"], negative=text["negative"], image=image)
        return request, self._encoder.length(request)

    def encode(self, names: list[str], batch: list[tuple[TextRequest, int]]) -> Iterator[Row]:
        results = self._encoder.encode([request for request, _ in batch])
        for name, result in zip(names, results, strict=True):
            tensors = {"embeds": loading.array(result.embeds)}
            if result.pooled is not None:
                tensors["pooled"] = loading.array(result.pooled)
            yield Row(name, tensors, {"tokens": result.tokens, "kept": result.kept})

    def _image(self, text: dict) -> Image.Image:
        """The image inside an i2i prompt, cut as its sample's source is."""
        files = tuple(self._places.of_text(text["text_id"]))
        _, image_HWC = self.fetch(Wanted(files, None, text["image_geometry"]))
        assert image_HWC is not None
        return Image.fromarray(image_HWC)
