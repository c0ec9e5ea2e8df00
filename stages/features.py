"""features: measures pictures and clips before they are planned: a feature vector of a model, and quality measures. In
the end it compares all items, and groups near-duplicates and clusters of similar items."""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cache.sets.item_rows import read_item_table
from cache.store.damage import DamageError
from cache.store.store import Store
from schemas.cli.console import Console, Options, Report, make_app
from schemas.config.pipeline import Config
from stages.encoding.features.settings import require_features
from stages.encoding.item_plans import item_table_name
from stages.encoding.stage_registry import FEATURES as STAGE
from stages.encoding.stage_state import StageState


def run(config: Config, options: Options, console: Console, **stage_options: Any) -> Report:
    """stage_options: options of all encoding stages."""
    from stages.encoding.features.comparison import import_faiss, write_item_table
    from stages.encoding.features.confirmation import require_opencv

    features = require_features(config)
    if features.duplicates:
        require_opencv()
    if features.duplicates or features.source is not None:
        import_faiss()
    report, store = STAGE.run(config, options, console, **stage_options), Store(config.root)
    state = STAGE.state(store, config, STAGE.find_plan(store, config))
    if remaining_count := len(state.remaining_units()):
        if not report.remaining:
            report.details["items"] = f"compared after the other parts have finished {remaining_count} units"
        return report
    name = item_table_name(features, state.fingerprint, state.wanted_ids)
    table = _find_table(store, name, state, console)
    if table is None or (report.done and not options.dry_run):
        if options.dry_run:
            report.details["items"] = "not compared yet"
            return report
        table = write_item_table(store, config, state, name, console)
    report.details["items"] = len(table)
    if clusters := len(pc.unique(table["cluster"].drop_null())):
        report.details["clusters"] = clusters
    if features.duplicates:
        count = len(table) - table["duplicate_of"].null_count
        groups = len(pc.unique(table["duplicate_group"].drop_null()))
        report.details["near_duplicates"] = f"{count} in {groups} groups, without the best of each" if count else "none"
    return report


def _find_table(store: Store, name: str, state: StageState, console: Console) -> pa.Table | None:
    """Returns the table, or None if it does not contain all current items, for example because a rejected item was read
    later."""
    try:
        table = read_item_table(store, name)
    except DamageError as damage:
        console.warn(f"{damage.message}; the items are compared again")
        return None
    rejected_ids = pa.array([row["item"] for row in state.rejected_members], pa.string())
    ids = state.wanted_ids.filter(pc.invert(pc.is_in(state.wanted_ids, value_set=rejected_ids)))
    samples = state.plan.sample_table
    count = pc.count_distinct(samples["media_id"].filter(pc.is_in(samples["sample_id"], value_set=ids))).as_py()
    return table if table is not None and len(table) == count else None


ABOUT = "Measure pictures and clips, and find near-duplicates."
app = make_app("features", ABOUT, run, passes_to=STAGE.run, divided=True)

if __name__ == "__main__":
    app()
