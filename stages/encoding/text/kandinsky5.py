"""Kandinsky 5: Qwen2.5-VL's hidden states and CLIP's pooled output, equal to the pipelines' `encode_prompt`.

The template's prefix is computed once (`prefix_cache.py`), an image's features once for each distinct image
(`stages.encoding.text.prompt_images`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import CLIPTextModel, CLIPTokenizer, Qwen2_5_VLForConditionalGeneration

from cache.weights import WeightsError, load_pretrained
from schemas.prompts import render_prompt
from stages.encoding.text.base import TextEncoder
from stages.encoding.text.prefix_cache import PrefixCachedModel
from stages.encoding.text.prompt_images import (
    CachedImageProcessor,
    ImagePromptModel,
    PreparedImagePrompt,
    ProcessedImage,
)
from stages.encoding.text.request import CLIP_MAX_TOKENS, TextRequest, TextResult, request_error

# Beside the image's own tokens, after the caption: <|vision_start|>, <|vision_end|>, <|im_end|>.
IMAGE_SUFFIX_TOKENS = 3


@dataclass(frozen=True)
class TokenisedPrompt:
    """ids: what the model reads, template included. untruncated: their number without the limit."""

    ids: list[int]
    untruncated: int


@dataclass(frozen=True)
class KandinskyPrompt(PreparedImagePrompt):
    """clip_ids: the caption alone, for CLIP, and cut to its limit; clip_tokens: their number without it."""

    clip_ids: tuple[int, ...] = ()
    clip_tokens: int = 0


class Encoder(TextEncoder):
    """Qwen2.5-VL and CLIP. max_length: tokens kept after the template's prefix."""

    components = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")

    def _load(self, folder: Path) -> PrefixCachedModel:
        assert self.template.crop is not None, f"{self.template.name} names no prefix length"
        self.crop, with_image = self.template.crop, self.template.with_image
        self._clip_tokenizer = CLIPTokenizer.from_pretrained(folder / "tokenizer_2")
        if not with_image:
            self._refuse_short_template()
        self._images = CachedImageProcessor(folder / "tokenizer") if with_image else None
        # Loaded whole, as by the pipeline, so that the weights' names are understood alike in any checkpoint;
        # then used without lm_head, whose output for every token would be far larger than what is kept.
        unused = ("lm_head",) if with_image else ("lm_head", "model.visual")
        whole = self._language_model(Qwen2_5_VLForConditionalGeneration, folder, unused)
        self._clip = load_pretrained(CLIPTextModel, folder / "text_encoder_2", dtype=self.dtype).to(self.device).eval()
        self._image_id = whole.config.image_token_id
        self._media_ids = {whole.config.image_token_id, whole.config.video_token_id}
        if with_image:
            return self._make_reader(ImagePromptModel, whole.model, self.crop)
        return self._make_reader(PrefixCachedModel, whole.model.language_model, self.crop)

    def _refuse_short_template(self) -> None:
        """WeightsError where cutting the template's tokens off would cut captions too."""
        tokens = len(self._ids(render_prompt("", self.template)))
        if tokens <= self.crop:
            raise WeightsError(
                f"{self.source}: its tokenizer makes {tokens} tokens of the template {self.template.name} with an "
                f"empty caption, and the pipeline cuts the first {self.crop} off: no token of a short caption would "
                "be left",
                "take tokenizer/ from the repository that the text encoder is from",
            )

    def prepare(self, request: TextRequest) -> KandinskyPrompt:
        """The request tokenised and its image made ready. Raises RequestError for what can't be encoded."""
        with self._lock:
            tokens = self._tokens(request)
            clip_ids = self._clip_tokenizer(request.text, verbose=False)["input_ids"]
        if len(tokens.ids) <= self.crop:
            problem = f"it has {len(tokens.ids)} tokens with its template, of which the first {self.crop} are cut off"
            raise request_error("no-tokens", request, problem, "take the tokenizer of the checkpoint's own repository")
        shared = self._reader.shared_length(tokens.ids)
        picture, positions = self._picture(request, tokens.ids, shared)
        # As the pipeline cuts: a caption's first tokens, then the end that every caption has.
        cut = clip_ids if len(clip_ids) <= CLIP_MAX_TOKENS else clip_ids[: CLIP_MAX_TOKENS - 1] + clip_ids[-1:]
        return KandinskyPrompt(tokens.ids, shared, tokens.untruncated, picture, positions, tuple(cut), len(clip_ids))

    def encode(self, batch: Sequence[KandinskyPrompt]) -> list[TextResult]:
        """One forward pass; another one for prompts that do not begin with the template's own ids."""
        pooled_BD = self._pooled(batch)
        results = []
        for row, (prompt, hidden_LD) in enumerate(zip(batch, self._reader.hidden_states(batch), strict=True)):
            embeds_LD = hidden_LD[self.crop - prompt.shared :].to("cpu", self.dtype, copy=True)
            untruncated, kept = prompt.untruncated - self.crop, embeds_LD.shape[0]
            results.append(TextResult(embeds_LD, pooled_BD[row], untruncated, kept, prompt.clip_tokens))
        return results

    def _tokens(self, request: TextRequest) -> TokenisedPrompt:
        text = render_prompt(request.text, self.template, negative=request.negative)
        if self.template.with_image:
            return self._tokens_with_image(text, request)
        assert request.image is None, f"{self.template.name} takes no image"
        ids = self._ids(text)
        if len(ids) > self.crop + self.max_length:
            return TokenisedPrompt(self._shortened(text, ids), len(ids))
        return TokenisedPrompt(ids, len(ids))

    def _shortened(self, text: str, ids: list[int]) -> list[int]:
        """An over-long prompt, cut as the pipeline cuts it.

        As many characters go off the end, the template's own included, as the surplus tokens decode to; then
        whatever still stands over.
        """
        removed = self._tokenizer.decode(ids[self.crop : -2][self.max_length - 2 :])
        if removed:
            ids = self._ids(text[: -len(removed)])
        return ids[: self.crop + self.max_length]

    def _tokens_with_image(self, text: str, request: TextRequest) -> TokenisedPrompt:
        """The placeholder expanded to the image's tokens, an over-long caption cut, and what follows it kept.

        Here the pipeline is not followed. It cuts at the end of the prompt, which is the template's and not the
        caption's: a caption one or two tokens over the limit loses `<|im_end|>` and `<|vision_end|>` in its place, and
        from three on the cut reaches the image's tokens and the pipeline fails.
        """
        assert request.image is not None and self._images is not None, f"{self.template.name} needs an image"
        ids, patches = self._ids(text), self._grid(request)
        if sum(token in self._media_ids for token in ids) != 1:
            problem = "contains <|image_pad|> or <|video_pad|>, which stand for media inside a prompt"
            raise request_error("placeholder-in-caption", request, problem, "remove them from the caption")
        place = ids.index(self._image_id)
        head, start, tail = ids[: place - 1], ids[place - 1], ids[place + 1 :]
        room = self.crop + self.max_length - patches - IMAGE_SUFFIX_TOKENS
        if room < self.crop:
            problem = f"its image takes {patches} tokens and text.max_length is {self.max_length}"
            raise request_error("image-too-long", request, problem, "raise text.max_length or lower the resolution")
        suffix = [start, *[self._image_id] * patches, *tail]
        return TokenisedPrompt(head[:room] + suffix, len(head) + len(suffix))

    def _grid(self, request: TextRequest) -> int:
        """Tokens of the request's image."""
        assert request.image is not None and self._images is not None
        try:
            return self._images.tokens(request.image)
        except (ValueError, ZeroDivisionError) as error:
            raise request_error("image-shape", request, f"its image can't be used ({error})", "crop it") from error

    def _picture(
        self, request: TextRequest, ids: list[int], shared: int
    ) -> tuple[ProcessedImage | None, torch.Tensor | None]:
        """The request's image and the positions_3L around it; None for templates without."""
        if self._images is None or request.image is None:
            return None, None
        assert isinstance(self._reader, ImagePromptModel)
        picture = self._images.picture(request.image)
        return picture, self._reader.place(ids, shared, picture)

    @torch.no_grad()
    def _pooled(self, batch: Sequence[KandinskyPrompt]) -> torch.Tensor:
        """CLIP's pooled_BD of the captions alone, without a template.

        Padded to the longest instead of to 77: the model is causal and pools at a caption's own last token.
        """
        longest = max(len(prompt.clip_ids) for prompt in batch)
        pad = self._clip_tokenizer.pad_token_id
        ids_BL = torch.tensor([[*prompt.clip_ids, *[pad] * (longest - len(prompt.clip_ids))] for prompt in batch])
        return self._clip(input_ids=ids_BL.to(self.device)).pooler_output.to("cpu", self.dtype)
