"""Upper bounds for the number of stored tokens of texts, computed before the texts are tokenized."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.config.encoding import Model, Text
from schemas.geometry import Bucket

TEMPLATE_TOKENS = 64  # upper bound for the tokens that a template adds after the caption
#: Upper bound for the tokens before and after a reference, including the rounding of its area to tokens.
REFERENCE_MARGIN_TOKENS = 48


def max_token_counts(model: Model, text: Text, texts: pa.Table) -> np.ndarray:
    """Return (n,) upper bounds for rows of schemas.tables.TEXTS_SCHEMA: one token for each byte of the text, plus
    the tokens of images and of the template, limited to the encoder's maximum length. A padded text always has the
    maximum length, and a text with a window the length of its padding in the transformer."""
    template = text.stored_template(model.template)
    max_length = text.max_length or template.max_length
    tokens = np.asarray(pc.binary_length(texts.column("text"))) + image_tokens(model, texts) + TEMPLATE_TOKENS
    if template.window is not None:
        tokens = -(-tokens // template.window) * template.window
    return np.full_like(tokens, max_length) if template.padded else np.minimum(tokens, max_length)


def image_tokens(model: Model, texts: pa.Table) -> np.ndarray:
    """Return (n,) number of stored tokens of the images in prompts; for references, an upper bound."""
    if model.template.image_size is not None:
        return np.asarray(pc.list_value_length(texts.column("references"))).astype(np.int64) * reference_tokens(model)
    side = model.family_spec.image_token
    buckets = image_buckets(texts)
    sizes = [Bucket.parse(name or "1x1") for name in buckets.dictionary.to_pylist()]  # 1x1: no image, so 0 tokens
    tokens = np.array([size.width // side * (size.height // side) for size in sizes], np.int64)
    return tokens[np.asarray(buckets.indices)]


def reference_tokens(model: Model) -> int:
    """Return an upper bound for the stored tokens that a reference adds to a prompt; 0 if prompts do not have
    references."""
    size, side = model.template.image_size, model.family_spec.image_token
    if size is None:
        return 0
    return REFERENCE_MARGIN_TOKENS + (0 if model.template.drops_images else math.ceil(size.area / side**2))


def image_buckets(texts: pa.Table) -> pa.DictionaryArray:
    """Return (n,) the bucket of the image in each prompt, "" for a prompt without an image."""
    buckets = pc.fill_null(pc.struct_field(texts.column("image_geometry"), "bucket"), "")
    return buckets.combine_chunks().dictionary_encode()
