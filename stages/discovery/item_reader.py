"""Reads one item for discover, in a sandbox process: headers, content for its id, captions, companions.

For a media file it finds the columns of the media table that a listing lacks: from the header, and from the packets of
a video if the header is not sufficient. The whole file is decoded only for `scenes` and for animated images that become
videos, and a few frames for face detection. `scenes` runs PySceneDetect's detector on frames of our own readers, so
that its times agree with the times of these frames.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schemas.config.datasets import Dataset
from schemas.tables import FACE
from stages.discovery.sources.base import open_source
from stages.discovery.sources.captions import MISSING_REASONS
from stages.media import animation, faces, files, video
from stages.media.files import MediaError, MediaPath, media_size, unreadable_error
from stages.media.image import ImageInfo, probe_image
from stages.media.video import VideoInfo, probe_video

# Large enough to detect a cut, and a sixtieth of the pixels of 1080p.
_THUMBNAIL_EDGE = 240


def probe_media(path: MediaPath, kind: str, *, animations: str = "first-frame", scenes: bool = False) -> dict[str, Any]:
    """Columns of schemas.tables.MEDIA_SCHEMA by name: media_id, kind, width, height, frames, rate, duration,
    constant_rate, track, scenes. Raises MediaError.

    kind: "image" or "video", as listed; with animations="video" an animated image becomes a video. Images have None
    for frames, rate, duration, constant_rate, track and scenes. A video has None for track if it has only one video
    track, and for scenes if scenes are not detected.
    """
    columns = _probe_file(path, kind, animations)
    if scenes and columns["kind"] == "video":
        columns["scenes"] = find_scenes(path)
    return {"media_id": files.compute_media_id(path), **columns}


def probe_companion(path: MediaPath, kind: str) -> dict[str, Any]:
    """Columns of an i2i source or a mask: id, kind, width, height, frames, rate, duration, constant_rate, track. Raises
    MediaError."""
    columns = _probe_file(path, kind, "first-frame")
    del columns["scenes"]
    return {"id": files.compute_media_id(path), **columns}


def _probe_file(path: MediaPath, kind: str, animations: str) -> dict[str, Any]:
    info: ImageInfo | VideoInfo = probe_video(path) if kind == "video" else probe_image(path)
    if isinstance(info, ImageInfo) and info.is_animated and animations == "video":
        info = animation.probe_animation(path)
    columns = {"kind": "video" if isinstance(info, VideoInfo) else "image", "width": info.width, "height": info.height}
    names = ("frames", "rate", "duration", "constant_rate", "track", "scenes")
    return columns | {name: getattr(info, name, None) for name in names}  # ImageInfo has no such attributes


def find_scenes(path: MediaPath) -> list[float]:
    """Seconds from the first shown frame at which a new scene begins, ascending; [] for a single scene.

    Finds hard cuts: frames that differ from the previous frame far more than the neighboring frames do. A pan or fast
    motion is not a cut; a fade or dissolve is a cut only if it is fast. Decodes the whole file, with a few small frames
    in memory. Raises MediaError, and ValueError if PySceneDetect is not installed.
    """
    try:
        import scenedetect
    except ImportError as error:
        raise ValueError(
            f"video.scenes needs PySceneDetect ({error}); set it to false, or pip install 'latentpress[scenes]'"
        ) from error
    # Scenes may have any length, because a clip across a short scene would contain its cuts.
    detector = scenedetect.AdaptiveDetector(min_scene_len=1)
    thumbnails = animation.iter_thumbnails if animation.is_animation(path) else video.iter_thumbnails
    times, cuts = [], []
    for index, (time, picture) in enumerate(thumbnails(path, _THUMBNAIL_EDGE)):
        times.append(time)
        # The detector only uses the order of the frames, so the rate is arbitrary.
        timecode = scenedetect.FrameTimecode(index, fps=25.0)
        cuts += detector.process_frame(timecode, picture[..., ::-1].copy())
    if times:
        cuts += detector.post_process(scenedetect.FrameTimecode(len(times) - 1, fps=25.0))
    return sorted({times[cut.frame_num] for cut in cuts if cut.frame_num > 0})


@dataclass(frozen=True, slots=True)
class ReadTask:
    """The parts of an item that must be read. media: whether to read the media file. captions_at: path of the caption
    file, None if it need not be read. companions: role -> (path, kind) of each companion that must be read."""

    path: str
    kind: str
    media: bool
    captions_at: str | None
    companions: Mapping[str, tuple[str, str | None]]


class ItemReader:
    """Reads items of one dataset. Raises MediaError for an item that can't be used."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset, self._source = dataset, open_source(dataset)

    def __call__(self, task: ReadTask) -> dict[str, Any]:
        """The values that the task requires, by column name of schemas.tables.MEDIA_SCHEMA."""
        columns: dict[str, Any] = {}
        try:
            if task.captions_at is not None:  # first, because an item without captions is rejected
                columns["captions"] = self._read_captions(task.captions_at)
            if task.media:
                media = self._source.open(task.path)
                columns["size"] = media_size(media)
                scenes = self._dataset.video.scenes
                columns |= probe_media(media, task.kind, animations=self._dataset.animations, scenes=scenes)
                if self._dataset.crop_style == "face":
                    columns[FACE] = faces.find_face(media, columns, self._dataset.face_detector)
            for role, (path, kind) in task.companions.items():
                companion = self._source.open_companion(role, path)
                media_size(companion)
                probed = probe_companion(companion, kind or "image")
                columns |= {f"{role}_{name}": probed[name] for name in ("id", "kind", "width", "height")}
        except OSError as error:
            raise unreadable_error(task.path, error) from error
        return columns

    def _read_captions(self, path: str) -> list[str]:
        try:
            return self._source.read_captions(path)
        except MediaError as error:
            if error.reason in MISSING_REASONS and self._dataset.accepts_missing_captions:
                return []
            raise
