"""Many small files at once: of an object store by requests that are under way together."""

from collections.abc import Iterable, Iterator

from cache.store.damage import BadAnswer, note_bad_answer
from cache.store.files import Entry
from cache.store.store import Store
from cache.store.store_errors import explained_object

AT_ONCE = 64  # requests under way


def read_files(store: Store, entries: Iterable[Entry]) -> Iterator[tuple[Entry, bytes]]:
    """Each file that was listed, with its bytes; those that were removed since are left out. StoreError where one can't
    be read."""
    wanted = list(entries)
    if store.root is not None:
        for entry in wanted:
            try:
                data = store.read_bytes(entry.name)
            except FileNotFoundError:
                continue
            yield entry, data
        return
    for first in range(0, len(wanted), AT_ONCE):
        some = {store.key(entry.name): entry for entry in wanted[first : first + AT_ONCE]}
        with explained_object(store.path("")):
            answers = store.fs.cat([*some], on_error="return", batch_size=AT_ONCE)
        for key, entry in some.items():
            data = answers[key]
            if isinstance(data, BaseException) or len(data) != entry.size:  # cut off, damaged, or replaced since
                try:
                    data = store.read_bytes(entry.name)
                except FileNotFoundError:
                    continue
                if len(data) == entry.size:
                    note_bad_answer(store.url, BadAnswer(f"{store.path(entry.name)} was not sent whole"))
            yield entry, data
