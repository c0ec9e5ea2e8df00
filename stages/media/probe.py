"""What opening a media file tells about it: the columns of the media table that no listing gives.

Images give their headers alone, videos theirs, or where a header is silent their packets; `scenes` decodes all.
"""

from typing import Any

from stages.media import animation, files
from stages.media.files import Media
from stages.media.image import probe_image
from stages.media.video import VideoInfo, probe_video


def probe(path: Media, kind: str, *, animations: str = "first-frame", scenes: bool = False) -> dict[str, Any]:
    """Columns of schemas.tables.MEDIA by name: media_id, kind, width, height, frames, rate, duration,
    constant_rate, scenes.

    kind: "image" or "video", as the listing has it; an image in motion becomes a video where `animations` is
    "video". frames, rate, duration and scenes are None for images, scenes also where they are not looked for. Raises
    MediaError.
    """
    found = _probe(path, kind, animations)
    if scenes and found["kind"] == "video":
        from stages.media.scenes import find_scenes

        found["scenes"] = find_scenes(path)
    return {"media_id": files.media_id(path), **found}


def probe_companion(path: Media, kind: str) -> dict[str, Any]:
    """Of an i2i source or a mask: id, kind, width, height, frames, rate, duration, constant_rate. Raises MediaError."""
    found = _probe(path, kind, "first-frame")
    del found["scenes"]
    return {"id": files.media_id(path), **found}


def _probe(path: Media, kind: str, animations: str) -> dict[str, Any]:
    if kind == "video":
        return _of_video(probe_video(path))
    info = probe_image(path)
    if animations == "video" and info.moving:
        return _of_video(animation.probe_animation(path))
    columns = dict.fromkeys(("frames", "rate", "duration", "constant_rate", "scenes"))
    return {"kind": "image", "width": info.width, "height": info.height, **columns}


def _of_video(info: VideoInfo) -> dict[str, Any]:
    return {
        "kind": "video",
        "width": info.width,
        "height": info.height,
        "frames": info.frames,
        "rate": info.rate,
        "duration": info.duration,
        "constant_rate": info.constant_rate,
        "scenes": None,
    }
