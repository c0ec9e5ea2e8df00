"""train.adapter.init_from reads LoRAs of other trainers: kohya's and musubi-tuner's lora_unet_ names with alpha, the
original releases' names of ai-toolkit and diffusion-pipe, with modules that are one module there and several here, and
SimpleTuner's names of diffusers, with alpha in the header.

The files are written here from the models' own modules; the expected modules are from diffusers' converters, and the
expected weights from the sum W + alpha / rank B A. If a converter of whole checkpoints exists, it converts this sum.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from diffusers.loaders import single_file_utils
from safetensors.torch import save_file

from schemas.config.training import Adapter
from schemas.family import OriginalNames
from tests.conformance.flavours import ROWS
from tests.forms import long
from tests.trainer.pipelines import KINDS, exact_output, output, pipeline, random
from trainer.adapters.header import FUSED, AdapterError, read_adapter, rename, resolve_names
from trainer.adapters.layers import METADATA_KEY
from trainer.setup.adapters import ADAPTER_NAME, list_adapted_modules, make_trainable

RANK, ALPHA = 4, 2.0
#: Kind -> name of diffusers' converter of the original release's checkpoints.
CONVERTERS = {
    "flux2-klein": "flux2", "flux3": "flux3", "flux3-i2i": "flux3", "krea2": "krea2", "qwen-image-2.1": "qwen_image21",
}  # fmt: skip
#: Form of a kind -> its names; None for the original names of the family.
TABLES = {"native": None, "native blocks": None, "diffusers": OriginalNames(), "fused": FUSED}


def flat(name: str) -> str:
    return "lora_unet_" + name.replace(".", "_")


def dotted(name: str) -> str:
    return f"diffusion_model.{name}"


def diffusers(name: str) -> str:
    return f"transformer.{name}"


def peft(name: str) -> str:
    return f"base_model.model.{name}"


def wan(path: str) -> str:
    """Wan's own names (wan/modules/model.py)."""
    names = {"attn1": "self_attn", "attn2": "cross_attn", "to_out.0": "o", "net.0.proj": "0", "net.2": "2"}
    for ours, theirs in names.items():
        path = path.replace(ours, theirs)
    return re.sub(r"to_([qkv])$", r"\1", path)


def layers(kind: str, model: torch.nn.Module) -> Iterator[tuple[str, list[str]]]:
    """Name in the file, and the modules of this model whose outputs it concatenates. Of kinds with a form, such as
    "krea2 native", these are all linear layers with the names of the family's table."""
    name, _, form = kind.partition(" ")
    for path, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        block = re.match(
            r"(?:single_)?(?:transformer_blocks|blocks|layers|visual_transformer_blocks)\.(\d+)\.(.+)", path
        )
        if form in TABLES:
            names = TABLES[form] or ROWS[name].spec.original_names
            yield from by_table(names, path) if form != "native blocks" or "blocks" in path else ()
            continue
        if block is None or "modulation" in path or "norm" in path or "_mod." in path:
            continue
        number, tail = block[1], block[2]
        if kind == "wan2.1-t2v":
            yield wan(path), [path]
        elif kind == "z-image qkv" and tail.startswith("attention."):
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
        else:
            yield path, [path]


def by_table(names: OriginalNames, path: str) -> Iterator[tuple[str, list[str]]]:
    """The name of a module or, at the first of joined modules, the name of their joint module."""
    for joint, ends in names.joined:
        end = next((end for end in ends if path.endswith(f".{end}")), None)
        if end is not None:
            start = path.removesuffix(end)
            if end == ends[0]:
                yield rename(start + joint, names.paths), [start + end for end in ends]
            return
    yield rename(path, names.paths), [path]


