"""The captions that a model made, as the page shows them: of items whose files have none. A shard is read once, as a
root may be an object store."""

import threading

from cache.sets.item_rows import iter_item_rows
from cache.shards.shard import ARROW_SUFFIX, TAR_SUFFIX
from cache.store.files import Entry
from cache.store.store import Store
from schemas.config.pipeline import Config
from stages.encoding.stage_registry import CAPTION

_lock = threading.Lock()
#: (URL of a cache, shard) -> of each row its media id and its captions; of the cache that was asked for last.
_kept: dict[tuple[str, Entry], list[tuple[str, list[str]]]] = {}


def made_captions(store: Store, config: Config) -> dict[str, list[str]]:
    """media id -> captions of the current set, of a video those of all its clips. LatentpressError for a damaged shard
    or a model that is not here."""
    if config.caption is None:
        return {}
    cache, captions = f"captions/{CAPTION.fingerprint(config)}", dict[str, list[str]]()
    with _lock:
        files = store.list_files(cache)
        shards = [(store.path(cache), file) for file in files if file.name.endswith((ARROW_SUFFIX, TAR_SUFFIX))]
        for gone in _kept.keys() - {*shards}:
            del _kept[gone]
        for key in shards:
            if key not in _kept:
                rows = iter_item_rows(store, cache, [f"{cache}/{key[1].name}"])
                _kept[key] = [(row.info["media_id"], row.info["captions"]) for _, _, row in rows]
            for media_id, texts in _kept[key]:
                found = captions.setdefault(media_id, [])
                found += [text for text in texts if text not in found]
    return captions
