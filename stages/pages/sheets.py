"""The PNG contact sheet of validation samples that `decode` writes, to view without a browser."""

from bisect import bisect
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from cache.runs.training_run import spread
from cache.runs.validations import Mark, read_mark
from cache.store.files import replacing
from schemas.config.pipeline import Config
from schemas.text_format import escape_unprintable
from stages.media.image import png_info
from stages.media.video import probe_video, read_frames

LINE_HEIGHT, FONT_SIZE = 18, 13  # pixels
MAX_ROWS, MAX_STEPS = 64, 16  # of validation samples: a sheet has some 80 million pixels then
SAMPLE_SIDE, MIN_CELL, MIN_HEIGHT, PADDING = 256, 160, 32, 4  # pixels
CLIP_FRAMES, FRAME_GAP = 4, 4  # of a clip, in two rows
PROMPT_LINES = 3
FONTS = ("DejaVuSans.ttf", "NotoSans-Regular.ttf", "LiberationSans-Regular.ttf", "Arial.ttf", "arial.ttf")
ELLIPSIS = "…"
TEXT_COLOR, MUTED_COLOR, BACKGROUND = "#1b1f24", "#57606a", "#ffffff"


def write_sheet(config: Config, pictures: Sequence[tuple[str, str, Path | None]], path: Path, mark: Mark) -> None:
    """Write a PNG of validation samples: a row for each with its prompt, a column for each step.

    pictures: (step's folder, sample's name, its picture or video, None if it is missing). At most MAX_ROWS in the order
    of the configuration and MAX_STEPS, spread evenly.
    """
    samples = {sample.name: sample for sample in config.validation_samples()}
    prompts = {prompt.name: prompt.prompt for prompt in config.validation.prompts}
    order = {name: number for number, name in enumerate(samples)}
    steps = spread(sorted({step for step, _, _ in pictures}), MAX_STEPS)
    names = sorted({name for _, name, _ in pictures}, key=lambda name: (order.get(name, len(order)), name))[:MAX_ROWS]
    files = {(step, name): file for step, name, file in pictures if step in steps and name in names}
    images = {key: _thumbnail(file) for key, file in files.items() if file}
    cell = max([MIN_CELL, *(image.width + 2 * PADDING for image in images.values())])
    width = len(steps) * cell
    rows, height = [], 0  # (top, name, lines of its prompt)
    for name in names:
        text = f"{name}: {prompts[samples[name].prompt]}" if name in samples else name
        lines = wrap(text, width - 2 * PADDING)
        rows.append((height + PADDING, name, lines))
        tallest = max([MIN_HEIGHT, *(image.height for (_, other), image in images.items() if other == name)])
        height += (len(lines) + 1) * LINE_HEIGHT + tallest + 3 * PADDING
    sheet = Image.new("RGB", (width, height), BACKGROUND)
    pen = ImageDraw.Draw(sheet)
    for top, name, lines in rows:
        for number, line in enumerate(lines):
            pen.text((PADDING, top + number * LINE_HEIGHT), line, fill=TEXT_COLOR, font=_font())
        top += len(lines) * LINE_HEIGHT
        for column, step in enumerate(steps):
            file, image = files.get((step, name)), images.get((step, name))
            label = f"{step}, preview" if file and read_mark(file).is_preview else step
            pen.text((PADDING + column * cell, top), label, fill=MUTED_COLOR, font=_font())
            if image:
                sheet.paste(image, (column * cell + (cell - image.width) // 2, top + LINE_HEIGHT + PADDING))
    with replacing(path) as temporary:
        sheet.save(temporary, format="PNG", pnginfo=png_info(mark))


def _thumbnail(file: Path) -> Image.Image:
    """A small picture; of a clip CLIP_FRAMES frames from its first to its last."""
    if file.suffix == ".png":
        return _fit(Image.open(file), SAMPLE_SIDE)
    clip = probe_video(file)
    last = clip.duration - 0.5 * clip.duration / max(1, clip.frames)  # the middle of the last frame's time
    times = [last * number / (CLIP_FRAMES - 1) for number in range(CLIP_FRAMES)]
    frames = [_fit(Image.fromarray(frame), (SAMPLE_SIDE - FRAME_GAP) // 2) for frame in read_frames(file, times)]
    width, height = frames[0].size
    joined = Image.new("RGB", (2 * width + FRAME_GAP, 2 * height + FRAME_GAP), BACKGROUND)
    for number, frame in enumerate(frames):
        joined.paste(frame, (number % 2 * (width + FRAME_GAP), number // 2 * (height + FRAME_GAP)))
    return joined


def _fit(image: Image.Image, side: int) -> Image.Image:
    """Scaled down to at most `side` pixels in width and height."""
    image = image.convert("RGB")
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    return image


def wrap(text: str, width: int, most: int = PROMPT_LINES) -> list[str]:
    """Divide a text into at most `most` lines of at most `width` pixels; the last one ends with an ellipsis where more
    is left out. A word that is too long is divided."""
    text, lines = escape_unprintable(text), list[str]()
    measure = _font().getlength
    while text and len(lines) < most:
        end = bisect(range(1, len(text) + 1), width, key=lambda count: measure(text[:count]))
        if end < len(text) and (space := text.rfind(" ", 0, end + 1)) > 0:
            end = space
        lines.append(text[: max(1, end)])
        text = text[max(1, end) :].lstrip(" ")
    if text:
        last = lines[-1]
        while last and measure(last + ELLIPSIS) > width:
            last = last[:-1]
        lines[-1] = last + ELLIPSIS
    return lines or [""]


@cache
def _font() -> Any:
    """The first of FONTS that is installed, which has the letters of most European languages, else Pillow's own, which
    has little but ASCII. A letter that a font lacks is a box."""
    for name in FONTS:
        with suppress(OSError):
            return ImageFont.truetype(name, FONT_SIZE)
    return ImageFont.load_default(FONT_SIZE)