def write(
    path: Path, kind: str, model: torch.nn.Module, name: Callable[[str], str], alpha: str
) -> dict[str, torch.Tensor]:
    """Write a LoRA of every layer; returns the update of each module of this model.

    alpha: "tensors" for kohya's tensors and alphas, "header" for peft's alpha in the header, or "" for no alpha.
    """
    tensors, updates, theirs_updates = {}, {}, {}
    down, up = ("lora_down", "lora_up") if alpha == "tensors" else ("lora_A", "lora_B")
    for seed, (theirs, ours) in enumerate(layers(kind, model)):
        sizes = [model.get_submodule(one).weight.shape for one in ours]
        first = random(RANK, sizes[0][1], seed=seed) * 0.1
        second = random(sum(size[0] for size in sizes), RANK, seed=1000 + seed) * 0.01
        tensors |= {f"{name(theirs)}.{down}.weight": first, f"{name(theirs)}.{up}.weight": second}
        if alpha == "tensors":
            tensors[f"{name(theirs)}.alpha"] = torch.tensor(ALPHA)
        update = (ALPHA / RANK if alpha else 1.0) * second @ first
        theirs_updates[f"{theirs}.weight"] = update
        updates |= dict(zip(ours, torch.split(update, [size[0] for size in sizes]), strict=True))
    settings = {"r": RANK, "lora_alpha": ALPHA, "target_modules": [*updates]}
    header = {METADATA_KEY: json.dumps({f"transformer.{key}": value for key, value in settings.items()})}
    save_file(tensors, path, header if alpha == "header" else None)
    if "native" in kind:
        convert = getattr(
            single_file_utils, f"convert_{CONVERTERS[kind.split()[0]]}_transformer_checkpoint_to_diffusers"
        )
        updates = {key.removesuffix(".weight"): update for key, update in convert(theirs_updates).items()}
    return updates


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "alpha", "by_diffusers"),
    [
        ("wan2.1-t2v", flat, "tensors", True),  # musubi-tuner
        ("flux2-klein", dotted, "", True),  # ai-toolkit, diffusion-pipe
        long("flux2-klein", flat, "tensors", True),
        long("flux2-klein native", dotted, "", False),
        ("flux3 native", dotted, "", False),
        long("flux3-i2i native", flat, "tensors", False),
        long("flux3 native blocks", dotted, "", True),
        long("flux3-i2i diffusers", dotted, "", True),
        ("flux3-i2i diffusers", diffusers, "header", True),  # SimpleTuner
        ("krea2 native", flat, "tensors", False),  # musubi-tuner
        long("krea2 native", dotted, "", True),  # diffusion-pipe, ai-toolkit
        long("krea2 native", peft, "", True),  # earlier releases of ai-toolkit
        ("krea2 fused", diffusers, "header", False),  # SimpleTuner, as in its example
        long("krea2 diffusers", diffusers, "header", True),
        long("krea2 diffusers", dotted, "tensors", False),
        ("qwen-image-2.1 native", dotted, "", False),  # diffusion-pipe, ComfyUI
        long("qwen-image-2.1 native", flat, "tensors", False),
        long("qwen-image-2.1 diffusers", flat, "tensors", False),  # musubi-tuner
        long("qwen-image-2.1-i2i diffusers", dotted, "", True),  # ai-toolkit
        long("qwen-image-2.1 diffusers", diffusers, "header", True),  # SimpleTuner
        ("z-image qkv", dotted, "", False),  # diffusion-pipe
        long("z-image", flat, "tensors", True),
        long("qwen-image", flat, "tensors", True),
        long("qwen-image", dotted, "", True),
        long("wan2.1-t2v", dotted, "", False),
        long("kandinsky5-video-t2v", flat, "tensors", False),
        long("kandinsky5-image-t2i", dotted, "", False),
    ],
)
def test_training_starts_where_the_other_trainer_ended(
    tiny: Callable[[str], Path],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    kind: str,
    name: Callable[[str], str],
    alpha: str,
    by_diffusers: bool,
) -> None:
    tiny_kind, file = kind.split()[0], tmp_path / "theirs.safetensors"
    family, task = KINDS[tiny_kind]
    folder = tiny(ROWS[tiny_kind].checkpoint or tiny_kind)
    summed = family.load(str(folder))
    updates = write(file, kind, summed, name, alpha)
    assert len(updates) > 10
    for path, update in updates.items():
        summed.get_submodule(path).weight.data += update
    compute = exact_output if tiny_kind.startswith("kandinsky") else output
    model = family.load(str(folder))
    make_trainable(model, family, task, Adapter(init_from=str(file)))
    mine, wanted = compute(tiny_kind, model.eval()), compute(tiny_kind, summed.eval())
    record_property("largest difference", (mine - wanted).abs().max().item())
    torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-5)
    for path in list_adapted_modules(model):
        changed = model.get_submodule(path).get_delta_weight(ADAPTER_NAME)
        torch.testing.assert_close(changed, updates[path], rtol=0, atol=1e-7)
    assert (mine - compute(tiny_kind, family.load(str(folder)).eval())).abs().max() > 1e-3
    if by_diffusers:
        pipe = pipeline(tiny_kind, folder)
        pipe.load_lora_weights(str(file))
        torch.testing.assert_close(mine, output(tiny_kind, pipe.transformer.eval()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["krea2", "flux3", "qwen-image-2.1"])
def test_a_file_with_names_of_no_family_is_refused_with_the_first_of_them(
    tiny: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    family, task = KINDS[kind]
    model = family.load(str(tiny(kind)))
    write(tmp_path / "a.safetensors", f"{kind} native", model, lambda name: dotted(f"other.{name}"), "")
    adapter = read_adapter(tmp_path / "a.safetensors")
    count, names = len(adapter.layers), ", ".join([*adapter.layers][:3])
    with pytest.raises(AdapterError, match=rf"lacks {count} of the {count} modules that .* adapts: {re.escape(names)}"):
        make_trainable(model, family, task, Adapter(init_from=str(adapter.path)))


def test_a_joint_module_of_another_size_is_refused(tmp_path: Path) -> None:
    name = "diffusion_model.transformer_blocks.0.img_mlp.gate_up"
    save_file(
        {f"{name}.lora_A.weight": torch.ones(2, 6), f"{name}.lora_B.weight": torch.ones(20, 2)},
        tmp_path / "a.safetensors",
    )
    modules = {f"transformer.transformer_blocks.0.img_mlp.{half}": (12, 6) for half in ("gate_layer", "proj")}
    with pytest.raises(AdapterError, match=r"img_mlp\.gate_up has 20 outputs, but .*gate_layer, .*proj have 24 in it"):
        resolve_names(read_adapter(tmp_path / "a.safetensors"), modules, "it")


def test_a_lokr_of_swapped_outputs_is_refused(tmp_path: Path) -> None:
    name = "diffusion_model.final_layer.image.adaLN_modulation.1"
    save_file({f"{name}.lokr_w1": torch.ones(2, 3), f"{name}.lokr_w2": torch.ones(4, 2)}, tmp_path / "a.safetensors")
    with pytest.raises(AdapterError, match="outputs in another order in this model, and a LoKr can't be reordered"):
        resolve_names(read_adapter(tmp_path / "a.safetensors"), {"transformer.norm_out.linear": (8, 6)}, "it")


def test_a_lokr_of_several_modules_is_refused(tmp_path: Path) -> None:
    shapes = {"w1": (3, 2), "w2": (4, 3)}
    tensors = {
        f"diffusion_model.double_blocks.0.img_attn.qkv.lokr_{key}": torch.ones(shape) for key, shape in shapes.items()
    }
    save_file(tensors, tmp_path / "a.safetensors")
    modules = {f"transformer.transformer_blocks.0.attn.to_{side}": (12, 6) for side in "qkv"}
    with pytest.raises(AdapterError, match=r"img_attn\.qkv is for 3 modules of this model, and a LoKr"):
        resolve_names(read_adapter(tmp_path / "a.safetensors"), modules, "the transformer")
