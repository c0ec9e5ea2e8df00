"""train.adapter.init_from reads LoRAs of other trainers: kohya's and musubi-tuner's lora_unet_ names with alpha, and
the original releases' names of ai-toolkit and diffusion-pipe, with modules that are one module there and several here.

The files are written here from the models' own modules; the expected modules are from diffusers' converters, and the
expected weights from the sum W + alpha / rank B A.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from schemas.config.training import Adapter
from tests.forms import long
from tests.trainer.pipelines import KINDS, exact_output, output, pipeline, random
from trainer.adapters.header import AdapterError, read_adapter, resolve_names
from trainer.setup.adapters import make_trainable

RANK, ALPHA = 4, 2.0


def flat(name: str) -> str:
    return "lora_unet_" + name.replace(".", "_")


def dotted(name: str) -> str:
    return f"diffusion_model.{name}"


def wan(path: str) -> str:
    """Wan's own names (wan/modules/model.py)."""
    names = {"attn1": "self_attn", "attn2": "cross_attn", "to_out.0": "o", "net.0.proj": "0", "net.2": "2"}
    for ours, theirs in names.items():
        path = path.replace(ours, theirs)
    return re.sub(r"to_([qkv])$", r"\1", path)


def layers(kind: str, model: torch.nn.Module) -> Iterator[tuple[str, list[str]]]:
    """Name in the original release, and the modules of this model whose outputs it concatenates."""
    for path, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        block = re.match(
            r"(?:single_|mode_blocks\.|txt_)?(?:transformer_blocks|image|image_cond|mode_blocks|blocks|layers|visual_transformer_blocks)\.(\d+)\.(.+)",
            path,
        )
        if block is None or "modulation" in path or "norm" in path or "_mod." in path:
            continue
        number, tail = block[1], block[2]
        if kind == "wan2.1-t2v":
            yield wan(path), [path]
        elif kind == "z-image fused" and tail.startswith("attention."):
            if tail == "attention.to_q":
                yield f"layers.{number}.attention.qkv", [path, path[:-1] + "k", path[:-1] + "v"]
            elif tail == "attention.to_out.0":
                yield f"layers.{number}.attention.out", [path]
        elif kind == "flux2-klein" and path.startswith("single_"):
            yield (
                f"single_blocks.{number}." + {"attn.to_qkv_mlp_proj": "linear1", "attn.to_out": "linear2"}[tail],
                [path],
            )
        elif kind == "flux2-klein":
            names = {"attn.to_out.0": "img_attn.proj", "attn.to_add_out": "txt_attn.proj", "ff.linear_in": "img_mlp.0",
                     "ff.linear_out": "img_mlp.2", "ff_context.linear_in": "txt_mlp.0",
                     "ff_context.linear_out": "txt_mlp.2"}  # fmt: skip
            start = path.removesuffix(tail)
            if tail in names:
                yield f"double_blocks.{number}.{names[tail]}", [path]
            elif tail in ("attn.to_q", "attn.add_q_proj"):
                joint = "img_attn" if tail == "attn.to_q" else "txt_attn"
                yield f"double_blocks.{number}.{joint}.qkv", [start + tail.replace("q", side) for side in "qkv"]
        elif kind == "flux3":
            names = {"attn.to_out.0": "attn_out", "ff.linear_": "mlp_", "attn.to_q": "q_proj", "attn.to_k": "k_proj"}
            start = path.removesuffix(tail).replace("single_transformer_blocks", "single_blocks")
            for ours, theirs in (names | {"attn.to_v": "v_proj"}).items():
                tail = tail.replace(ours, theirs)
            yield re.sub("^mode_blocks", "content_mode_blocks", start) + tail, [path]
        elif kind == "krea2":
            names = {"to_q": "wq", "to_k": "wk", "to_v": "wv", "to_out.0": "wo", "to_gate": "gate", "ff.": "mlp."}
            for ours, theirs in names.items():
                tail = tail.replace(ours, theirs)
            yield f"blocks.{number}.{tail}", [path]
        else:
            yield path, [path]


