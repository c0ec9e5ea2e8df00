"""Damage is found, named, and mended by the commands that are printed."""

import shutil

import pytest

from stages import bucket, discover, encode_latents, encode_text, index, status, verify


@pytest.fixture
def encoded(project):
    home = project("kandinsky5-image-t2i")
    for number in range(3):
        home.image(f"{number}.png", (64, 64), f"picture {number}", number)
    for program in (discover, bucket, encode_text, encode_latents):
        home.run(program.run)
    return home


def flip(home, kind: str, where: float = 0.6) -> str:
    """Change one byte of the first shard of a kind; its path under the root."""
    name = next(iter(home.shards(kind)))
    path = home.root / kind / name
    data = bytearray(path.read_bytes())
    data[int(len(data) * where)] ^= 1
    path.write_bytes(data)
    return f"{kind}/{name}"


def test_sound_shards_pass(encoded) -> None:
    report = encoded.run(verify.run)
    assert report.exit_code == 0
    assert report.done == len(encoded.shards("text")) + len(encoded.shards("latents"))


@pytest.mark.parametrize(("kind", "program"), [("text", encode_text), ("latents", encode_latents)])
def test_a_flipped_byte_is_found_and_the_printed_commands_rebuild_the_same_bytes(encoded, kind, program) -> None:
    whole = encoded.shards(kind)
    path = flip(encoded, kind)
    report = encoded.run(verify.run)
    assert report.exit_code == 4
    assert [damage["path"] for damage in report.damage] == [path]
    assert report.damage[0]["row"] is not None
    assert report.next_steps == [
        "latentpress verify --delete-damaged",
        f"latentpress encode-{kind}",
        "latentpress index",
    ]
    assert encoded.run(verify.run, delete_damaged=True).exit_code == 4
    assert encoded.run(program.run).done > 0
    assert encoded.shards(kind) == whole
    assert encoded.run(verify.run).exit_code == 0


def test_a_cut_shard_is_found(encoded) -> None:
    name = next(iter(encoded.shards("latents")))
    path = encoded.root / "latents" / name
    path.write_bytes(path.read_bytes()[:-100])
    assert encoded.run(verify.run).exit_code == 4


def test_status_counts_what_is_done_and_what_remains(encoded) -> None:
    def rows() -> dict:
        return {row["stage"]: row for row in encoded.run(status.run).details["stages"]}

    found = rows()
    assert (found["discover"]["done"], found["bucket"]["done"]) == (3, 3)
    assert (found["encode-text"]["done"], found["encode-latents"]["done"]) == (4, 3)
    assert encoded.run(status.run).exit_code == 0
    for name in encoded.shards("latents"):
        (encoded.root / "latents" / name).unlink()
    assert rows()["encode-latents"]["remaining"] == 3
    report = encoded.run(status.run)
    assert (report.exit_code, report.next_steps) == (3, ["latentpress encode-latents"])


def test_status_names_what_was_removed_by_hand(encoded) -> None:
    encoded.run(index.run)
    assert encoded.run(status.run).remaining == 0
    for folder in (encoded.root / "sets").iterdir():
        if folder.is_dir():
            shutil.rmtree(folder)
    assert "which is not there: latentpress index" in encoded.run(status.run).details["training set"]
    shutil.rmtree(encoded.root / "media")
    report = encoded.run(status.run)
    assert (report.remaining, report.next_steps) == (1, ["latentpress discover"])
