"""What opening a media file tells about it: the columns of the media table that no listing gives.

Images give their headers alone, videos theirs, or where a header is silent their packets; `scenes` decodes all.
"""

from typing import Any

from stages.media import animation, files
from stages.media.files import MediaPath
from stages.media.image import probe_image
from stages.media.video import VideoInfo, probe_video


def probe_media(path: MediaPath, kind: str, *, animations: str = "first-frame", scenes: bool = False) -> dict[str, Any]:
    """Columns of schemas.tables.MEDIA_SCHEMA by name: media_id, kind, width, height, frames, rate, duration,
    constant_rate, scenes.

    kind: "image" or "video", as the listing has it; an image in motion becomes a video where `animations` is
    "video". frames, rate, duration and scenes are None for images, scenes also where they are not looked for. Raises
    MediaError.
    """
    found = _probe_file(path, kind, animations)
    if scenes and found["kind"] == "video":
        from stages.media.scene_detection import find_scenes

        found["scenes"] = find_scenes(path)
    return {"media_id": files.compute_media_id(path), **found}


def probe_companion(path: MediaPath, kind: str) -> dict[str, Any]:
    """Of an i2i source or a mask: id, kind, width, height, frames, rate, duration, constant_rate. Raises MediaError."""
    found = _probe_file(path, kind, "first-frame")
    del found["scenes"]
    return {"id": files.compute_media_id(path), **found}


def _probe_file(path: MediaPath, kind: str, animations: str) -> dict[str, Any]:
    if kind == "video":
        return _video_columns(probe_video(path))
    info = probe_image(path)
    if animations == "video" and info.is_animated:
        return _video_columns(animation.probe_animation(path))
    columns = dict.fromkeys(("frames", "rate", "duration", "constant_rate", "scenes"))
    return {"kind": "image", "width": info.width, "height": info.height, **columns}


def _video_columns(info: VideoInfo) -> dict[str, Any]:
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
