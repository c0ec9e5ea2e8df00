"""Checks of a row's tensors in addition to its checksum, because a manipulated shard may have a valid checksum."""

from collections.abc import Mapping

from cache.shards.shard import ShardRow
from cache.shards.tensors import INFINITY_BITS, Array
from cache.store.layout import ENCODE_PROGRAMS
from schemas.family import REFERENCE_PARTS, Family, Task
from schemas.geometry import Bucket

#: dtypes of `embeds` that have a scale for each token, or for each token and layer, in SCALE: number = stored number *
#: its scale.
SCALED_DTYPES = ("float8_e4m3fn", "int8")
SCALE = "embeds_scale"
#: int32 tensor of a text: number of its tokens before each of its references (`Template.drops_images`).
IMAGE_PLACES = "image_places"
SAMPLE = "sample"  # the part of a training set's row that comes from a latents shard


def kind_of(part: str) -> str:
    """Return the kind of shard that contains a part of a training set's row or of a validation prompt. Parts of further
    encoding stages have the name of their kind ("vision")."""
    latents = (SAMPLE, "condition", *REFERENCE_PARTS)
    return "latents" if part in latents else part if part in ENCODE_PROGRAMS else "text"


def own_name(part: str, name: str) -> str:
    """Return the name that a part's tensor has in the sample: a reference is stored as the tensor "latent" of a
    separate row, and has the name of its part in the sample."""
    return part if part in REFERENCE_PARTS else name


def find_shape_problem(
    name: str,
    shape: tuple[int, ...],
    bucket: str,
    strides: tuple[int, int],
    channels: int,
    moments: bool = True,
    condition_frames: int | None = 1,
) -> str:
    """Return the problem with the shape of a latent, condition, mask, embeds or pooled tensor; "" if the shape is valid
    and for any other tensor.

    strides: (spatial, temporal) strides of the autoencoder. channels: number of latent channels. moments: whether a
    tensor may have twice as many channels, for mean and log-variance. condition_frames: latent frames of a condition;
    None for as many frames as the clip has.
    """
    if name == "embeds" and (len(shape) != 2 or not all(shape)):
        return f"has shape {shape} instead of (tokens, width)"
    if name == "pooled" and (len(shape) != 1 or not all(shape)):
        return f"has shape {shape} instead of (width,)"
    if name not in ("latent", "condition", "mask"):
        return ""
    frames, height, width = Bucket.parse(bucket).latent_shape(*strides)
    if name == "condition" and condition_frames is not None:
        frames = condition_frames
    expected = (frames, height, width)
    if name == "mask":
        return "" if shape == expected else f"has shape {shape} instead of {expected} for bucket {bucket}"
    if len(shape) == 4 and shape[1:] == expected and shape[0] in (channels, 2 * channels if moments else channels):
        return ""
    return f"has shape {shape} instead of {(channels, *expected)} for bucket {bucket}"


def find_scale_problem(tensors: Mapping[str, Array], prefix: str = "") -> str:
    """Return the problem with the scales of a text's tokens, (L,) or (L, layers), or with missing scales; "" if the
    scales are valid. prefix: prefix of the names of the text's tensors."""
    embeds, scale = tensors.get(f"{prefix}embeds"), tensors.get(f"{prefix}{SCALE}")
    if embeds is None or (scale is None and embeds.dtype not in SCALED_DTYPES):
        return ""
    if scale is None:
        return f"{prefix}embeds is {embeds.dtype}, but {prefix}{SCALE} is missing"
    if embeds.dtype not in SCALED_DTYPES:
        return f"it has {prefix}{SCALE}, but {prefix}embeds is {embeds.dtype}"
    layers = scale.shape[1:] or (1,)
    is_whole = len(layers) == 1 and layers[0] > 0 and embeds.shape[-1] % layers[0] == 0
    if scale.dtype == "float32" and scale.shape[:1] == embeds.shape[:1] and is_whole:
        return ""
    return (
        f"{prefix}{SCALE} is {scale.dtype} of shape {scale.shape} instead of float32 with one number for each token, "
        "or for each token and layer"
    )


def find_shape_problems(
    part: str, tensors: Mapping[str, Array], bucket: str, task: tuple[Family, Task], widths: Mapping[str, int]
) -> str:
    """Return the reason why tensors with these names, shapes and dtypes can't be trained on; "" if they can. The other
    arguments are described in `find_tensor_problem`."""
    family, condition_frames = task[0], task[0].condition_frames(task[1])
    needed: tuple[str, ...] = ()
    if kind_of(part) == "text":
        needed = (*family.text_widths, *[IMAGE_PLACES] * family.templates[task[1]].drops_images)
    if part == SAMPLE:
        needed = ("latent", "condition") if condition_frames != 0 else ("latent",)
    elif part == "condition":  # of a validation prompt: stored as the latent of a separate row
        needed, tensors = ("condition",), {"condition": tensors["latent"]} if "latent" in tensors else {}
    elif part in REFERENCE_PARTS:
        needed, sizes = ("latent",), Bucket.parse(bucket).references
        width, height = sizes[REFERENCE_PARTS.index(part)]
        bucket = f"{width}x{height}"
    if missing_tensors := [name for name in needed if name not in tensors]:
        return f"it lacks its {', '.join(missing_tensors)}"
    strides = family.spatial_stride, family.temporal_stride
    for name, array in tensors.items():
        shape = array.shape
        if problem := find_shape_problem(
            name, shape, bucket, strides, family.latent_channels, family.posterior, condition_frames
        ):
            return f"{name} {problem}"
        if shape and shape[-1] != widths.get(name, shape[-1]):
            return f"{name} has width {shape[-1]}, but the transformer reads width {widths[name]}"
        if name == IMAGE_PLACES:
            if (array.dtype, array.shape) != ("int32", (len(Bucket.parse(bucket).references),)):
                return f"{name} is {array.dtype} of shape {shape} instead of int32 with one number for each reference"
        elif array.dtype not in INFINITY_BITS and not (name == "embeds" and array.dtype in SCALED_DTYPES):
            return f"{name} is {array.dtype} instead of a floating-point dtype"
    return find_scale_problem(tensors)


def find_tensor_problem(
    part: str, row: ShardRow, bucket: str, task: tuple[Family, Task], widths: Mapping[str, int]
) -> str:
    """Return the reason why a part of a row can't be trained on; "" if it can. task: family and task of the set.
    widths: tensor name -> width of the text tensors that the transformer reads."""
    if problem := find_shape_problems(part, row.tensors, bucket, task, widths):
        return problem
    read = ("latent",) if part == "condition" else tuple(row.tensors)
    unsound = [name for name in read if not row.tensors[name].is_finite()]
    if not unsound:
        return ""
    return f"{'condition' if part == 'condition' else unsound[0]} has numbers that are NaN or infinite"
