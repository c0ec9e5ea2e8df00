"""Media tables with the columns that `features` made of their items, for those who plan."""

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from cache.models.weights import WeightsError
from cache.sets.item_rows import join_item_table, read_item_table
from cache.store.store import Store
from schemas.config.datasets import Dataset
from schemas.config.encoding import Features
from schemas.config.filters import feature_columns
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.identity import compute_fingerprint, hash_json
from schemas.recipe import FILTERS, uses_features
from stages.discovery.media_table import read_configured_media
from stages.encoding.features.settings import features_fingerprint_inputs, features_request
from stages.planning.items import plan_items

COMPARISON_VERSION = 1  # raise it where the same rows are compared otherwise


class NoFeatures(LatentpressError):
    """Items are still to be measured."""


def read_media(store: Store, config: Config) -> tuple[dict[str, pa.Table], pa.Table | None]:
    """The media table of each dataset in use, with features where the plan depends on these; and the table of the items
    that there are now, None where `features` did not make it. NoFeatures where it did not and the plan depends on it,
    LatentpressError where a dataset was not discovered."""
    media = {dataset.id: read_configured_media(store, dataset) for dataset in config.datasets if not dataset.disabled}
    if config.features is None:
        for dataset in config.datasets:
            if dataset.id in media:
                _refuse_their_columns(dataset, media[dataset.id])
        return media, None
    try:
        items = read_item_table(store, find_item_table(config, media))
    except WeightsError:
        if uses_features(config):
            raise
        return media, None
    if not uses_features(config):
        return media, items
    if items is None:
        raise NoFeatures(
            "the items that there are now were not measured and compared yet",
            "run `latentpress features`, then this program again; or remove the section `features`, and its columns "
            "from the datasets' filters",
        )
    return {name: join_item_table(table, items) for name, table in media.items()}, items


def find_item_table(config: Config, media: Mapping[str, pa.Table]) -> str:
    """The name of the table of the items that there are now. media: of each dataset in use."""
    samples, _ = plan_items(config, features_request(config), media)
    fingerprint = compute_fingerprint(features_fingerprint_inputs(config))
    assert config.features is not None
    return item_table_name(config.features, fingerprint, samples.column("sample_id"))


def item_table_name(features: Features, fingerprint: str, sample_ids: pa.Array | pa.ChunkedArray) -> str:
    """The name of the table of these members of the item plan of `features`."""
    ids = pc.unique(sample_ids)
    members = hash_json(ids.take(pc.sort_indices(ids)).to_pylist())
    compared = {"version": COMPARISON_VERSION, "duplicates": features.duplicates, "clusters": features.clusters}
    return hash_json({"cache": fingerprint, "compared": compared, "items": members})[:24]


def _refuse_their_columns(dataset: Dataset, table: pa.Table) -> None:
    for option in FILTERS:
        if columns := feature_columns(getattr(dataset, option), table.column_names):
            raise LatentpressError(
                f"datasets.{dataset.id}.{option}: {columns[0]} is a column that `features` makes, and that is not "
                "configured",
                "add `features: {}` to the configuration and run `latentpress features`",
            )
