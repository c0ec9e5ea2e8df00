"""What a test sees of an HTML page: its tags, text, cards and pictures."""

import base64
import io
from html.parser import HTMLParser
from typing import Any

import numpy as np
from PIL import Image


class Page(HTMLParser):
    """The tags with their attributes, the visible text, and the articles' text, of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.articles: list[str] = []
        self.text, self._silent, self._inside = "", 0, False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._silent += tag in ("style", "script")
        if tag == "article":
            self.articles.append("")
            self._inside = True

    def handle_endtag(self, tag: str) -> None:
        self._silent -= tag in ("style", "script")
        self._inside = self._inside and tag != "article"

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.text += data
            if self._inside:
                self.articles[-1] += data

    def article(self, words: str) -> str:
        return next(text for text in self.articles if words in text)

    def of(self, tag: str) -> list[dict[str, Any]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def pictures(self, alt: str) -> list[np.ndarray]:
        """Those of <img> whose alternative text has `alt`, as uint8 (H, W, 3)."""
        sources = [image["src"] for image in self.of("img") if alt in image["alt"]]
        return [decoded(source) for source in sources]


def decoded(uri: str) -> np.ndarray:
    head, _, data = uri.partition(",")
    assert head == "data:image/webp;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))


def alike(shown: np.ndarray, pixels: np.ndarray) -> bool:
    """Whether a thumbnail shows these pixels; WebP loses a little, more of small and colourful ones."""
    assert shown.shape == pixels.shape, (shown.shape, pixels.shape)
    return float(np.abs(shown.astype(int) - pixels.astype(int)).mean()) < 8
