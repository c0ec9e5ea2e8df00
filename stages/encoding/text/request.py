"""What a text encoder is asked for and what it answers. Imports no torch, so that any program may."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from schemas.text_format import shorten
from stages.media.errors import MediaError

if TYPE_CHECKING:
    import torch
    from PIL import Image

#: Tokens of a caption that CLIP reads, in the pipelines as here.
CLIP_MAX_TOKENS = 77


@dataclass(frozen=True)
class TextRequest:
    """One caption to encode.

    text: the cleaned caption, without its template. negative: it takes the pipeline's path for negative
    prompts (null prompts too). image: for templates with an image, the source fitted to its bucket (RGB).
    """

    text: str
    negative: bool = False
    image: "Image.Image | None" = None


@dataclass(frozen=True)
class PreparedPrompt:
    """A request tokenised, and cut to the limit.

    ids: what the model reads, template and image included. shared: how many of the first of them are the
    template's prefix, whose keys and values the encoder holds. untruncated: tokens without the limit.
    """

    ids: list[int]
    shared: int
    untruncated: int

    @property
    def cost(self) -> int:
        """Tokens that a forward pass computes for this text itself."""
        return len(self.ids) - self.shared


@dataclass
class TextResult:
    """One caption encoded, on the CPU in the encoder's dtype.

    embeds: (L, D), real tokens only. pooled: (D2,), or None where the family has none. tokens: what L would
    be without a limit on the length. kept: L. clip_tokens: of the caption for CLIP, which reads the first
    CLIP_MAX_TOKENS; None where there is no CLIP.
    """

    embeds: "torch.Tensor"
    pooled: "torch.Tensor | None"
    tokens: int
    kept: int
    clip_tokens: int | None = None


@dataclass
class EncoderStats:
    """What an encoder did so far.

    shared, whole: texts behind the shared prefix, and texts computed from their first token. images: vision
    passes; reused: texts whose image's features were at hand.
    """

    shared: int = 0
    whole: int = 0
    images: int = 0
    reused: int = 0


class RequestError(MediaError):
    """A caption (or the image in it) that can't be encoded; it is set aside, and nothing else stops."""


def request_error(reason: str, request: TextRequest, problem: str, advice: str) -> RequestError:
    """The RequestError of a request, named by the beginning of its caption."""
    return RequestError(reason, f"caption {shorten(request.text)!r}", problem, advice)
