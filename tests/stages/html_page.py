"""The parts of an HTML page that tests check: its tags, text, cards and pictures."""

import base64
import io
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
from PIL import Image

HOSTILE = "</title></style></svg>\"'><script>alert(1)</script>{{ 7 * 7 }}{% raw %}\n\u202e\udcff\x00"
# HOSTILE on one line, like names and messages are shown.
ESCAPED = (
    HOSTILE.replace("\n", "\\n").replace("\u202e", "\\u202e").replace("\udcff", "\\udcff").replace("\x00", "\\x00")
)


class Page(HTMLParser):
    """The tags of a page with their attributes, its visible text, and the text of its articles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.articles: list[str] = []
        self.text, self._silent, self._in_article = "", 0, False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._silent += tag in ("style", "script")
        if tag == "article":
            self.articles.append("")
            self._in_article = True

    def handle_endtag(self, tag: str) -> None:
        self._silent -= tag in ("style", "script")
        self._in_article = self._in_article and tag != "article"

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.text += data
            if self._in_article:
                self.articles[-1] += data

    def article(self, words: str) -> str:
        return next(text for text in self.articles if words in text)

    def of(self, tag: str) -> list[dict[str, Any]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def structure(self) -> list[tuple[str, list[str]]]:
        """The tags with the names of their attributes."""
        return [(tag, sorted(attributes)) for tag, attributes in self.tags]

    def pictures(self, alt: str) -> list[np.ndarray]:
        """The pictures of <img> tags with `alt` in their alternative text, as uint8 (H, W, 3)."""
        sources = [image["src"] for image in self.of("img") if alt in image["alt"]]
        return [decoded(source) for source in sources]


def curves(text: str) -> dict[str, dict[str, list[float]]]:
    """Read the finite values of curves from the SVG of a page: chart -> curve -> values."""
    charts: dict[str, dict[str, list[float]]] = {}
    key = name = ""
    start = end = 0.0
    for tag, attributes in Page(text).tags:
        if tag == "figure":
            key = str(attributes.get("id")).removeprefix("plot-")
        elif "data-y" in attributes:
            start, end = map(float, str(attributes["data-y"]).split())
        elif "data-curve" in attributes:
            name = str(attributes["data-curve"])
        elif attributes.get("class") in ("curve", "each"):
            places = [float(place) for place in re.findall(r" (\S+?)(?=[ML]|$)", str(attributes["d"]))]
            charts.setdefault(key, {})[name] = [round(start + place / 1000 * (end - start), 3) for place in places]
    return charts


def decoded(uri: str) -> np.ndarray:
    head, _, data = uri.partition(",")
    assert head == "data:image/webp;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))


def alike(thumbnail: np.ndarray, pixels: np.ndarray) -> bool:
    """Whether a thumbnail shows these pixels. WebP changes them slightly, and more if they are small and colourful."""
    assert thumbnail.shape == pixels.shape, (thumbnail.shape, pixels.shape)
    return float(np.abs(thumbnail.astype(int) - pixels.astype(int)).mean()) < 8
