"""Probes media files for the columns of the media table that a listing lacks.

Reads the header, of videos the packets if the header does not suffice; only `scenes` decodes a file.
"""

from typing import Any

from stages.media import animation, files
from stages.media.files import MediaPath
from stages.media.image import ImageInfo, probe_image
from stages.media.video import VideoInfo, probe_video


def probe_media(path: MediaPath, kind: str, *, animations: str = "first-frame", scenes: bool = False) -> dict[str, Any]:
    """Columns of schemas.tables.MEDIA_SCHEMA by name: media_id, kind, width, height, frames, rate, duration,
    constant_rate, scenes. Raises MediaError.

    kind: "image" or "video", as listed; with animations="video" an animated image becomes a video. Images have None for
    frames, rate, duration, constant_rate and scenes; videos for scenes if they are not detected.
    """
    columns = _probe_file(path, kind, animations)
    if scenes and columns["kind"] == "video":
        from stages.media.scene_detection import find_scenes

        columns["scenes"] = find_scenes(path)
    return {"media_id": files.compute_media_id(path), **columns}


def probe_companion(path: MediaPath, kind: str) -> dict[str, Any]:
    """Of an i2i source or a mask: id, kind, width, height, frames, rate, duration, constant_rate. Raises MediaError."""
    columns = _probe_file(path, kind, "first-frame")
    del columns["scenes"]
    return {"id": files.compute_media_id(path), **columns}


def _probe_file(path: MediaPath, kind: str, animations: str) -> dict[str, Any]:
    info: ImageInfo | VideoInfo = probe_video(path) if kind == "video" else probe_image(path)
    if isinstance(info, ImageInfo) and info.is_animated and animations == "video":
        info = animation.probe_animation(path)
    columns = {"kind": "video" if isinstance(info, VideoInfo) else "image", "width": info.width, "height": info.height}
    names = ("frames", "rate", "duration", "constant_rate", "scenes")
    return columns | {name: getattr(info, name, None) for name in names}  # an image has none of these
