"""Turn captions into texts: filter, shuffle, join and clean captions and compute their ids, for a whole table at once.
Also make the rows of a plan's table "texts", some of which have images in their prompts.

Every step processes distinct captions, so a caption that a million items share is processed only once.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from schemas import identity
from schemas.config.datasets import Dataset, TagShuffle
from schemas.errors import LatentpressError
from schemas.family import Template
from schemas.identity import mix_bits
from schemas.tables import texts_schema
from stages.planning.candidates import CandidateItems, drop_duplicate_ids
from stages.planning.samples import Geometries, PlannedReferences, geometry_column

RENDER_CHUNK = 8192  # prompts rendered at a time; limits memory, because a template has hundreds of bytes


@dataclass(frozen=True)
class CleanedCaptions:
    """Distinct cleaned captions, and the items that use them. texts: (m,) captions. item, caption: (k,) index of the
    item and of the caption in `texts`, for each distinct pair, in the items' order."""

    texts: pa.Array
    item: np.ndarray
    caption: np.ndarray

    def select_items(self, stay: np.ndarray) -> "CleanedCaptions":
        """The captions of the remaining items, with renumbered items. stay: (n,) whether an item remains."""
        is_used = stay[self.item]
        return CleanedCaptions(self.texts, (np.cumsum(stay) - 1)[self.item[is_used]], self.caption[is_used])


def clean_captions(dataset: Dataset, template: Template, captions: pa.Array) -> CleanedCaptions:
    """Apply the dataset's options and the template's cleaner to a column of caption lists. Captions that become
    empty are omitted. Raises LatentpressError for an invalid pattern."""
    item = np.asarray(pc.list_parent_indices(captions)).astype(np.int64)
    coded = captions.flatten().dictionary_encode()
    variants, parent = coded.dictionary, np.arange(len(coded.dictionary))
    for pattern in dataset.caption_filter:
        try:
            if len(pattern) > 2 and pattern[0] == pattern[-1] == "/":  # /.../ is a regular expression (RE2)
                pc.replace_substring_regex("", pattern[1:-1], "")  # raises for an invalid pattern even without captions
                variants = pc.replace_substring_regex(variants, pattern[1:-1], "")
            else:
                variants = pc.replace_substring(variants, pattern, "")
        except pa.ArrowInvalid as error:
            problem = f"{pattern!r} is not a valid regular expression: {error}"
            raise LatentpressError(f"datasets.{dataset.id}.caption_filter: {problem}", "correct the pattern") from error
    if dataset.tag_shuffle is not None:
        variants, parent = shuffle_tags(variants, dataset.tag_shuffle)
    if dataset.prepend or dataset.append or dataset.trigger:
        # A caption that the filter emptied stays empty, since prepended and appended words alone describe nothing.
        filled = pc.greater(pc.binary_length(pc.utf8_trim_whitespace(variants)), 0)
        if dataset.trigger:
            triggered = pc.binary_join_element_wise(dataset.trigger, variants, " ")
            variants = pc.if_else(pc.match_substring(variants, dataset.trigger_words), variants, triggered)
        joined = pc.binary_join_element_wise(dataset.prepend, variants, dataset.append, "")
        variants = pc.if_else(filled, joined, "")
    cleaned = template.cleaner.column(variants)
    # The variants of a caption are consecutive, so (item, caption) pairs become (item, variant) pairs by offsets.
    counts = np.bincount(parent, minlength=len(coded.dictionary))
    first = np.cumsum(counts) - counts
    code = np.asarray(coded.indices).astype(np.int64)
    item, offset = np.repeat(item, counts[code]), _positions_within(counts[code])
    caption = np.repeat(first[code], counts[code]) + offset
    if not cleaned.equals(coded.dictionary):
        distinct = cleaned.dictionary_encode()
        cleaned, caption = distinct.dictionary, np.asarray(distinct.indices).astype(np.int64)[caption]
    is_filled = np.asarray(pc.greater(pc.binary_length(cleaned), 0))[caption]
    item, caption = item[is_filled], caption[is_filled]
    # Keep each pair once. Only items with several captions are compared, because most items have one caption.
    first = np.ones(len(item), bool)
    several = np.flatnonzero(np.bincount(item)[item] > 1) if len(item) else item
    first[several] = False
    pairs = item[several] * max(1, len(cleaned)) + caption[several]
    first[several[np.unique(pairs, return_index=True)[1]]] = True
    return CleanedCaptions(cleaned, item[first], caption[first])


