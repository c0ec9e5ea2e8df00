"""Kandinsky 5: Qwen2.5-VL's hidden states and CLIP's pooled output, equal to the pipelines' `encode_prompt`.

The template's prefix is computed once (`prefix_cache.py`), and so are the features of each distinct image
(`prompt_images.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import CLIPTextModel, CLIPTokenizer, Qwen2_5_VLForConditionalGeneration

from cache.models.weights import WeightsError, load_pretrained
from stages.encoding.text.base import CLIP_MAX_TOKENS, TextEncoder, TextRequest, TextResult, request_error
from stages.encoding.text.prefix_cache import PrefixCachedModel
from stages.encoding.text.prompt_images import CachedImageProcessor, ImagePromptModel, PreparedImagePrompt

# After the caption, in addition to the image's own tokens: <|vision_start|>, <|vision_end|>, <|im_end|>.
IMAGE_SUFFIX_TOKENS = 3


@dataclass(frozen=True)
class KandinskyPrompt(PreparedImagePrompt):
    """clip_ids: the caption alone, for CLIP, cut to its limit; clip_tokens: their number without the limit."""

    clip_ids: tuple[int, ...] = ()
    clip_tokens: int = 0


class Encoder(TextEncoder):
    """Qwen2.5-VL and CLIP. max_length: tokens kept after the template's prefix."""

    components = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")

    def _load(self, folder: Path) -> PrefixCachedModel:
        assert self.template.crop is not None, f"{self.template.name} names no prefix length"
        self.crop, with_image = self.template.crop, self.template.with_image
        self._clip_tokenizer = CLIPTokenizer.from_pretrained(folder / "tokenizer_2")
        template_tokens = len(self._ids(self.template.render("")))
        if not with_image and template_tokens <= self.crop:
            raise WeightsError(
                f"{self.source}: its tokenizer makes {template_tokens} tokens of the template {self.template.name} "
                f"with an empty caption, and the pipeline cuts the first {self.crop} off: no token of a short caption "
                "would be left",
                "use tokenizer/ of the repository that the text encoder is from",
            )
        self._images = CachedImageProcessor(folder / "tokenizer") if with_image else None
        # Loaded whole, as by the pipeline, so that the weights' names are understood in any checkpoint; then used
        # without lm_head, whose output for every token would be far larger than what is kept.
        unused = ("lm_head",) if with_image else ("lm_head", "model.visual")
        qwen = self._language_model(Qwen2_5_VLForConditionalGeneration, folder, unused)
        self._clip = load_pretrained(CLIPTextModel, folder / "text_encoder_2", dtype=self.dtype).to(self.device).eval()
        self._image_id = qwen.config.image_token_id
        self._media_ids = {qwen.config.image_token_id, qwen.config.video_token_id}
        if with_image:
            return self._make_reader(ImagePromptModel, qwen.model, self.crop)
        return self._make_reader(PrefixCachedModel, qwen.model.language_model, self.crop)

    def prepare(self, request: TextRequest) -> KandinskyPrompt:
        """Raises RequestError for what can't be encoded."""
        with self._lock:
            ids, untruncated = self._tokenize(request)
            clip_ids = self._clip_tokenizer(request.text, verbose=False)["input_ids"]
        if len(ids) <= self.crop:
            problem = f"it has {len(ids)} tokens with its template, of which the first {self.crop} are cut off"
            raise request_error("no-tokens", request, problem, "use the tokenizer of the checkpoint's own repository")
        shared = self._reader.shared_length(ids)
        picture = positions_3L = None
        if self._images is not None and request.image is not None:
            assert isinstance(self._reader, ImagePromptModel)
            picture = self._images.picture(request.image)
            positions_3L = self._reader.prompt_positions(ids, shared, picture)
        # As the pipeline cuts: a caption's first tokens, then the end token.
        cut = clip_ids if len(clip_ids) <= CLIP_MAX_TOKENS else clip_ids[: CLIP_MAX_TOKENS - 1] + clip_ids[-1:]
        return KandinskyPrompt(ids, shared, untruncated, picture, positions_3L, tuple(cut), len(clip_ids))

    def encode(self, batch: Sequence[KandinskyPrompt]) -> list[TextResult]:
        """One forward pass; another one for prompts that do not begin with the template's own ids."""
        pooled_BD = self._pooled(batch)
        results = []
        for row, (prompt, hidden_LD) in enumerate(zip(batch, self._reader.hidden_states(batch), strict=True)):
            embeds_LD = hidden_LD[self.crop - prompt.shared :].to("cpu", self.dtype, copy=True)
            untruncated, kept = prompt.untruncated - self.crop, embeds_LD.shape[0]
            results.append(TextResult(embeds_LD, pooled_BD[row], untruncated, kept, prompt.clip_tokens))
        return results

    def _tokenize(self, request: TextRequest) -> tuple[list[int], int]:
        """The prompt's ids, and their number without the limit.

        An over-long prompt is cut as by the pipeline: as many characters at the end, those of the template included,
        as the surplus tokens decode to; then what is still over the limit.
        """
        text = self.template.render(request.text, negative=request.negative)
        if self.template.with_image:
            return self._tokenize_with_image(text, request)
        assert request.image is None, f"{self.template.name} takes no image"
        ids, limit = self._ids(text), self.crop + self.max_length
        untruncated = len(ids)
        if untruncated > limit:
            if removed := self._tokenizer.decode(ids[self.crop : -2][self.max_length - 2 :]):
                ids = self._ids(text[: -len(removed)])
            ids = ids[:limit]
        return ids, untruncated

    def _tokenize_with_image(self, text: str, request: TextRequest) -> tuple[list[int], int]:
        """The placeholder becomes the image's tokens; an over-long caption is cut, and what follows it is kept.

        This differs from the pipeline, which cuts the end of the prompt, and that is the template's: a caption one or
        two tokens over the limit loses `<|im_end|>` and `<|vision_end|>` instead, and from three on the cut reaches
        the image's tokens and the pipeline fails.
        """
        assert request.image is not None and self._images is not None, f"{self.template.name} needs an image"
        ids = self._ids(text)
        try:
            patches = self._images.tokens(request.image)
        except (ValueError, ZeroDivisionError) as error:
            raise request_error("image-shape", request, f"its image can't be used ({error})", "crop it") from error
        if sum(token in self._media_ids for token in ids) != 1:
            problem = "contains <|image_pad|> or <|video_pad|>, which stand for media inside a prompt"
            raise request_error("placeholder-in-caption", request, problem, "remove them from the caption")
        placeholder = ids.index(self._image_id)
        head, start, tail = ids[: placeholder - 1], ids[placeholder - 1], ids[placeholder + 1 :]
        room = self.crop + self.max_length - patches - IMAGE_SUFFIX_TOKENS
        if room < self.crop:
            problem = f"its image takes {patches} tokens and text.max_length is {self.max_length}"
            raise request_error("image-too-long", request, problem, "raise text.max_length or lower the resolution")
        suffix = [start, *[self._image_id] * patches, *tail]
        return head[:room] + suffix, len(head) + len(suffix)

    @torch.no_grad()
    def _pooled(self, batch: Sequence[KandinskyPrompt]) -> torch.Tensor:
        """CLIP's pooled_BD of the captions alone, without a template.

        Padded to the longest instead of to 77: the model is causal and pools at a caption's own last token.
        """
        longest, pad = max(len(prompt.clip_ids) for prompt in batch), self._clip_tokenizer.pad_token_id
        ids_BL = torch.tensor([[*prompt.clip_ids, *[pad] * (longest - len(prompt.clip_ids))] for prompt in batch])
        return self._clip(input_ids=ids_BL.to(self.device)).pooler_output.to("cpu", self.dtype)
