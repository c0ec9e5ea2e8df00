"""Each kind of damage, in each format, to a shard that is opened afterwards and to one that was open: found, named,
and never taken for a shard."""

import json
from collections.abc import Callable, Iterator

import pytest

from cache.shards import shard_io
from cache.shards.shard_io import ReaderPool
from cache.store.damage import DamageError
from cache.store.store import Store

pytestmark = pytest.mark.slow

OTHER = "text/0ther/t-1"
PAGE = 4096
WIDE = 3000  # so that a shard has several pages


class Damaged:
    """A shard, and the file in which it is damaged in place, as a disk does it: under the same name and map."""

    def __init__(self, store: Store, rel: str, shards) -> None:
        self.store, self.rel, self.shards = store, rel, shards
        self.path = store.local(rel)
        self.data = self.path.read_bytes()
        self.payload = self.data.index(bytes(shards.row(2, WIDE).tensors["pooled"].raw()))

    def write(self, at: int, data: bytes) -> None:
        with open(self.path, "r+b") as file:
            file.seek(at)
            file.write(data)

    def flip(self, at: int) -> None:
        self.write(at, bytes([self.data[at] ^ 4]))

    def cut(self, size: int) -> None:
        with open(self.path, "r+b") as file:
            file.truncate(size)

    def boundary(self) -> int:
        """Where the message, or the member, of the last row begins."""
        if self.rel.endswith(".tar"):
            return json.loads(self.store.read_bytes(self.rel + ".json"))["rows"][3]["tensors"][0] - 512
        with shard_io.open_reader(self.store, self.rel) as reader:
            return reader._spans[3][0]


def flip_description(it: Damaged) -> None:
    """Of a tar it lies in the file beside it."""
    name = it.rel if it.rel.endswith(".arrow") else it.rel + ".json"
    data = bytearray(it.store.read_bytes(name))
    data[data.rindex(b'"reason":"unreadable"') + 12] ^= 1
    it.store.local(name).write_bytes(data)


