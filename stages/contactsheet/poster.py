"""PNG contact sheets: originals beside reconstructions, with PSNR, captions and tokens, for a look without a browser.

Drawn from the page's small pictures, onto sheets of at most WIDTH x HEIGHT pixels, so that a sheet of pure noise takes
5 MB and one of photographs a third of that.
"""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from schemas.report import visible
from stages.contactsheet.comparing import FRAMES, Frame
from stages.contactsheet.page import Picture, decibels
from stages.contactsheet.resultpage import Result

Row = dict[str, Any]
WIDTH, HEIGHT, MARGIN, GAP = 1200, 1300, 16, 8  # pixels
CELL = (WIDTH - 2 * MARGIN - 2 * 2 * GAP) // 3  # width of an image's pair
SIDE, STRIP = (CELL - GAP) // 2, (WIDTH - 2 * MARGIN - (FRAMES - 1) * GAP) // FRAMES  # of one picture, at most
LINE, TEXT = 18, 13  # height of a line, and of its letters
CAPTIONS = 2  # of a sample
INK, SOFT, BAD, PAPER = "#1b1f24", "#57606a", "#b42318", "#ffffff"


@dataclass
class Block:
    """Something to draw, all from its own top left corner. lines: (y, text, colour)."""

    width: int
    height: int = 0
    pictures: list[tuple[int, int, Image.Image]] = field(default_factory=list)
    lines: list[tuple[int, str, str]] = field(default_factory=list)
    keep: int = 0  # pixels below it that have to be on the same sheet

    def write(self, text: str, colour: str = INK) -> None:
        """One more line below, cut to the block's width."""
        self.lines.append((self.height, _fitted(visible(text), self.width), colour))
        self.height += LINE

    def show(self, pictures: Sequence[Picture | None], side: int) -> None:
        """A row of pictures below, each at most `side` pixels wide and high; None leaves its place empty."""
        images = [picture and _small(picture, side) for picture in pictures]
        self.pictures += [(i * (side + GAP), self.height, image) for i, image in enumerate(images) if image]
        self.height += max((image.height for image in images if image), default=0) + GAP // 2


def sheets(found: Sequence[Result], table: Sequence[Row]) -> Iterator[bytes]:
    """PNG files, as many as it takes. table: as of `resultpage.lines`."""
    blocks = []
    for line in table:
        mine = [one for one in found if one.bucket == line["bucket"]]
        blocks += [_heading(line), *map(_block, mine)] if mine else []
    for placed, height in _flow(blocks):
        sheet = Image.new("RGB", (WIDTH, height), PAPER)
        for x, y, block in placed:
            _draw(sheet, x, y, block)
        buffer = io.BytesIO()
        sheet.save(buffer, "PNG")
        yield buffer.getvalue()


def _flow(blocks: Sequence[Block]) -> Iterator[tuple[list[tuple[int, int, Block]], int]]:
    """Blocks with their places, left to right and then down, and the height, of one sheet after another."""
    placed: list[tuple[int, int, Block]] = []
    x, y, bottom = MARGIN, MARGIN, MARGIN
    for block in blocks:
        if x + block.width > WIDTH - MARGIN:
            x, y = MARGIN, bottom + 2 * GAP
        if placed and y + block.height + block.keep > HEIGHT - MARGIN:
            yield placed, bottom + MARGIN
            placed, x, y, bottom = [], MARGIN, MARGIN, MARGIN
        placed.append((x, y, block))
        x, bottom = x + block.width + 2 * GAP, max(bottom, y + block.height)
    if placed:
        yield placed, bottom + MARGIN


def _heading(line: Row) -> Block:
    block = Block(WIDTH - 2 * MARGIN, keep=SIDE + 4 * LINE)
    shown = f"{line['shown']} of {line['encoded']} encoded samples"
    block.write(f"{line['bucket']}: {shown}, mean PSNR {line['mean_psnr_db']:.2f} dB; original, then reconstruction")
    return block


def _block(one: Result) -> Block:
    """An image's pairs side by side; a clip's frames in two rows, the original above."""
    frames = one.comparison.frames if one.comparison else ()
    clip = bool(frames) and frames[0].time is not None
    block = Block(WIDTH - 2 * MARGIN if clip else CELL)
    if clip:
        for row in ([frame.original for frame in frames], [frame.reconstruction for frame in frames]):
            block.show(row, STRIP)
    else:
        for frame in frames:
            block.show(_pair(frame), SIDE)
    if one.comparison and one.comparison.condition and not clip:
        block.show(_pair(one.comparison.condition), SIDE)
    said = "" if one.psnr is None else f"   {decibels(one.psnr)}"
    block.write(f"{one.name}{said}")
    if one.unread:
        block.write(f"no original to compare with: {one.unread.reason}", BAD)
    if one.damage:
        block.write(f"can't be decoded: {one.damage.message}", BAD)
    for caption in one.captions[:CAPTIONS]:
        block.write(f"({caption.said}) {caption.text}", SOFT if caption.whole else BAD)
    return block


def _pair(frame: Frame) -> list[Picture | None]:
    return [frame.original, frame.reconstruction]


def _draw(sheet: Image.Image, x: int, y: int, block: Block) -> None:
    for left, top, image in block.pictures:
        sheet.paste(image, (x + left, y + top))
    pen = ImageDraw.Draw(sheet)
    for top, text, colour in block.lines:
        pen.text((x, y + top), text, fill=colour, font=_font())


def _small(picture: Picture, side: int) -> Image.Image:
    image: Image.Image = Image.open(io.BytesIO(picture.data)).convert("RGB")
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    return image


@cache
def _font() -> Any:
    """Pillow's own, which needs no file; it has Latin letters, others are shown as boxes."""
    return ImageFont.load_default(TEXT)


def _fitted(text: str, width: int) -> str:
    """The text, or as much of its beginning as fits with an ellipsis."""
    if _font().getlength(text) <= width:
        return text
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _font().getlength(f"{text[:middle]}…") <= width else (low, middle - 1)
    return f"{text[:low]}…"
