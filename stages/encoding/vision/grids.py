"""The three grids of vision features: DINOv2's patches, the transformer's tokens, and the stored grid. Pure.

Each grid divides the whole frame evenly, so features and tokens are aligned by position, with no offset and no crop.
"""

import math

from schemas.geometry import Bucket

PATCH_SIZE = 14  # pixels of a DINOv2 patch, of every published size

#: Rows and columns.
GridSize = tuple[int, int]


def patch_grid(bucket: Bucket, size: int) -> GridSize:
    """DINOv2's patches of a frame: as many as a square of `size` pixels has, in the frame's own proportions.

    Not a square: 16:9 stretched to 1:1 has shapes that the model never saw, at no gain. Not DINOv2's usual center
    crop: the rest would have no features. Its position encodings are interpolated to any grid.
    """
    per_side = size // PATCH_SIZE
    aspect = bucket.width / bucket.height
    return max(1, round(per_side / math.sqrt(aspect))), max(1, round(per_side * math.sqrt(aspect)))


def token_grid(bucket: Bucket, side: int) -> GridSize:
    """The diffusion transformer's tokens of one latent frame.

    side: pixels that one token covers, stride times patch; a bucket's sides are multiples of it.
    """
    return bucket.height // side, bucket.width // side


def stored_grid(bucket: Bucket, size: int, side: int) -> GridSize:
    """The stored features of one latent frame: along each axis the coarser of patches and tokens.

    Where DINOv2's grid is the coarser one, the trainer enlarges it to its tokens: enlarged here, the features would
    take several times the bytes and hold no more information.
    """
    patches, tokens = patch_grid(bucket, size), token_grid(bucket, side)
    return min(patches[0], tokens[0]), min(patches[1], tokens[1])