#: What may happen to a file in place. Where the file was open already, every row of those marked "later" may still be
#: read as it was written: what was damaged had been read before, or is never needed.
IN_PLACE: dict[str, tuple[Callable[[Damaged], object], str]] = {
    "flipped bit in a payload": (lambda it: it.flip(it.payload + 1), ""),
    "flipped bit in the description": (flip_description, "later"),
    "flipped bit in the end": (lambda it: it.flip(len(it.data) - 8), "later"),
    "flipped bit in a header": (lambda it: it.flip(it.boundary() + 30), "later"),
    "cut at a boundary": (lambda it: it.cut(it.boundary()), ""),
    "cut in a payload": (lambda it: it.cut(it.payload + 5), ""),
    "cut by one byte": (lambda it: it.cut(len(it.data) - 1), ""),
    "zeroed page": (lambda it: it.write(it.payload // PAGE * PAGE, bytes(PAGE)), ""),
    "zeroed tail": (lambda it: it.write(it.payload, bytes(len(it.data) - it.payload)), ""),
    "zeros alone": (lambda it: it.write(0, bytes(len(it.data))), ""),
    "zeros after the first page": (lambda it: it.write(PAGE, bytes(len(it.data) - PAGE)), ""),
    "empty": (lambda it: it.cut(0), ""),
}


@pytest.fixture
def whole(tmp_path, shards, format) -> Damaged:
    store = Store(tmp_path)
    return Damaged(store, shards.write(store, format, width=WIDE), shards)


@pytest.fixture
def readers(whole) -> Iterator[ReaderPool]:
    found = ReaderPool(whole.store)
    yield found
    found.close()


def named(damage: DamageError, it: Damaged) -> None:
    text = str(damage)
    assert str(it.path) in text and "latentpress" in text and "encode-text" in text and damage.exit_code == 4


def read_all(readers: ReaderPool, it: Damaged) -> list[DamageError]:
    """Each row is what was written, or damage."""
    found = []
    for number in range(4):
        try:
            assert readers.read(it.rel, number) == it.shards.row(number, WIDE)
        except DamageError as damage:
            found.append(damage)
    return found


@pytest.mark.parametrize("case", IN_PLACE)
def test_on_first_opening(whole, readers, case) -> None:
    IN_PLACE[case][0](whole)
    found = shard_io.verify(whole.store, whole.rel)
    assert found, "verify takes it for whole"
    for damage in [*found, *read_all(readers, whole)]:
        named(damage, whole)


@pytest.mark.long
@pytest.mark.parametrize("case", IN_PLACE)
def test_while_it_is_open(whole, readers, case, forked) -> None:
    """Reading on in a map of a file that was cut would kill the process, so it is forked."""
    damage, when = IN_PLACE[case]

    def work() -> None:
        assert read_all(readers, whole) == []
        damage(whole)
        found = read_all(readers, whole)
        assert found or when == "later"
        for each in found:
            named(each, whole)
        readers.close()
        assert shard_io.verify(whole.store, whole.rel)

    assert forked(work, seconds=20) == 0, "the reader died"


def test_a_file_that_is_gone_or_replaced_while_it_is_open_is_read_on(whole, readers, shards, format) -> None:
    assert read_all(readers, whole) == []
    shards.write(whole.store, format, rows=2, width=7)
    assert read_all(readers, whole) == []
    whole.store.remove(whole.rel)
    assert read_all(readers, whole) == []
    readers.close()
    with pytest.raises(DamageError, match="missing"):
        readers.read(whole.rel, 0)


def take(it: Damaged, stem: str) -> None:
    """Put the files of the shard at `stem` in the place of this one."""
    suffixes = (".arrow",) if it.rel.endswith(".arrow") else (".tar", ".tar.json")
    for suffix in suffixes:
        target = it.store.local(it.rel.split(".")[0] + suffix)
        target.unlink()
        target.write_bytes(it.store.read_bytes(stem + suffix))


@pytest.mark.parametrize("stem", [OTHER, "text/f00d/t-2", "latents/f00d/t-1"])
def test_a_shard_of_another_fingerprint_unit_or_kind(whole, readers, shards, format, stem) -> None:
    """Whole, and with the very rows that are wanted: only what it says of itself tells."""
    shards.write(whole.store, format, width=WIDE, stem=stem)
    take(whole, stem)
    with pytest.raises(DamageError, match=f"its name is wrong: .* {stem}") as caught:
        readers.read(whole.rel, 0)
    named(caught.value, whole)
    assert [str(each) for each in shard_io.verify(whole.store, whole.rel)] == [str(caught.value)]


def test_a_tar_beside_the_description_of_another(tmp_path, shards, forked) -> None:
    """Of as many rows and bytes: the rows' own checksums tell."""
    store = Store(tmp_path)
    rel = shards.write(store, "webdataset", stem="text/f00d/t-1")
    shards.write(store, "webdataset", width=6, stem="text/f00d/t-2")
    assert store.size(rel) == store.size("text/f00d/t-2.tar")
    store.local("text/f00d/t-2.tar").replace(store.local(rel))
    with shard_io.open_reader(store, rel) as reader:
        for number in range(4):
            with pytest.raises(DamageError):
                reader.read(number)


def test_a_disk_that_fails_is_no_damage(whole, monkeypatch) -> None:
    """Nobody should remove a whole shard for a network that was away."""
    import errno

    from cache.store.files import StoreError

    with shard_io.open_reader(whole.store, whole.rel) as reader:

        def fail(i: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(reader, "_row", fail)
        with pytest.raises(StoreError, match="Input/output error"):
            reader.read(0)
        monkeypatch.setattr(reader, "_row", lambda i: bytearray(1 << 62))
        with pytest.raises(MemoryError):
            reader.read(0)


@pytest.mark.parametrize("name", ["t-1.arrow", "t-1.tar", "t-1.tar.json"])
def test_a_flipped_bit_of_any_byte(tmp_path, shards, forked, often, name) -> None:
    """It is found; in an Arrow file, unless it carries nothing, and every row is what it was."""
    store, name = Store(tmp_path), f"text/f00d/{name}"
    rel = shards.write(store, "arrow" if name.endswith(".arrow") else "webdataset")
    data, path = store.read_bytes(name), store.local(name)
    step = often(41, 1)

    def work() -> None:
        unseen = 0
        for at in range(0, len(data), step):
            path.unlink()
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
            if shard_io.verify(store, rel):
                continue
            unseen += 1
            with shard_io.open_reader(store, rel) as reader:
                assert [reader.read(i) for i in range(4)] == [shards.row(i) for i in range(4)]
                assert [member.id for member in reader.meta.rejects] == ["bad"]
        # Of a small Arrow file more than half is padding, names of columns, and the schema again in the footer.
        assert unseen <= (len(data) // step * 3 // 5 if name.endswith(".arrow") else 0)

    assert forked(work) == 0, "the reader died"
