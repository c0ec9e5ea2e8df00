"""Qwen-Image-Edit: Qwen2.5-VL's hidden states of the references, the caption and the template's end, equal to the
pipelines' `encode_prompt`, which does not cut. A prompt over text.max_length is cut after the references."""

from pathlib import Path
from typing import Any

import torch

from stages.encoding.text.base import TextRequest, request_error
from stages.encoding.text.qwen_image import Encoder as QwenImageEncoder
from stages.encoding.text.qwen_vl_images import CachedImageProcessor, ImagePromptModel, PreparedImagePrompt
from stages.encoding.text.reader import PrefixCachedModel, PreparedPrompt


class Encoder(QwenImageEncoder):
    components: tuple[str, ...] = ("text_encoder", "tokenizer", "processor")

    def _load(self, folder: Path) -> PrefixCachedModel:
        return self._load_with_images(ImagePromptModel, self._load_qwen(folder).model, folder)

    def _load_with_images(self, reader: type[ImagePromptModel], model: Any, folder: Path) -> ImagePromptModel:
        """A reader of prompts with images, and their processor. model: the vision-language model without its head."""
        self._images = CachedImageProcessor(folder / "processor")
        self._image_id = model.config.image_token_id
        self._media_ids = {model.config.image_token_id, model.config.video_token_id}
        ids = self._ids(self.template.render(""))
        before_images = ids.index(self._image_id) if self._image_id in ids else len(ids)
        return self._make_reader(reader, model, min(self.crop, before_images))

    def prepare(self, request: TextRequest) -> PreparedPrompt:
        """Tokenize a request and prepare its references. Raises RequestError if the request can't be encoded."""
        assert request.images, f"{self.template.name} needs reference images"
        assert isinstance(self._reader, ImagePromptModel)
        numbers = range(1, len(request.images) + 1)
        references = self.template.separator.join(self.template.reference.replace("{}", str(n)) for n in numbers)
        with self._lock:
            ids = self._ids(self.template.render(references + request.text, negative=request.negative))
        if sum(token in self._media_ids for token in ids) != len(request.images):
            problem = "contains <|image_pad|> or <|video_pad|>, which are placeholders for media"
            raise request_error("placeholder-in-caption", request, problem, "remove them from the caption")
        try:
            counts = iter([self._images.tokens(image) for image in request.images])
        except (ValueError, ZeroDivisionError) as error:
            raise request_error("image-shape", request, f"an image can't be used ({error})", "crop it") from error
        ids = [copy for token in ids for copy in [token] * (next(counts) if token == self._image_id else 1)]
        self._check_length(ids, request)
        image_tokens = ids.count(self._image_id)
        with self._lock:
            dropped = image_tokens if self.template.drops_images else 0
            prompt_ids = self._cut(ids, self.crop + self.max_length + dropped)
        if prompt_ids.count(self._image_id) < image_tokens:
            problem = f"its references take {image_tokens} tokens, and text.max_length is {self.max_length}"
            raise request_error("image-too-long", request, problem, "raise text.max_length, or give fewer references")
        prefix_length, pictures = (
            self._reader.shared_length(prompt_ids),
            tuple(map(self._images.picture, request.images)),
        )
        if self.template.sequential:
            positions_3L = torch.arange(prefix_length, len(prompt_ids)).expand(3, -1)
        else:
            positions_3L = self._reader.prompt_positions(prompt_ids, prefix_length, pictures)
        return PreparedImagePrompt(prompt_ids, prefix_length, len(ids), pictures, positions_3L)
