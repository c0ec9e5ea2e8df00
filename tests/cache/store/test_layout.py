"""Names that this project gives are its own, and those that a person would give are not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.store.layout import ENCODE_PROGRAMS, STAGE_PROGRAMS, is_project_file, is_shard
from schemas.geometry import Bucket
from schemas.identity import compute_fingerprint, hash_json, unit_id

HEX = st.text("0123456789abcdef", min_size=1, max_size=9)
BUCKETS = st.builds(lambda w, h, f: str(Bucket(w, h, f)), *[st.integers(1, 4096)] * 3)


@given(st.sampled_from(sorted(ENCODE_PROGRAMS)), st.just("text") | BUCKETS, HEX)
def test_shards_as_they_are_named(kind, bucket, anything) -> None:
    unit, folder = unit_id(bucket, [anything]), f"{kind}/{compute_fingerprint({'a': anything})}"
    for suffix in (".arrow", ".tar"):
        assert is_project_file(f"{folder}/{unit}{suffix}") and is_shard(f"{folder}/{unit}{suffix}")
        assert is_project_file(f"damaged/{folder}/{unit}.1{suffix}") and not is_shard(
            f"damaged/{folder}/{unit}.1{suffix}"
        )
    for name in (f"{folder}/{unit}.tar.json", f"{folder}/provenance.json"):
        assert is_project_file(name) and not is_shard(name)
    cache_folder = f"{ENCODE_PROGRAMS[kind]}/{folder.partition('/')[2]}"
    for name in (f"rejects/{cache_folder}/{unit}.arrow", f"jobs/{cache_folder}/{'a1' * 8}.json"):
        assert is_project_file(name) and not is_shard(name)


@given(st.sampled_from(["media", *STAGE_PROGRAMS]), st.text(max_size=12), st.text(max_size=12))
def test_folders_of_other_names_are_a_persons(kind, folder, file) -> None:
    """But for media/<dataset>/media.arrow, whose dataset is called as its person likes."""
    name = f"{kind}/{folder}/{file}"
    assert not is_project_file(name) or name.startswith("media/")
    assert not is_shard(name)


@pytest.mark.parametrize(
    "name",
    [
        *("media/photos/media.arrow", "media/a.b-c_9/partial/000012.arrow", "rejects/discover/photos.arrow"),
        *("rejects/bucket/kandinsky5-image-t2i.arrow", "plans/000001-0123456789ab/plan.json"),
        *(
            "damaged/plans/000001-0123456789ab.1/units.arrow",
            "plans/000001-0123456789ab/units.arrow",
            "sets/current-sana-t2i.json",
        ),
        *(f"sets/{hash_json(1)[:16]}/{file}" for file in ("set.json", "index.arrow", "texts.arrow", "shards.arrow")),
        f"weights/{'0' * 32}.json",
    ],
)
def test_ours(name) -> None:
    assert is_project_file(name)


@pytest.mark.parametrize(
    "name",
    [
        *("", "text", "a/b", "../text/x.arrow", f"/text/{'0' * 24}/x.arrow", f"text/{'0' * 24}/../x.arrow"),
        *(f"text/{'0' * 24}/x.arrow\n", f"text/{'0' * 24}//x.arrow", f"text/{'0' * 24}/a/x.arrow", "text/0/x.arrow"),
        *(f"text/{'A' * 24}/x.arrow", f"text/{chr(0x660) * 24}/x.arrow", "media/x.arrow", "media/a/b/media.arrow"),
        *("sets/mine/index.arrow", "plans/mine/plan.json", "weights/x.safetensors", "rejects/mine/x.arrow"),
        *("jobs/mine.json", f"jobs/encode-text/{'0' * 24}/notes.json", f"jobs/mine/{'0' * 24}/{'0' * 16}.json"),
    ],
)
def test_not_ours(name) -> None:
    assert not is_project_file(name) and not is_shard(name)
