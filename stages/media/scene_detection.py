"""Where a video's scenes begin: PySceneDetect's detector on our own frames, so that times agree with the reader's."""

from types import ModuleType

from stages.media import animation, video
from stages.media.files import MediaPath

# Enough to see a cut, and a sixtieth of the pixels of 1080p.
_THUMBNAIL_EDGE = 240


def find_scenes(path: MediaPath) -> list[float]:
    """Seconds from the first shown frame at which a new scene begins, ascending; [] where there is one scene.

    Hard cuts: frames that differ from the one before far more than their neighbours do, so that a pan or fast motion
    is none. A fade or dissolve is found where it changes fast enough, or not at all. Decodes the whole file, holding
    a few small frames. Raises MediaError, and ValueError where PySceneDetect is not installed.
    """
    library = _import_scenedetect()
    # Scenes may be of any length: a clip across a short one would show the cut as well.
    detector = library.AdaptiveDetector(min_scene_len=1)
    thumbnails = animation.iter_thumbnails if animation.is_animation(path) else video.iter_thumbnails
    times, cuts = [], []
    for index, (time, picture) in enumerate(thumbnails(path, _THUMBNAIL_EDGE)):
        times.append(time)
        # The detector compares frames in order; it needs their numbers, and no rate.
        stamp = library.FrameTimecode(index, fps=25.0)
        cuts += detector.process_frame(stamp, picture[..., ::-1].copy())
    if times:
        cuts += detector.post_process(library.FrameTimecode(len(times) - 1, fps=25.0))
    return sorted({times[cut.frame_num] for cut in cuts if cut.frame_num > 0})


def _import_scenedetect() -> ModuleType:
    try:
        import scenedetect
    except ImportError as error:
        raise ValueError(
            f"video.scenes can't be used here ({error}); set it to false, or pip install 'latentpress[scenes]'"
        ) from error
    return scenedetect
