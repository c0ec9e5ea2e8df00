"""The three grids of vision features: DINOv2's patches, the transformer's tokens, and what is stored. Pure.

Every grid divides the same frame evenly, so a cell of one is a rectangle of the frame whatever the other grid is:
features and tokens are aligned by where they lie, with no offset and no crop.
"""

import math

from schemas.geometry import Bucket

PATCH_SIZE = 14  # pixels of a DINOv2 patch, of every published size

#: Rows and columns.
GridSize = tuple[int, int]


def patch_grid(bucket: Bucket, size: int) -> GridSize:
    """DINOv2's patches of a frame: as many as a square of `size` pixels has, in the frame's own proportions.

    Not a square: stretching 16:9 to 1:1 shows the model shapes that it never saw, at no gain. Not DINOv2's usual
    centre crop: what it cuts off would have no features. Its position encodings are interpolated to any grid.
    """
    per_side = size // PATCH_SIZE
    aspect = bucket.width / bucket.height
    return max(1, round(per_side / math.sqrt(aspect))), max(1, round(per_side * math.sqrt(aspect)))


def token_grid(bucket: Bucket, side: int) -> GridSize:
    """The diffusion transformer's tokens of one latent frame.

    side: of what one token covers, which a bucket's sides are multiples of: stride times patch.
    """
    return bucket.height // side, bucket.width // side


def stored_grid(bucket: Bucket, size: int, side: int) -> GridSize:
    """What is stored of one latent frame: along each axis the coarser of patches and tokens.

    Where DINOv2 is the coarser one its features are stored as they are: enlarged here, they would take several
    times the bytes and say nothing more. The trainer enlarges them to its tokens.
    """
    patches, tokens = patch_grid(bucket, size), token_grid(bucket, side)
    return min(patches[0], tokens[0]), min(patches[1], tokens[1])
