"""The captions that a model made, as the page shows them: of items whose files have none. They are read when the page
is asked for, at most every KEPT_S seconds, since a root may be an object store."""

import threading
import time

from cache.sets.item_rows import iter_item_rows
from cache.store.store import Store
from schemas.config.pipeline import Config
from stages.encoding.stage_registry import CAPTION

KEPT_S = 30.0
_lock = threading.Lock()
_kept: dict[
    str, tuple[float, dict[str, list[str]]]
] = {}  # cache below a root -> when it was read, media id -> captions


def made_captions(store: Store, config: Config) -> dict[str, list[str]]:
    """media id -> captions of the current set, of a video those of all its clips. LatentpressError for a damaged shard
    or a model that is not here."""
    if config.caption is None:
        return {}
    cache = f"captions/{CAPTION.fingerprint(config)}"
    with _lock:
        read, captions = _kept.get(store.path(cache), (0.0, {}))
        if time.monotonic() - read > KEPT_S:
            captions = {}
            for _, _, row in iter_item_rows(store, cache):
                found = captions.setdefault(row.info["media_id"], [])
                found += [text for text in row.info["captions"] if text not in found]
            _kept.clear()
            _kept[store.path(cache)] = time.monotonic(), captions
    return captions
