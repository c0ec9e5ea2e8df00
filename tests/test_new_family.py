"""CONTRIBUTING's "Add a family" followed to the letter: from files to a trained adapter by own files and rows alone.

The packages are copied, the files of tests/family/ are added to the copy, its rows are joined in the catalog, and
the programs run from there, so whatever another file would have to know of the family is missing here. They run in a
fork of this process, which shares its libraries and none of its own modules.
"""

import importlib.util
import io
import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.processes import in_child

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
OWN = ROOT / "tests" / "family"
STAGES = ("discover", "bucket", "encode_text", "encode_latents", "index")
PACKAGES = ("schemas", "cache", "stages", "trainer")
MEANS, DEVIATIONS = [0.5, -0.25, 0.0, 1.0], [0.5, 2.0, 1.0, 4.0]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages with the family's files, and its line in the catalog."""
    tree = tmp_path_factory.mktemp("tree")
    for package in PACKAGES:  # with what is compiled
        shutil.copytree(ROOT / package, tree / package)
    for path in OWN.rglob("*.py"):
        place = tree / path.relative_to(OWN)
        assert not place.exists(), f"{place} is a file of the product"
        shutil.copy(path, place)
    catalog = tree / "schemas" / "catalog.py"
    text = catalog.read_text()
    text = text.replace("from schemas.families import ", "from schemas.families import example, ", 1)
    text = text.replace("FAMILIES: dict[str, Family] = {", "FAMILIES: dict[str, Family] = {**example.FAMILIES, ", 1)
    catalog.write_text(text)
    return tree


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny random weights in diffusers layout, two transformers among them."""
    import torch
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler

    from stages.rehearsing.tiny_models import make_model
    from stages.rehearsing.tiny_tokenizers import gemma_tokenizer

    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    for part in ("transformer", "transformer_2"):
        make_transformer().save_pretrained(folder / part)
    AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4, norm_num_groups=4,
        block_out_channels=(8, 8, 8, 8), latent_channels=4, latents_mean=MEANS, latents_std=DEVIATIONS,
    ).save_pretrained(folder / "vae")  # fmt: skip
    make_model("gemma").save_pretrained(folder / "text_encoder")
    gemma_tokenizer().save_pretrained(folder / "tokenizer")
    FlowMatchEulerDiscreteScheduler(shift=2.0).save_pretrained(folder / "scheduler")
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "ExamplePipeline"}))
    return folder


def make_transformer() -> Any:
    """Of the family's own class, which neither diffusers nor this checkout has."""
    spec = importlib.util.spec_from_file_location("example", OWN / "trainer/families/example_transformer.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ExampleTransformer()


def import_from(tree: Path) -> None:
    """From now on this process has the modules of the copy."""
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
        del sys.modules[name]
    sys.path.insert(0, str(tree))


def run_all(tree: Path, config: Path) -> None:
    """All programs of the copy, one after the other."""
    import_from(tree)
    from schemas.cli.console import Console, Options
    from schemas.config.loading import load_config

    for name in (*(f"stages.{stage}" for stage in STAGES), "trainer.__main__", "stages.decode"):
        program = importlib.import_module(name)
        settings = load_config(config)
        for one in settings.expert_runs if name == "stages.decode" else [settings]:
            report = program.run(one, Options(config), Console(stderr=io.StringIO()))
            assert report.exit_code == 0, report
        if name == "stages.bucket":
            planned = json.dumps(report.to_dict())
            assert "orientation" in planned and "scale_class" not in planned, "that is another family's note"


def rows(root: Path, kind: str) -> list[dict[str, np.ndarray]]:
    """The tensors of every row of a kind."""
    from cache.shards.shard_io import open_reader
    from cache.store.store import Store

    store, found = Store(str(root)), []
    for path in sorted(root.glob(f"{kind}/*/*.arrow")):
        with open_reader(store, path.relative_to(root).as_posix()) as shard:
            for number in range(len(shard)):
                row = shard.read(number)
                found.append({name: array.numpy() for name, array in row.tensors.items()})
    return found


def test_a_family_of_its_own_files_and_rows_is_trained(
    tree: Path, checkpoint: Path, project: Callable[..., Any]
) -> None:
    home = project("kandinsky5-video-t2v")
    for name in ("a.mp4", "b.mp4"):
        home.video(name, caption=f"clip {name}")
    given = home.video("../prompt.mp4", frames=12)
    home.settings |= {
        "model": {"family": "example", "path": str(checkpoint), "precision": "float32"},
        "latents": {"posterior": "mode"},
        "train": {
            "experts": "both",
            "steps": 3,
            "threads": 1,
            "device": "cpu",
            "offload": {"blocks": True},
            "optimizer": {"warmup": 0, "lr": 1e-3},
            "methods": {"tread": {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 0, "end_layer_idx": 0}]}},
        },
        "validation": {
            "prompts": [{"name": "one", "prompt": "goes on", "image": str(given)}],
            "size": "64x64@5",
            "steps": 2,
            "every": 3,
            "eval_samples": 1,
        },
    }
    home.settings["datasets"][0]["video"]["num_frames"] = 5
    config = home.folder / "pipeline.yaml"
    config.write_text(json.dumps(home.settings))
    assert in_child(partial(run_all, tree, config)) == 0
    check_latents(home.root)
    check_texts(home.root, checkpoint)
    for expert in ("high", "low"):
        check_result(home.folder / "output" / f"run-{expert}")


