"""PNG contact sheets: originals beside reconstructions, with PSNR, captions and tokens, to view without a browser.

Drawn from the page's small pictures, on sheets of at most WIDTH x HEIGHT pixels: a sheet of noise takes 5 MB, one of
photographs a third of that.
"""

import io
import unicodedata
from bisect import bisect
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from schemas.text_format import escape_unprintable
from stages.pages.clip_comparison import MAX_COMPARED_FRAMES
from stages.pages.html import Picture, format_decibels
from stages.pages.result_page import SampleResult

TableRow = dict[str, Any]
WIDTH, HEIGHT, MARGIN, GAP = 1200, 1300, 16, 8  # pixels
CELL_WIDTH = (WIDTH - 2 * MARGIN - 2 * 2 * GAP) // 3  # original and reconstruction of an image
PICTURE_SIDE = (CELL_WIDTH - GAP) // 2  # of an image, at most
FRAME_SIDE = (WIDTH - 2 * MARGIN - (MAX_COMPARED_FRAMES - 1) * GAP) // MAX_COMPARED_FRAMES  # of a frame, at most
LINE_HEIGHT, FONT_SIZE = 18, 13  # pixels
MAX_CAPTIONS = 2  # of a sample
FONTS = ("DejaVuSans.ttf", "NotoSans-Regular.ttf", "LiberationSans-Regular.ttf", "Arial.ttf", "arial.ttf")
ELLIPSIS = "…"
TEXT_COLOUR, MUTED_COLOUR, PROBLEM_COLOUR, BACKGROUND = "#1b1f24", "#57606a", "#b42318", "#ffffff"


@dataclass
class SheetBlock:
    """Something to draw, with coordinates from its top left corner. pictures: (x, y, image). lines: (y, text, colour).
    keep: pixels below it that must be on the same sheet."""

    width: int
    height: int = 0
    pictures: list[tuple[int, int, Image.Image]] = field(default_factory=list)
    lines: list[tuple[int, str, str]] = field(default_factory=list)
    keep: int = 0

    def write(self, text: str, colour: str = TEXT_COLOUR) -> None:
        """Add a line below, or as much of its beginning as fits into the block with an ellipsis."""
        text = drawable(text)
        width_of = font_for(text).getlength
        if width_of(text) > self.width:
            length = bisect(range(1, len(text) + 1), self.width, key=lambda count: width_of(text[:count] + ELLIPSIS))
            text = text[:length] + ELLIPSIS
        self.lines.append((self.height, text, colour))
        self.height += LINE_HEIGHT

    def show(self, pictures: Sequence[Picture | None], side: int) -> None:
        """Add a row of pictures below, each at most `side` pixels wide and high; None leaves a gap."""
        bottom = self.height
        for i, picture in enumerate(pictures):
            if picture:
                image = Image.open(io.BytesIO(picture.data)).convert("RGB")
                image.thumbnail((side, side), Image.Resampling.LANCZOS)
                self.pictures.append((i * (side + GAP), self.height, image))
                bottom = max(bottom, self.height + image.height)
        self.height = bottom + GAP // 2


def draw_sheets(results: Sequence[SampleResult], rows: Sequence[TableRow]) -> Iterator[bytes]:
    """PNG files, as many as needed. rows: of `result_page.bucket_rows`."""
    blocks = []
    for row in rows:
        mine = [result for result in results if result.bucket == row["bucket"]]
        if mine:
            heading = SheetBlock(WIDTH - 2 * MARGIN, keep=PICTURE_SIDE + 4 * LINE_HEIGHT)
            shown = f"{row['shown']} of {row['encoded']} encoded samples, mean PSNR {row['mean_psnr_db']:.2f} dB"
            heading.write(f"{row['bucket']}: {shown}; original, then reconstruction")
            blocks += [heading, *map(_result_block, mine)]
    for placed, height in _layout_blocks(blocks):
        sheet = Image.new("RGB", (WIDTH, height), BACKGROUND)
        pen = ImageDraw.Draw(sheet)
        for x, y, block in placed:
            for left, top, image in block.pictures:
                sheet.paste(image, (x + left, y + top))
            for top, text, colour in block.lines:
                pen.text((x, y + top), text, fill=colour, font=font_for(text))
        buffer = io.BytesIO()
        sheet.save(buffer, "PNG")
        yield buffer.getvalue()


def _layout_blocks(blocks: Sequence[SheetBlock]) -> Iterator[tuple[list[tuple[int, int, SheetBlock]], int]]:
    """For each sheet (blocks with their positions, height): left to right, then down."""
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


def _result_block(result: SampleResult) -> SheetBlock:
    """Original and reconstruction of an image side by side; the frames of a clip in two rows, the original above."""
    frames = result.comparison.frames if result.comparison else ()
    is_clip = bool(frames) and frames[0].time is not None
    block = SheetBlock(WIDTH - 2 * MARGIN if is_clip else CELL_WIDTH)
    if is_clip:
        block.show([frame.original for frame in frames], FRAME_SIDE)
        block.show([frame.reconstruction for frame in frames], FRAME_SIDE)
    else:
        condition = result.comparison.condition if result.comparison else None
        for frame in (*frames, *filter(None, [condition])):
            block.show([frame.original, frame.reconstruction], PICTURE_SIDE)
    block.write(result.name if result.psnr is None else f"{result.name}   {format_decibels(result.psnr)}")
    if result.unreadable:
        block.write(f"no original to compare with: {result.unreadable.reason}", PROBLEM_COLOUR)
    if result.damage:
        block.write(f"can't be decoded: {result.damage.message}", PROBLEM_COLOUR)
    for caption in result.captions[:MAX_CAPTIONS]:
        block.write(f"({caption.token_summary}) {caption.text}", MUTED_COLOUR if caption.complete else PROBLEM_COLOUR)
    return block


@cache
def _own_font() -> Any:
    return ImageFont.load_default(FONT_SIZE)


@cache
def _installed_font() -> Any:
    """The first of FONTS that is installed, which has the letters of most European languages; None where none is."""
    for name in FONTS:
        with suppress(OSError):
            return ImageFont.truetype(name, FONT_SIZE)
    return None


def font_for(text: str) -> Any:
    """Pillow's own font, which has little but ASCII, or for other text an installed one. What it lacks is a box."""
    return _own_font() if text.replace(ELLIPSIS, "").isascii() else _installed_font() or _own_font()


def drawable(text: str) -> str:
    """Printable, and without accents where no font has them: e for é."""
    text = escape_unprintable(text)
    if text.isascii() or _installed_font():
        return text
    return "".join(letter for letter in unicodedata.normalize("NFKD", text) if not unicodedata.combining(letter))
