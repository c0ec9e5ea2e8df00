"""A text encoder's requests and results. Imports no torch, so that any program may import it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from schemas.text_format import shorten
from stages.media.errors import MediaError

if TYPE_CHECKING:
    import torch
    from PIL import Image

CLIP_MAX_TOKENS = 77  # tokens of a caption that CLIP reads, as in the pipelines


@dataclass(frozen=True)
class TextRequest:
    """One caption to encode.

    text: the cleaned caption, without its template. negative: encode as the pipeline encodes negative prompts (null
    prompts too). image: for templates with an image, the source cropped to its bucket (RGB).
    """

    text: str
    negative: bool = False
    image: "Image.Image | None" = None


@dataclass(frozen=True)
class PreparedPrompt:
    """A request tokenised, and cut to the limit.

    ids: the model's input, template and image included. shared: how many of the first ids are the template's prefix,
    whose keys and values are computed already. untruncated: the number of ids without the limit.
    """

    ids: list[int]
    shared: int
    untruncated: int

    @property
    def cost(self) -> int:
        """Tokens that a forward pass computes for this text."""
        return len(self.ids) - self.shared


@dataclass
class TextResult:
    """One caption encoded, on the CPU in the encoder's dtype.

    embeds: (L, D), real tokens only. pooled: (D2,), or None where the family has none. tokens: L without the limit on
    the length. kept: L. clip_tokens: CLIP's tokens of the caption, which are cut to CLIP_MAX_TOKENS; None without CLIP.
    """

    embeds: "torch.Tensor"
    pooled: "torch.Tensor | None"
    tokens: int
    kept: int
    clip_tokens: int | None = None


@dataclass
class EncoderStats:
    """shared, whole: texts behind the shared prefix, and texts computed from their first token. images: vision passes;
    reused: texts whose image's features were in the cache."""

    shared: int = 0
    whole: int = 0
    images: int = 0
    reused: int = 0


class RequestError(MediaError):
    """A caption, or the image in it, that can't be encoded; it is set aside."""


def request_error(reason: str, request: TextRequest, problem: str, advice: str) -> RequestError:
    return RequestError(reason, f"caption {shorten(request.text)!r}", problem, advice)