def write(
    path: Path, kind: str, model: torch.nn.Module, name: Callable[[str], str], alpha: bool
) -> dict[str, torch.Tensor]:
    """Write a LoRA of every block's layers; returns the update of each module of this model."""
    tensors, updates = {}, {}
    down, up = ("lora_down", "lora_up") if alpha else ("lora_A", "lora_B")
    for seed, (theirs, ours) in enumerate(layers(kind, model)):
        sizes = [model.get_submodule(one).weight.shape for one in ours]
        first = random(RANK, sizes[0][1], seed=seed) * 0.1
        second = random(sum(size[0] for size in sizes), RANK, seed=1000 + seed) * 0.01
        tensors |= {f"{name(theirs)}.{down}.weight": first, f"{name(theirs)}.{up}.weight": second}
        if alpha:
            tensors[f"{name(theirs)}.alpha"] = torch.tensor(ALPHA)
        scale = ALPHA / RANK if alpha else 1.0
        parts = torch.split(scale * second @ first, [size[0] for size in sizes])
        updates |= dict(zip(ours, parts, strict=True))
    save_file(tensors, path)
    return updates


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "alpha", "by_diffusers"),
    [
        ("wan2.1-t2v", flat, True, True),  # musubi-tuner
        ("flux2-klein", dotted, False, True),  # ai-toolkit, diffusion-pipe
        ("flux2-klein", flat, True, True),
        ("flux3", dotted, False, True),
        long("flux3", flat, True, False),
        ("krea2", flat, True, False),  # musubi-tuner
        long("krea2", dotted, False, True),
        ("z-image fused", dotted, False, False),  # diffusion-pipe
        long("z-image", flat, True, True),
        long("qwen-image", flat, True, True),
        long("qwen-image", dotted, False, True),
        long("wan2.1-t2v", dotted, False, False),
        long("kandinsky5-video-t2v", flat, True, False),
        long("kandinsky5-image-t2i", dotted, False, False),
    ],
)
def test_training_starts_where_the_other_trainer_ended(
    tiny: Callable[[str], Path], tmp_path: Path, kind: str, name: Callable[[str], str], alpha: bool, by_diffusers: bool
) -> None:
    tiny_kind, file = kind.removesuffix(" fused"), tmp_path / "theirs.safetensors"
    family, task = KINDS[tiny_kind]
    folder = tiny(tiny_kind)
    summed = family.load(str(folder))
    updates = write(file, kind, summed, name, alpha)
    assert len(updates) > 10
    for path, update in updates.items():
        summed.get_submodule(path).weight.data += update
    compute = exact_output if tiny_kind.startswith("kandinsky") else output
    model = family.load(str(folder))
    make_trainable(model, family, task, Adapter(init_from=str(file)))
    mine = compute(tiny_kind, model.eval())
    torch.testing.assert_close(mine, compute(tiny_kind, summed.eval()), rtol=1e-6, atol=1e-6)
    assert (mine - compute(tiny_kind, family.load(str(folder)).eval())).abs().max() > 1e-3
    if by_diffusers:
        pipe = pipeline(tiny_kind, folder)
        pipe.load_lora_weights(str(file))
        torch.testing.assert_close(mine, output(tiny_kind, pipe.transformer.eval()), rtol=0, atol=1e-5)


def test_a_lokr_of_several_modules_is_refused(tmp_path: Path) -> None:
    shapes = {"w1": (3, 2), "w2": (4, 3)}
    tensors = {
        f"diffusion_model.double_blocks.0.img_attn.qkv.lokr_{key}": torch.ones(shape) for key, shape in shapes.items()
    }
    save_file(tensors, tmp_path / "a.safetensors")
    modules = [f"transformer.transformer_blocks.0.attn.to_{side}" for side in "qkv"]
    with pytest.raises(AdapterError, match=r"img_attn\.qkv is for 3 modules of this model, and a LoKr"):
        resolve_names(read_adapter(tmp_path / "a.safetensors"), modules, "the transformer")
