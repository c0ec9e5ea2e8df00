"""The decoded pictures of a validation, small enough to be sent: to a webhook, or beside a model card."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache.runs.training_run import read_description
from schemas.config.pipeline import Config
from stages.media.errors import MediaError
from stages.pages.pictures import encode_picture, read_pixels, shrink_clip
from stages.pages.report.samples import SUFFIXES

QUALITY_STEPS = ((85, 1.0), (70, 1.0), (60, 0.7), (50, 0.5), (40, 0.25))  # of JPEG, and share of the size


@dataclass(frozen=True)
class PictureLimits:
    """size: longest side in pixels. max_clip_bytes: 0 where clips are not wanted, but their middle frames."""

    size: int
    max_bytes: int
    max_clip_bytes: int = 0


@dataclass(frozen=True)
class SmallPicture:
    """data: JPEG, of a clip its middle frame. clip: H.264 in MP4. about: what the trainer wrote about the sample, with
    prompt, seed, bucket, steps and guidance."""

    name: str
    data: bytes
    width: int
    height: int
    about: dict[str, Any]
    clip: bytes | None = None

    @property
    def prompt(self) -> str:
        return str(self.about.get("prompt") or "")


def find_picture(folder: Path, latent: Path) -> Path | None:
    """The picture or clip that was decoded of a validation latent; None where there is none, or an older one."""
    for suffix in SUFFIXES:
        picture = folder / "samples" / latent.parent.name / f"{latent.stem}{suffix}"
        if picture.exists() and picture.stat().st_mtime_ns >= latent.stat().st_mtime_ns:
            return picture
    return None


def list_latents(config: Config, folder: Path, step: int) -> list[tuple[Path, dict[str, Any]]]:
    """The latents of a validation in the order of the prompts, and what is known of each."""
    order = {prompt.prompt: number for number, prompt in enumerate(config.validation.prompts)}
    latents = [
        (path, read_description(path)) for path in (folder / "validation" / f"step-{step:06d}").glob("*.safetensors")
    ]
    return sorted(latents, key=lambda latent: (order.get(str(latent[1].get("prompt")), len(order)), latent[0].stem))


def read_pictures(config: Config, folder: Path, step: int, limits: PictureLimits) -> Iterator[SmallPicture]:
    """Read pictures in the order of the prompts; those that are not decoded, can't be read or are links to places
    outside of the run's folder are left out."""
    for latent, about in list_latents(config, folder, step):
        path = find_picture(folder, latent)
        if path and path.resolve().is_relative_to(folder.resolve()):
            try:
                yield _shrink(path, limits, about)
            except (MediaError, OSError):
                continue


def _shrink(path: Path, limits: PictureLimits, about: dict[str, Any]) -> SmallPicture:
    box = (limits.size, limits.size)
    picture = encode_picture(read_pixels(path), box, limits.max_bytes, QUALITY_STEPS, "JPEG")
    clip = shrink_clip(path, limits.max_clip_bytes) if limits.max_clip_bytes and path.suffix == ".mp4" else None
    return SmallPicture(path.stem, picture.data, picture.width, picture.height, about, clip.data if clip else None)
