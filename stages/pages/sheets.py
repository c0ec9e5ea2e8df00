"""The PNG contact sheet of validation samples that `decode` writes, to view without a browser."""

import textwrap
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from cache.runs.training_run import spread
from cache.runs.validations import Mark, read_mark
from cache.store.files import explained, replacing
from schemas.config.pipeline import Config
from schemas.identity import hash_json
from schemas.text_format import escape_unprintable
from stages.media.image import png_info
from stages.media.video import probe_video, read_frames
from stages.pages.pictures import list_samples

LINE_HEIGHT, FONT_SIZE = 18, 13  # pixels
MAX_ROWS, MAX_STEPS = 64, 16  # rows and columns of validation samples; the largest sheet has about 80 million pixels
SAMPLE_SIDE, MIN_CELL, MIN_HEIGHT, PADDING = 256, 160, 32, 4  # pixels
PROMPT_LINES = 3
FONTS = ("DejaVuSans.ttf", "NotoSans-Regular.ttf", "LiberationSans-Regular.ttf", "Arial.ttf", "arial.ttf")
TEXT_COLOR, MUTED_COLOR, BACKGROUND = "#1b1f24", "#57606a", "#ffffff"


def update_sheet(config: Config, run_folder: Path) -> Path:
    """Make the contact sheet of a run, unless the existing sheet shows the current samples and prompts."""
    path, files = run_folder / "samples" / "contact-sheet.png", list_samples(config, run_folder)
    prompts = {prompt.name: prompt.prompt for prompt in config.validation.prompts}
    titles = {sample.name: f"{sample.name}: {prompts[sample.prompt]}" for sample in config.validation_samples()}
    marks = [(name, step, file and read_mark(file)) for name, steps in files.items() for step, file in steps.items()]
    mark = Mark(hash_json([marks, titles]))
    if read_mark(path) != mark:
        with explained(str(path)), replacing(path) as temporary:
            draw_sheet(files, titles).save(temporary, format="PNG", pnginfo=png_info(mark))
    return path


def draw_sheet(files: Mapping[str, Mapping[int, Path | None]], titles: Mapping[str, str]) -> Image.Image:
    """Draw a row for each sample, with its prompt, and a column for each step: the first MAX_ROWS samples, and at most
    MAX_STEPS steps, spread evenly.

    files: name -> step -> file, as returned by `list_samples`. titles: name -> text above the row.
    """
    steps = spread(sorted({step for row in files.values() for step in row}), MAX_STEPS)
    images = {
        (name, step): _thumbnail(file)
        for name in list(files)[:MAX_ROWS]
        for step in steps
        if (file := files[name].get(step)) is not None
    }
    cell = max([MIN_CELL, *(image.width + 2 * PADDING for image in images.values())])
    width = len(steps) * cell
    rows, height = [], 0  # (top, name, lines of its prompt)
    for name in list(files)[:MAX_ROWS]:
        lines = _wrap(titles.get(name, name), width - 2 * PADDING)
        rows.append((height + PADDING, name, lines))
        tallest = max([MIN_HEIGHT, *(image.height for (image_name, _), image in images.items() if image_name == name)])
        height += (len(lines) + 1) * LINE_HEIGHT + tallest + 3 * PADDING
    sheet = Image.new("RGB", (width, height), BACKGROUND)
    pen = ImageDraw.Draw(sheet)
    for top, name, lines in rows:
        for number, line in enumerate(lines):
            pen.text((PADDING, top + number * LINE_HEIGHT), line, fill=TEXT_COLOR, font=_font())
        top += len(lines) * LINE_HEIGHT
        for column, step in enumerate(steps):
            file, image = files[name].get(step), images.get((name, step))
            label = f"step {step}, preview" if file and read_mark(file).is_preview else f"step {step}"
            pen.text((PADDING + column * cell, top), label, fill=MUTED_COLOR, font=_font())
            if image:
                sheet.paste(image, (column * cell + (cell - image.width) // 2, top + LINE_HEIGHT + PADDING))
    return sheet


def _thumbnail(file: Path) -> Image.Image:
    """Make a small picture; for a clip, four frames from its first to its last frame, in two rows."""
    if file.suffix == ".png":
        image = Image.open(file).convert("RGB")
    else:
        clip = probe_video(file)
        last = clip.duration - 0.5 * clip.duration / max(1, clip.frames)  # the middle of the last frame's time
        frames = list(read_frames(file, [last * number / 3 for number in range(4)]))
        image = Image.fromarray(np.vstack([np.hstack(frames[:2]), np.hstack(frames[2:])]))
    image.thumbnail((SAMPLE_SIDE, SAMPLE_SIDE), Image.Resampling.LANCZOS)
    return image


def _wrap(text: str, width: int) -> list[str]:
    """Wrap a text into at most PROMPT_LINES lines of about `width` pixels."""
    text = escape_unprintable(text)
    letters = int(0.9 * width * len(text) / max(1.0, _font().getlength(text)))
    return textwrap.wrap(text, max(1, letters), max_lines=PROMPT_LINES, placeholder="…")


@cache
def _font() -> Any:
    """The first of FONTS that is installed; these have the letters of most European languages. If none is installed,
    Pillow's own font, which has little more than ASCII. A letter that the font lacks is drawn as a box."""
    for name in FONTS:
        with suppress(OSError):
            return ImageFont.truetype(name, FONT_SIZE)
    return ImageFont.load_default(FONT_SIZE)