def check_latents(root: Path) -> None:
    """Two frames of condition beside the clips' five, each the clip's own latents; the prompt's clip has two."""
    found = rows(root, "latents")
    clips = [row for row in found if "condition" in row]
    assert len(clips) == 2 and len(found) == 3
    for row in clips:
        assert row["latent"].shape[:2] == (4, 5) and row["condition"].shape[:2] == (4, 2)
        np.testing.assert_allclose(row["condition"], row["latent"][:, :2], atol=1e-4)
    [prompt] = [row for row in found if "condition" not in row]
    assert prompt["latent"].shape[:2] == (4, 2)


def check_texts(root: Path, checkpoint: Path) -> None:
    """One of the stored texts is what transformers computes for it, of both layers, without the first token."""
    import torch
    from transformers import AutoTokenizer, Gemma2Model

    tokenizer = AutoTokenizer.from_pretrained(checkpoint / "tokenizer")
    model = Gemma2Model.from_pretrained(checkpoint / "text_encoder", attn_implementation="eager").eval()
    ids = tokenizer("Clip: CLIP A.MP4", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        states = model(input_ids=ids, output_hidden_states=True).hidden_states
    wanted = torch.cat([states[1], states[2]], -1)[0, 1:].numpy()
    texts = [row["embeds"] for row in rows(root, "text")]
    assert {text.shape[1] for text in texts} == {128}
    alike = [text for text in texts if text.shape == wanted.shape and np.allclose(text, wanted, atol=1e-4)]
    assert len(alike) == 1


def check_result(folder: Path) -> None:
    from safetensors.numpy import load_file

    [adapter] = (folder / "adapter").glob("*.safetensors")
    learned = {name: np.abs(value).max() for name, value in load_file(adapter).items() if "lora_B" in name}
    assert all(learned.values()) and learned
    assert [path.name for path in (folder / "samples").glob("*/one.mp4")], "the prompt was denoised and decoded"


def test_latents_are_normalized_by_channel(tree: Path, checkpoint: Path) -> None:
    assert in_child(partial(check_normalization, tree, checkpoint)) == 0


def check_normalization(tree: Path, checkpoint: Path) -> None:
    """(z - mean) / deviation of each channel; its inverse gives the pixels that the autoencoder gives."""
    import_from(tree)
    import torch
    from diffusers import AutoencoderKL

    from schemas.catalog import FAMILIES

    cpu, normalization = torch.device("cpu"), FAMILIES["example"].normalization
    module = importlib.import_module("stages.encoding.vae.example")
    ours = module.Autoencoder(str(checkpoint), None, torch.float32, cpu, normalization=normalization)
    vae = AutoencoderKL.from_pretrained(checkpoint / "vae").eval()
    pixels = torch.rand(1, 3, 3, 64, 64) * 2 - 1
    with torch.no_grad():
        z = torch.stack([vae.encode(frame).latent_dist.mode() for frame in pixels.unbind(2)], 2)
        logvar = torch.stack([vae.encode(frame).latent_dist.logvar for frame in pixels.unbind(2)], 2)
        wanted = torch.stack([vae.decode(frame).sample for frame in z.unbind(2)], 2)
    mean, deviation = (torch.tensor(vae.config[key]).view(1, 4, 1, 1, 1) for key in ("latents_mean", "latents_std"))
    torch.testing.assert_close(ours.encode(pixels, [0], "mode"), (z - mean) / deviation)
    moments = ours.encode(pixels, [0], "moments")
    torch.testing.assert_close((moments[:, 4:] / 2).exp(), (logvar / 2).exp() / deviation)
    back = ours.decode((z - mean) / deviation)
    wanted = ((wanted * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 3, 4, 1) * 255).round()
    assert (back.float() - wanted).abs().max() <= 1
