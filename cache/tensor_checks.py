"""What a row's tensors must be beyond its checksum: whoever makes a shard with intent makes its checksums too."""

from collections.abc import Mapping
from typing import Any

from cache.damage import ENCODE_PROGRAMS
from cache.shard import ShardRow
from cache.tensors import INFINITY_BITS
from schemas.catalogue import FAMILIES
from schemas.geometry import Bucket

SAMPLE = "sample"  # the part of a training set's row that is a row of a latents shard


def kind_of(part: str) -> str:
    """The kind of shard that a part of a training set's row, or of a validation prompt, is a row of. What else an
    encoding stage makes of a sample is a part called like its kind ("vision")."""
    return {SAMPLE: "latents", "condition": "latents"}.get(part, part if part in ENCODE_PROGRAMS else "text")


def find_shape_problem(
    name: str,
    shape: tuple[int, ...],
    bucket: str,
    strides: tuple[int, int],
    channels: int,
    moments: bool = True,
    given: int = 1,
) -> str:
    """What is wrong with the shape of a latent, condition, mask, text or pooled text; "" of any other tensor.

    strides: the autoencoder's, (spatial, temporal). channels: of its latents. moments: whether there may be twice as
    many, the mean and the log-variance. given: latent frames of a condition.
    """
    if name == "embeds" and (len(shape) != 2 or not all(shape)):
        return f"is of shape {shape}, and should be (tokens, width)"
    if name == "pooled" and (len(shape) != 1 or not all(shape)):
        return f"is of shape {shape}, and should be (width,)"
    if name not in ("latent", "condition", "mask"):
        return ""
    frames, height, width = Bucket.parse(bucket).latent_shape(*strides)
    if name == "mask":
        wanted = (frames, height, width)
        return "" if shape == wanted else f"is of shape {shape}, and of bucket {bucket} it is {wanted}"
    wanted = (given if name == "condition" else frames, height, width)
    if len(shape) == 4 and shape[1:] == wanted and shape[0] in (channels, 2 * channels if moments else channels):
        return ""
    return f"is of shape {shape}, and of bucket {bucket} it is {(channels, *wanted)}"


def find_tensor_problem(
    name: str, part: ShardRow, bucket: str, meta: Mapping[str, Any], widths: Mapping[str, int]
) -> str:
    """What keeps a part of a set's row from being trained on; "" where nothing does. meta: the set's description.
    widths: of texts, as the transformer reads them."""
    family, tensors = FAMILIES[meta["family"]], part.tensors
    needed = tuple(family.text_widths) if kind_of(name) == "text" else ()
    if name == SAMPLE:
        needed = ("latent", "condition") if meta["task"] in family.conditions else ("latent",)
    elif name == "condition":  # of a validation prompt: a row whose latent is what is given
        needed, tensors = ("condition",), {"condition": tensors["latent"]} if "latent" in tensors else {}
    lacking = [one for one in needed if one not in tensors]
    if lacking:
        return f"it lacks its {', '.join(lacking)}"
    strides, given = (family.spatial_stride, family.temporal_stride), family.condition_frames(meta["task"])
    for one, array in tensors.items():
        if found := find_shape_problem(
            one, array.shape, bucket, strides, family.latent_channels, family.posterior, given
        ):
            return f"{one} {found}"
        if array.shape and array.shape[-1] != widths.get(one, array.shape[-1]):
            return f"{one} is {array.shape[-1]} wide, and the transformer reads {widths[one]}"
        if array.dtype not in INFINITY_BITS:
            return f"{one} is {array.dtype}, and should be of floating point"
        if not array.is_finite():
            return f"{one} has numbers that are NaN or infinite"
    return ""
