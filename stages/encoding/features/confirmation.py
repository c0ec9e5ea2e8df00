"""Test whether two pictures are copies of each other: cropped, scaled, stretched, recompressed, mirrored, or with
changed exposure, bars or small additions.

Local features (SIFT) of one picture are found again in the second picture, at places that one affine transform explains
(RANSAC). The pictures must also agree when one is laid over the second by that transform, so a shared logo or caption
is not enough.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schemas.cli.starting import install_command
from schemas.errors import LatentpressError
from stages.encoding.member_reader import ReadRequest, read_member

KEYPOINTS = 500  # per picture, at most
CHECK_EDGE = 128  # pixels: pictures are compared at about the area of a square with this edge
_CONTRAST = 0.02  # least contrast of a keypoint: half of OpenCV's default, because soft pictures have few keypoints
_RATIO = 0.8  # largest ratio of the distances to the nearest and the second nearest keypoint (Lowe)
_INLIERS = 10  # matches that the transform must explain
_PLACE = 4.0  # pixels: largest error of a match under the transform
_STRETCH = 2.0  # largest ratio of the transform's two scales
_OVERLAP = 0.6  # least share of the smaller picture's area that both pictures show
_AGREEMENT = 0.8  # least correlation of luminance in the area that both pictures show
_DETAIL, _LEAST_DETAIL = 0.9, 1.5  # least correlation of fine detail, unmoved, and its least deviation (of 255)


@dataclass(frozen=True)
class LocalFeatures:
    """Keypoints of a picture. points: (n, 2), x and y in pixels. descriptors: (n, 128). gray: the picture as uint8
    (H, W), reduced to CHECK_EDGE. scale: pixels of `gray` per pixel of `points`, along x and y. mirrored: features of
    the picture with left and right exchanged."""

    points: NDArray[np.float32]
    descriptors: NDArray[np.uint8]
    gray: NDArray[np.uint8]
    scale: tuple[float, float]
    mirrored: "LocalFeatures | None" = None


def make_reader() -> Callable[[ReadRequest], tuple[LocalFeatures, ...]]:
    """Make the function that a decoding process runs: it reads an item, for a clip all sampled frames."""

    def read(request: ReadRequest) -> tuple[LocalFeatures, ...]:
        frames = read_member(request).frames
        assert frames is not None
        return tuple(map(find_local_features, frames))

    return read


def require_opencv() -> None:
    """Raises LatentpressError if OpenCV is not installed."""
    try:
        import cv2  # noqa: F401
    except ImportError as error:
        raise LatentpressError(
            f"near-duplicates can't be confirmed without OpenCV ({error})",
            f"{install_command('features')}; or set features.duplicates: false",
        ) from error


def find_local_features(frame_HWC: np.ndarray) -> LocalFeatures:
    """Features of a uint8 picture and of its mirror image."""
    plain, mirrored = (_local_features(np.ascontiguousarray(frame)) for frame in (frame_HWC, frame_HWC[:, ::-1]))
    return LocalFeatures(plain.points, plain.descriptors, plain.gray, plain.scale, mirrored)


def _local_features(frame_HWC: np.ndarray) -> LocalFeatures:
    import cv2

    cv2.setNumThreads(1)
    gray = cv2.cvtColor(frame_HWC, cv2.COLOR_RGB2GRAY)
    keypoints, descriptors = cv2.SIFT.create(nfeatures=KEYPOINTS, contrastThreshold=_CONTRAST).detectAndCompute(
        gray, None
    )
    points = np.array([keypoint.pt for keypoint in keypoints], np.float32).reshape(-1, 2)
    vectors = np.zeros((0, 128), np.uint8) if descriptors is None else descriptors.astype(np.uint8)
    factor = CHECK_EDGE / np.sqrt(gray.size)
    size = tuple(max(1, round(side * factor)) for side in gray.shape[::-1])
    small = np.asarray(cv2.resize(gray, size, interpolation=cv2.INTER_AREA), np.uint8)
    return LocalFeatures(points, vectors, small, (size[0] / gray.shape[1], size[1] / gray.shape[0]))


def are_near_duplicates(first: Sequence[LocalFeatures], second: Sequence[LocalFeatures]) -> bool:
    """Whether the middle frame of one item is a copy of any frame of the second item, in either direction. So a clip
    matches the same clip with one end cut off, although their middle frames differ."""
    middle, second_middle = len(first) // 2, len(second) // 2
    pairs = [(middle, second_middle), *((middle, frame) for frame in range(len(second)))]
    pairs += [(frame, second_middle) for frame in range(len(first))]
    return any(are_copies(first[i], second[k]) for i, k in dict.fromkeys(pairs))


def are_copies(first: LocalFeatures, second: LocalFeatures) -> bool:
    """Whether a picture is a copy, mirrored or not, of the second picture or of a part of it."""
    assert second.mirrored is not None
    return any(_agree_unmoved(first, copy) or _agree_moved(first, copy) for copy in (second, second.mirrored))


def _agree_unmoved(first: LocalFeatures, second: LocalFeatures) -> bool:
    """Whether the whole pictures agree in fine detail; for pictures with too few keypoints."""
    import cv2

    resized = cv2.resize(first.gray, second.gray.shape[::-1], interpolation=cv2.INTER_AREA)
    details = [
        gray - cv2.GaussianBlur(gray, (0, 0), 4)
        for gray in (resized.astype(np.float32), second.gray.astype(np.float32))
    ]
    return min(detail.std() for detail in details) >= _LEAST_DETAIL and _correlation(*details) >= _DETAIL


def _agree_moved(first: LocalFeatures, second: LocalFeatures) -> bool:
    import cv2

    if min(len(first.points), len(second.points)) < _INLIERS:
        return False
    pairs = cv2.BFMatcher(cv2.NORM_L2).knnMatch(
        first.descriptors.astype(np.float32), second.descriptors.astype(np.float32), k=2
    )
    matches = [pair[0] for pair in pairs if len(pair) == 2 and pair[0].distance < _RATIO * pair[1].distance]
    if len(matches) < _INLIERS:
        return False
    begin = np.array([first.points[match.queryIdx] for match in matches])
    end = np.array([second.points[match.trainIdx] for match in matches])
    transform, inliers = cv2.estimateAffine2D(begin, end, method=cv2.RANSAC, ransacReprojThreshold=_PLACE)
    if transform is None or inliers.sum() < _INLIERS or len(np.unique(end[inliers.ravel() > 0], axis=0)) < _INLIERS:
        return False
    stretch = np.linalg.svd(transform[:, :2], compute_uv=False)
    if np.linalg.det(transform[:, :2]) <= 0 or stretch[0] > _STRETCH * stretch[1]:
        return False
    return _agree_under(first, second, transform)


def _agree_under(first: LocalFeatures, second: LocalFeatures, transform: np.ndarray) -> bool:
    """Whether `first` agrees with `second` after `first` is moved by the transform. transform: (2, 3), from points
    of `first` to points of `second`."""
    import cv2

    to_gray, from_gray = np.diag(second.scale), np.diag(1 / np.array(first.scale))
    moved = np.concatenate([to_gray @ transform[:, :2] @ from_gray, to_gray @ transform[:, 2:]], axis=1)
    size = second.gray.shape[::-1]
    warped = cv2.warpAffine(first.gray, moved, size, flags=cv2.INTER_AREA)
    covered = cv2.warpAffine(np.full_like(first.gray, 255), moved, size) == 255
    smaller_area = min(second.gray.size, abs(np.linalg.det(moved[:, :2])) * first.gray.size)
    if covered.sum() < _OVERLAP * smaller_area or covered.sum() < CHECK_EDGE:
        return False
    blurred = [cv2.GaussianBlur(gray, (0, 0), 1.5)[covered].astype(np.float32) for gray in (warped, second.gray)]
    return _correlation(*blurred) >= _AGREEMENT


def _correlation(first: np.ndarray, second: np.ndarray) -> float:
    first, second = first - first.mean(), second - second.mean()
    return float((first * second).sum() / max(1e-6, np.sqrt((first**2).sum() * (second**2).sum())))
