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

from schemas.text_format import escape_unprintable
from stages.pages.clip_comparison import MAX_COMPARED_FRAMES, ComparedFrame
from stages.pages.html import Picture, format_decibels
from stages.pages.result_page import SampleResult

TableRow = dict[str, Any]
WIDTH, HEIGHT, MARGIN, GAP = 1200, 1300, 16, 8  # pixels
CELL_WIDTH = (WIDTH - 2 * MARGIN - 2 * 2 * GAP) // 3  # width of an image's pair
PICTURE_SIDE, FRAME_SIDE = (
    (CELL_WIDTH - GAP) // 2,
    (WIDTH - 2 * MARGIN - (MAX_COMPARED_FRAMES - 1) * GAP) // MAX_COMPARED_FRAMES,
)  # of one picture, at most
LINE_HEIGHT, FONT_SIZE = 18, 13  # height of a line, and of its letters
MAX_CAPTIONS = 2  # of a sample
TEXT_COLOUR, MUTED_COLOUR, PROBLEM_COLOUR, BACKGROUND = "#1b1f24", "#57606a", "#b42318", "#ffffff"


@dataclass
class SheetBlock:
    """Something to draw, all from its own top left corner. lines: (y, text, colour)."""

    width: int
    height: int = 0
    pictures: list[tuple[int, int, Image.Image]] = field(default_factory=list)
    lines: list[tuple[int, str, str]] = field(default_factory=list)
    keep: int = 0  # pixels below it that have to be on the same sheet

    def write(self, text: str, colour: str = TEXT_COLOUR) -> None:
        """One more line below, cut to the block's width."""
        self.lines.append((self.height, _fit_text(escape_unprintable(text), self.width), colour))
        self.height += LINE_HEIGHT

    def show(self, pictures: Sequence[Picture | None], side: int) -> None:
        """A row of pictures below, each at most `side` pixels wide and high; None leaves its place empty."""
        images = [picture and _shrink(picture, side) for picture in pictures]
        self.pictures += [(i * (side + GAP), self.height, image) for i, image in enumerate(images) if image]
        self.height += max((image.height for image in images if image), default=0) + GAP // 2


def draw_sheets(found: Sequence[SampleResult], table: Sequence[TableRow]) -> Iterator[bytes]:
    """PNG files, as many as it takes. table: as of `resultpage.lines`."""
    blocks = []
    for line in table:
        mine = [one for one in found if one.bucket == line["bucket"]]
        blocks += [_heading_block(line), *map(_result_block, mine)] if mine else []
    for placed, height in _layout_blocks(blocks):
        sheet = Image.new("RGB", (WIDTH, height), BACKGROUND)
        for x, y, block in placed:
            _draw_block(sheet, x, y, block)
        buffer = io.BytesIO()
        sheet.save(buffer, "PNG")
        yield buffer.getvalue()


def _layout_blocks(blocks: Sequence[SheetBlock]) -> Iterator[tuple[list[tuple[int, int, SheetBlock]], int]]:
    """Blocks with their places, left to right and then down, and the height, of one sheet after another."""
    placed: list[tuple[int, int, SheetBlock]] = []
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


def _heading_block(line: TableRow) -> SheetBlock:
    block = SheetBlock(WIDTH - 2 * MARGIN, keep=PICTURE_SIDE + 4 * LINE_HEIGHT)
    shown = f"{line['shown']} of {line['encoded']} encoded samples"
    block.write(f"{line['bucket']}: {shown}, mean PSNR {line['mean_psnr_db']:.2f} dB; original, then reconstruction")
    return block


def _result_block(one: SampleResult) -> SheetBlock:
    """An image's pairs side by side; a clip's frames in two rows, the original above."""
    frames = one.comparison.frames if one.comparison else ()
    clip = bool(frames) and frames[0].time is not None
    block = SheetBlock(WIDTH - 2 * MARGIN if clip else CELL_WIDTH)
    if clip:
        for row in ([frame.original for frame in frames], [frame.reconstruction for frame in frames]):
            block.show(row, FRAME_SIDE)
    else:
        for frame in frames:
            block.show(_original_and_reconstruction(frame), PICTURE_SIDE)
    if one.comparison and one.comparison.condition and not clip:
        block.show(_original_and_reconstruction(one.comparison.condition), PICTURE_SIDE)
    said = "" if one.psnr is None else f"   {format_decibels(one.psnr)}"
    block.write(f"{one.name}{said}")
    if one.unread:
        block.write(f"no original to compare with: {one.unread.reason}", PROBLEM_COLOUR)
    if one.damage:
        block.write(f"can't be decoded: {one.damage.message}", PROBLEM_COLOUR)
    for caption in one.captions[:MAX_CAPTIONS]:
        block.write(f"({caption.token_summary}) {caption.text}", MUTED_COLOUR if caption.whole else PROBLEM_COLOUR)
    return block


def _original_and_reconstruction(frame: ComparedFrame) -> list[Picture | None]:
    return [frame.original, frame.reconstruction]


def _draw_block(sheet: Image.Image, x: int, y: int, block: SheetBlock) -> None:
    for left, top, image in block.pictures:
        sheet.paste(image, (x + left, y + top))
    pen = ImageDraw.Draw(sheet)
    for top, text, colour in block.lines:
        pen.text((x, y + top), text, fill=colour, font=_font())


def _shrink(picture: Picture, side: int) -> Image.Image:
    image: Image.Image = Image.open(io.BytesIO(picture.data)).convert("RGB")
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    return image


@cache
def _font() -> Any:
    """Pillow's own, which needs no file; it has Latin letters, others are shown as boxes."""
    return ImageFont.load_default(FONT_SIZE)


def _fit_text(text: str, width: int) -> str:
    """The text, or as much of its beginning as fits with an ellipsis."""
    if _font().getlength(text) <= width:
        return text
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _font().getlength(f"{text[:middle]}…") <= width else (low, middle - 1)
    return f"{text[:low]}…"
