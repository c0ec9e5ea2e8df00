"""Reads the headers of some of a folder's media, in a sandbox, and some captions."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from schemas.text_format import shorten
from stages.configuring.media import Listing, Media, list_folder
from stages.discovery.sources.captions import read_caption_file
from stages.engines.sandbox import SandboxPool, WorkerFailure
from stages.media.files import MediaError

MOST_READ = 200  # files, spread evenly
READ_TIMEOUT_S, READ_MEMORY_MIB = 20.0, 4096
LONGEST_PROMPT = 300  # characters of a caption that becomes a validation prompt
PROMPTS = 2
Size = tuple[int, int, float]  # width, height, seconds


def read_media(listing: Listing, kind: str, sources: Path | None) -> Media:
    """Read the headers of at most MOST_READ files, and some captions."""
    items = sorted(listing.items[kind].items())
    chosen = (
        [items[number * len(items) // MOST_READ] for number in range(MOST_READ)] if len(items) > MOST_READ else items
    )
    sizes, problems = list[Size](), list[str]()
    pool: SandboxPool[tuple[str, str], Size] = SandboxPool(
        _make_reader, workers=2, timeout_s=READ_TIMEOUT_S, memory_mib=READ_MEMORY_MIB
    )
    with pool:
        for (path, _), result in pool.map((os.fspath(listing.folder / path), kind) for _, path in chosen):
            if isinstance(result, MediaError | WorkerFailure):
                problems.append(f"{Path(path).name}: {result.reason}")
            else:
                sizes.append(result)
    width, height, duration = np.array(sizes, np.float64).reshape(-1, 3).T
    stems = [stem for stem, _ in items if stem in listing.captions]
    source_files = {} if sources is None else list_folder(sources).images
    picked = dict.fromkeys(stems[number * len(stems) // PROMPTS] for number in range(PROMPTS) if stems)
    prompts = [(_read_prompt(listing.folder / listing.captions[stem]), source_files.get(stem)) for stem in picked]
    kept = tuple((text, source) for text, source in prompts if text)
    return Media(len(items), width, height, duration, len(stems), tuple(problems), kept)


def _make_reader() -> Callable[[tuple[str, str]], Size]:
    return _read_size


def _read_size(file: tuple[str, str]) -> Size:
    from stages.media.image import probe_image
    from stages.media.video import probe_video

    path, kind = file
    if kind == "image":
        image = probe_image(path)
        return image.width, image.height, 0.0
    clip = probe_video(path)
    return clip.width, clip.height, clip.duration


def _read_prompt(path: Path) -> str:
    """The first caption of a file on one line; a long one ends at a word. "" if there is none."""
    try:
        text = " ".join(read_caption_file(os.fspath(path))[0].split())
    except MediaError:
        return ""
    return text if len(text) <= LONGEST_PROMPT else shorten(text, LONGEST_PROMPT).removesuffix("...").rpartition(" ")[0]