def _positions_within(counts: np.ndarray) -> np.ndarray:
    """0 .. count - 1 for each count, concatenated."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def shuffle_tags(captions: pa.Array, shuffle: TagShuffle) -> tuple[pa.Array, np.ndarray]:
    """(variants, index of each variant's caption). The first variant of a caption is the caption itself; the further
    variants have their tags in an order that is derived from the caption's text."""
    count = len(captions)
    split = pc.split_pattern(captions, shuffle.delimiter)
    owner = np.asarray(pc.list_parent_indices(split)).astype(np.int64)
    tags = pc.utf8_trim_whitespace(split.flatten())
    position = (_positions_within(np.bincount(owner, minlength=count)) if count else owner).astype(np.uint64)
    hashes = np.fromiter(map(xxhash.xxh3_64_intdigest, captions.cast(pa.binary()).to_pylist()), np.uint64, count)
    joined = []
    for variant in range(shuffle.variants):
        keys = mix_bits(hashes[owner] + mix_bits(position + np.uint64(variant << 32)))
        fixed = (position < shuffle.keep) | (variant == 0)
        order = np.lexsort((np.where(fixed, position, keys), ~fixed, owner))
        lists = pa.ListArray.from_arrays(split.offsets, tags.take(pa.array(order)))
        joined.append(pc.binary_join(lists, f"{shuffle.delimiter} "))
    rows = np.arange(count * shuffle.variants)
    by_caption = rows % shuffle.variants * count + rows // shuffle.variants
    return pa.concat_arrays(joined).take(pa.array(by_caption)), rows // shuffle.variants


def compute_text_ids(
    texts: pa.Array, template: Template, *, negative: bool = False, images: pa.Array | None = None
) -> pa.Array:
    """(n,) ids of cleaned texts. images: (n,) ids of the images in their prompts, if the template has an image."""
    ids = []
    for start in range(0, len(texts), RENDER_CHUNK):
        rendered = template.render_column(texts.slice(start, RENDER_CHUNK), negative=negative)
        ids.append(identity.text_ids(rendered, None if images is None else images.slice(start, RENDER_CHUNK)))
    return pa.concat_arrays(ids) if ids else pa.array([], pa.string())


def text_table(ids: pa.Array, texts: pa.Array, template: Template, *, negative: bool, **image: pa.Array) -> pa.Table:
    """Rows of schemas.tables.texts_schema. image: for prompts with images, the columns image_dataset, image_path,
    image_id and image_geometry, or image_dataset and references."""
    count = len(ids)
    columns = {
        "text_id": ids,
        "template": pa.repeat(template.name, count),
        "text": texts,
        "negative": pa.repeat(negative and not template.negative_uses_template, count),
        **image,
    }
    schema = texts_schema("references" in columns)
    columns = {field.name: columns.get(field.name, pa.nulls(count, field.type)) for field in schema}
    return pa.table(columns, schema=schema)


def plan_text(
    template: Template, caption: str, *, negative: bool = False, image: Mapping[str, pa.Array] | None = None
) -> pa.Table:
    """The row of schemas.tables.texts_schema for one text. The null prompt is the negative prompt "".

    image: if the template has images, columns with one row from `prompt_image_columns` or `prompt_reference_columns`.
    """
    cleaned = pa.array([template.cleaner.text(caption)])
    columns = dict(image or {})
    ids = compute_text_ids(cleaned, template, negative=negative, images=columns.pop("key", None))
    return text_table(ids, cleaned, template, negative=negative, **columns)


def plan_texts(
    template: Template,
    members: CandidateItems,
    captioned_by: np.ndarray,
    captions: CleanedCaptions,
    references: PlannedReferences | None,
) -> tuple[pa.Table, pa.Array, pa.Array | None]:
    """(rows of `texts_schema`, (m,) list of text ids of each sample, (m,) id of each sample's null text). The third
    value is None if the samples share a null text.

    members: pictures and clips, one for each sample. captioned_by: (m,) index of the item in `captions` whose captions
    the sample has.
    """
    count = int(captioned_by.max(initial=-1)) + 1
    offsets = pa.array(np.concatenate([[0], np.cumsum(np.bincount(captions.item, minlength=count))]), pa.int32())
    if not template.with_image:
        ids = compute_text_ids(captions.texts, template)
        used_rows = pa.array(np.flatnonzero(np.bincount(captions.caption, minlength=1)))
        rows = text_table(ids.take(used_rows), captions.texts.take(used_rows), template, negative=False)
        lists = pa.ListArray.from_arrays(offsets, ids.take(pa.array(captions.caption)))
        return rows, lists.take(pa.array(captioned_by)), None
    assert count == len(members), "tasks with an image in the prompt have one sample for each item"
    dataset = pa.repeat(members.dataset, len(members))
    if references is None:
        sources = members.column("source"), members.column("source_id"), members.values["source_geometry"]
        images = prompt_image_columns(dataset, *sources)
    else:
        images = prompt_reference_columns(dataset, references.ids)
    caption_images = {name: column.take(pa.array(captions.item)) for name, column in images.items()}
    captioned = captions.texts.take(pa.array(captions.caption))
    ids = compute_text_ids(captioned, template, images=caption_images.pop("key"))
    empty = pa.repeat("", len(members))
    null_ids = compute_text_ids(empty, template, negative=True, images=images.pop("key"))
    rows = pa.concat_tables(
        [
            text_table(ids, captioned, template, negative=False, **caption_images),
            text_table(null_ids, empty, template, negative=True, **images),
        ]
    )
    return drop_duplicate_ids(rows, "text_id"), pa.ListArray.from_arrays(offsets, ids), null_ids


def prompt_image_columns(
    dataset: pa.Array, path: pa.Array, media_id: pa.Array, geometry: Geometries
) -> dict[str, pa.Array]:
    """Columns of schemas.tables.TEXTS_SCHEMA for images in prompts, and "key": ids of the cropped images that the
    encoder reads."""
    columns = {"image_dataset": dataset, "image_path": path, "image_id": media_id}
    one_frame = geometry.copy()
    one_frame[:, 2] = 1
    key = identity.prompt_image_ids(media_id, one_frame)
    return columns | {"image_geometry": geometry_column(geometry), "key": key}


def prompt_reference_columns(dataset: pa.Array, references: pa.Array) -> dict[str, pa.Array]:
    """Columns of schemas.tables.texts_schema for lists of references in prompts, and "key": the lists' ids."""
    key = identity.hash_values(pc.binary_join(references, ""))
    return {"image_dataset": dataset, "references": references, "key": key}
