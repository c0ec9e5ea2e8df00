"""Finds scenes with PySceneDetect's detector, on frames of our own readers, so that the times agree with theirs."""

from stages.media import animation, video
from stages.media.files import MediaPath

# Large enough to detect a cut, with a sixtieth of the pixels of 1080p.
_THUMBNAIL_EDGE = 240


def find_scenes(path: MediaPath) -> list[float]:
    """Seconds from the first shown frame at which a new scene begins, ascending; [] for a single scene.

    Finds hard cuts: frames that differ from the previous one far more than their neighbours do, so not a pan or fast
    motion, and a fade or dissolve only if it is fast. Decodes the whole file, with a few small frames in memory. Raises
    MediaError, and ValueError if PySceneDetect is not installed.
    """
    try:
        import scenedetect
    except ImportError as error:
        raise ValueError(
            f"video.scenes can't be used here ({error}); set it to false, or pip install 'latentpress[scenes]'"
        ) from error
    # Scenes may have any length: a clip across a short one would contain its cuts as well.
    detector = scenedetect.AdaptiveDetector(min_scene_len=1)
    thumbnails = animation.iter_thumbnails if animation.is_animation(path) else video.iter_thumbnails
    times, cuts = [], []
    for index, (time, picture) in enumerate(thumbnails(path, _THUMBNAIL_EDGE)):
        times.append(time)
        # The detector needs only the order of the frames: any rate will do.
        timecode = scenedetect.FrameTimecode(index, fps=25.0)
        cuts += detector.process_frame(timecode, picture[..., ::-1].copy())
    if times:
        cuts += detector.post_process(scenedetect.FrameTimecode(len(times) - 1, fps=25.0))
    return sorted({times[cut.frame_num] for cut in cuts if cut.frame_num > 0})
