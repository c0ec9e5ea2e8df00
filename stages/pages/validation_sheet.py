"""The contact sheet of a run's validation samples: a row for each sample with its prompt, a column for each step."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from cache.runs.training_run import spread
from cache.store.files import replacing
from schemas.config.pipeline import Config
from schemas.config.validation_samples import validation_samples
from stages.media.preview_mark import is_preview
from stages.media.video import probe_video, read_frames
from stages.pages.contact_sheet import BACKGROUND, ELLIPSIS, LINE_HEIGHT, MUTED_COLOUR, TEXT_COLOUR, drawable, font_for

MAX_ROWS, MAX_COLUMNS = 64, 16  # a sheet has some 80 million pixels then
PICTURE_SIDE, MIN_CELL, MIN_HEIGHT = 256, 160, 32  # pixels
CLIP_FRAMES, FRAME_GAP = 4, 4  # of a clip, in two rows
PROMPT_LINES, PADDING = 3, 4


def write_sheet(config: Config, pictures: Sequence[tuple[str, str, Path]], path: Path) -> None:
    """Write a PNG. pictures: (step's folder, sample's name, its picture or video), those that are missing included. At
    most MAX_ROWS in the order of the configuration and MAX_COLUMNS, spread evenly."""
    samples = {sample.name: sample for sample in validation_samples(config.validation, config.model.family_spec)}
    prompts = {prompt.name: prompt.prompt for prompt in config.validation.prompts}
    order = {name: number for number, name in enumerate(samples)}
    steps = spread(sorted({step for step, _, _ in pictures}), MAX_COLUMNS)
    names = sorted({name for _, name, _ in pictures}, key=lambda name: (order.get(name, len(order)), name))[:MAX_ROWS]
    wanted = {(step, name): file for step, name, file in pictures if step in steps and name in names}
    shown = {place: _thumbnail(file) for place, file in wanted.items() if file.exists()}
    cell = max([MIN_CELL, *(image.width + 2 * PADDING for image in shown.values())])
    texts = {name: f"{name}: {prompts[samples[name].prompt]}" if name in samples else name for name in names}
    lines = {name: wrap(text, len(steps) * cell - 2 * PADDING) for name, text in texts.items()}
    tallest = {name: max([MIN_HEIGHT, *(shown[at].height for at in shown if at[1] == name)]) for name in names}
    heights = [LINE_HEIGHT * (len(lines[name]) + 1) + tallest[name] + 3 * PADDING for name in names]
    sheet = Image.new("RGB", (len(steps) * cell, sum(heights)), BACKGROUND)
    pen, y = ImageDraw.Draw(sheet), 0
    for name, height in zip(names, heights, strict=True):
        for number, line in enumerate(lines[name]):
            pen.text((PADDING, y + PADDING + number * LINE_HEIGHT), line, fill=TEXT_COLOUR, font=font_for(line))
        below = y + PADDING + len(lines[name]) * LINE_HEIGHT
        for column, step in enumerate(steps):
            file = wanted.get((step, name))
            mark = ", preview" if file is not None and file.suffix == ".png" and is_preview(file) else ""
            pen.text((column * cell + PADDING, below), f"{step}{mark}", fill=MUTED_COLOUR, font=font_for(step))
            if image := shown.get((step, name)):
                left = column * cell + (cell - image.width) // 2
                sheet.paste(image, (left, below + LINE_HEIGHT + PADDING))
        y += height
    with replacing(path) as temporary:
        sheet.save(temporary, format="PNG")


def _thumbnail(file: Path) -> Image.Image:
    """A small picture; of a clip CLIP_FRAMES frames from its first to its last."""
    if file.suffix == ".png":
        image = Image.open(file).convert("RGB")
        image.thumbnail((PICTURE_SIDE, PICTURE_SIDE), Image.Resampling.LANCZOS)
        return image
    about = probe_video(file)
    last = about.duration - 0.5 * about.duration / max(1, about.frames)  # the middle of the last frame's time
    times = [last * number / (CLIP_FRAMES - 1) for number in range(CLIP_FRAMES)]
    frames = [Image.fromarray(frame) for frame in read_frames(file, times)]
    for frame in frames:
        frame.thumbnail(((PICTURE_SIDE - FRAME_GAP) // 2,) * 2, Image.Resampling.LANCZOS)
    width, height = frames[0].size
    joined = Image.new("RGB", (2 * width + FRAME_GAP, 2 * height + FRAME_GAP), BACKGROUND)
    for number, frame in enumerate(frames):
        joined.paste(frame, (number % 2 * (width + FRAME_GAP), number // 2 * (height + FRAME_GAP)))
    return joined


def wrap(text: str, width: int, most: int = PROMPT_LINES) -> list[str]:
    """At most `most` lines of at most `width` pixels; the last one ends with an ellipsis where more is left out. A word
    that is too long is divided."""
    text, lines = drawable(text), [""]
    measure = font_for(text).getlength
    words = text.split(" ")
    while words:
        word = words.pop(0)
        line = f"{lines[-1]} {word}".lstrip() if lines[-1] else word
        if measure(line) <= width:
            lines[-1] = line
        elif lines[-1]:
            lines.append("")
            words.insert(0, word)
        else:
            fits = max(1, next((count for count in range(len(word), 0, -1) if measure(word[:count]) <= width), 1))
            lines[-1] = word[:fits]
            words[:0] = [word[fits:]] if word[fits:] else []
            lines += [""] if word[fits:] else []
    if len(lines) > most:
        last = lines[most - 1]
        while last and measure(last + ELLIPSIS) > width:
            last = last[:-1]
        lines = [*lines[: most - 1], last + ELLIPSIS]
    return lines
