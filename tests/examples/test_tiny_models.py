"""The tiny checkpoints: reproducible, of sane numbers, whole enough for the real pipelines to generate."""

import contextlib
import io
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from examples import tiny_models, tiny_tokenizers
from tests.forms import long

pytestmark = pytest.mark.usefixtures("one_thread")
KANDINSKY = [kind for kind in tiny_models.KINDS if kind.startswith("kandinsky5")]
PIPELINES = [kind for kind, spec in tiny_models.KINDS.items() if spec.pipeline]


def pipeline_class(kind: str) -> Any:
    import diffusers

    return getattr(diffusers, tiny_models.KINDS[kind].pipeline or "")


def load_part(models: Path, kind: str, component: str) -> Any:
    import diffusers
    import transformers

    library, name = json.loads((models / kind / "model_index.json").read_text())[component]
    module = {"diffusers": diffusers, "transformers": transformers}[library]
    return getattr(module, name).from_pretrained(models / kind, subfolder=component)


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kandinsky5-image-i2i", "kandinsky5-video-t2v", "sana"])
def test_the_seed_alone_decides_the_bytes(models: Path, tmp_path: Path, kind: str) -> None:
    torch.manual_seed(1234)
    torch.set_num_threads(2)
    again = _files(tiny_models.build(kind, tmp_path / "again"))
    torch.set_num_threads(1)
    assert again == _files(models / kind)
    other = _files(tiny_models.build(kind, tmp_path / "other", seed=1))
    weights = [name for name in again if name.endswith(".safetensors")]
    assert len(weights) >= 3 and all(other[name] != again[name] for name in weights)


@pytest.mark.slow
def test_every_process_makes_the_same_tokenizers() -> None:
    """This one and another, which has other hashes of strings. That one imports neither torch nor the pipelines, of
    which it is passed the texts."""
    given = "from examples import tiny_tokenizers\n" + "".join(
        f"tiny_tokenizers.{read.__name__} = lambda: {read()!r}\n"
        for read in (tiny_tokenizers.template_prefixes, tiny_tokenizers.sana_instruction)
    )
    script = (
        "import hashlib; from examples.tiny_tokenizers import TOKENIZERS\n"
        "for name, make in TOKENIZERS.items():\n"
        "    print(name, hashlib.sha256(make().backend_tokenizer.to_str().encode()).hexdigest())"
    )
    command, environment = [sys.executable, "-c", given + script], {**os.environ, "USE_TORCH": "0"}
    root = Path(tiny_models.__file__).parents[1]
    other = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True).stdout
    with contextlib.redirect_stdout(io.StringIO()) as here:
        exec(script, {})
    assert here.getvalue() == other and len(other.splitlines()) == len(tiny_tokenizers.TOKENIZERS)


def test_a_build_leaves_torch_as_it_was(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    tiny_models.build("dinov2", tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() == torch.float32


def test_all_kinds_are_small(models: Path) -> None:
    sizes = {kind: sum(map(len, _files(models / kind).values())) for kind in tiny_models.KINDS}
    assert max(sizes.values()) < 6e6 and sum(sizes.values()) < 66e6, sizes


# --- tokenizers ---


@pytest.mark.parametrize("kind", KANDINSKY)
def test_template_prefix_has_the_length_its_pipeline_crops(models: Path, kind: str) -> None:
    from transformers import AutoTokenizer

    pipe = pipeline_class(kind)(*[None] * 7)
    tokenizer = AutoTokenizer.from_pretrained(models / kind, subfolder="tokenizer")
    head, _ = pipe.prompt_template.split("{}")
    prefix = tokenizer(head)["input_ids"]
    assert len(prefix) == (49 if kind.endswith("prefix49") else pipe.prompt_template_encode_start_idx)
    first = tokenizer(pipe.prompt_template.format("A cat on a table"))["input_ids"]
    second = tokenizer(pipe.prompt_template.format("A dog in the zebra house"))["input_ids"]
    assert first[: len(prefix) - 1] == second[: len(prefix) - 1] == prefix[:-1]
    assert first != second and len(first) > len(prefix) + 3
    assert tokenizer.decode(first) == pipe.prompt_template.format("A cat on a table")


def test_qwen_image_processor_loads_without_torchvision(models: Path) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil.from_pretrained(models / "kandinsky5-image-i2i", subfolder="tokenizer")
    grid = processor(images=[Image.new("RGB", (112, 56))], return_tensors="pt")["image_grid_thw"]
    assert grid.tolist() == [[1, 4, 8]]


def test_clip_tokenizer_pads_to_77_and_knows_every_letter(models: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models / "kandinsky5-image-t2i", subfolder="tokenizer_2")
    ids = tokenizer("Zürich 42 zebra — 猫!", max_length=77, padding="max_length", truncation=True)["input_ids"]
    end = tokenizer.eos_token_id
    assert len(ids) == 77 and ids[0] == tokenizer.bos_token_id and end == max(ids) == len(tokenizer) - 1
    # The first end token ends the text: an unknown letter in it would be one too, and cut it there.
    assert set(ids[ids.index(end) :]) == {end} and ids.index(end) > 15


def test_gemma_tokenizer_begins_and_merges_at_the_caption(models: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models / "sana", subfolder="tokenizer")
    tokenizer.padding_side = "right"
    prefix = tokenizer("User Prompt: ")["input_ids"]
    whole = tokenizer("User Prompt: a cat", padding="max_length", max_length=20)
    assert prefix[0] == tokenizer.bos_token_id == whole["input_ids"][0]
    assert whole["attention_mask"][-1] == 0 and whole["input_ids"][-1] == tokenizer.pad_token_id
    assert whole["input_ids"][: len(prefix) - 1] == prefix[:-1]
    assert whole["input_ids"][len(prefix) - 1] != prefix[-1]  # "▁" and "a" become one, as in the original


# --- numbers ---


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kandinsky5-image-t2i", "kandinsky5-video-t2v", "sana"])
def test_latents_of_photographs_are_of_order_one_and_differ(models: Path, kind: str) -> None:
    vae = load_part(models, kind, "vae")
    latents = []
    for pixels in _photographs():
        video = pixels[:, :, None].expand(-1, -1, 5, -1, -1) if "video" in kind else pixels
        encoded = vae.encode(video)
        z = encoded.latent if kind == "sana" else encoded.latent_dist.mean
        latents.append(z * vae.config.scaling_factor)
        assert 0.5 < latents[-1].std() < 1.5
        if kind != "sana":
            assert 0.02 < (encoded.latent_dist.std * vae.config.scaling_factor).mean() < 0.3
    assert (latents[0] - latents[1]).abs().mean() > 0.3
    assert vae.decode(z).sample.shape[-2:] == pixels.shape[-2:]


def _photographs() -> list[torch.Tensor]:
    """Three photographs as [1, 3, 128, 128] in -1..1."""
    numpy = pytest.importorskip("numpy")
    if PHOTOS is None:
        pytest.skip("needs scikit-image")
    images = [
        Image.open(PHOTOS / name).convert("RGB").resize((128, 128))
        for name in ("astronaut.png", "coffee.png", "rocket.jpg")
    ]
    return [torch.from_numpy(numpy.array(image)).permute(2, 0, 1)[None] / 127.5 - 1 for image in images]


def _photo_folder() -> Path | None:
    spec = find_spec("skimage")
    return Path(next(iter(spec.submodule_search_locations or []))) / "data" if spec else None


PHOTOS = _photo_folder()


def test_text_states_are_of_order_one_and_depend_on_earlier_words(models: Path) -> None:
    from transformers import AutoTokenizer

    for kind, subfolder in (("kandinsky5-image-t2i", ""), ("kandinsky5-image-t2i", "_2"), ("sana", "")):
        tokenizer = AutoTokenizer.from_pretrained(models / kind, subfolder="tokenizer" + subfolder)
        encoder = load_part(models, kind, "text_encoder" + subfolder)
        states = []
        for text in ("a cat on the wall", "a dog on the wall"):
            ids = tokenizer(text, return_tensors="pt")["input_ids"]
            states.append(encoder(input_ids=ids, output_hidden_states=True).hidden_states[-1])
            assert 0.3 < states[-1].std() < 3
        assert (states[0][:, -1] - states[1][:, -1]).abs().mean() > 0.05, "the last word does not see the second"


def _inputs(kind: str) -> dict[str, torch.Tensor]:
    """Random inputs of a transformer, of the sizes that the demo trains on."""
    generator = torch.Generator().manual_seed(3)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    if kind == "sana":
        return {
            "hidden_states": noise(1, 32, 8, 8),
            "encoder_hidden_states": noise(1, 20, 64),
            "timestep": torch.tensor([500.0]),
        }
    if kind == "z-image":
        return {
            "hidden_states": noise(1, 16, 1, 16, 16),
            "encoder_hidden_states": noise(1, 20, 64),
            "timestep": torch.tensor([500.0]),
        }
    if kind.startswith("wan"):
        return {
            "hidden_states": noise(1, 48 if "5b" in kind else 36 if kind == "wan2.2-a14b-i2v" else 16, 3, 8, 12),
            "encoder_hidden_states": noise(1, 20, 64),
            "timestep": torch.tensor([500.0]),
        }
    if kind == "flux2-klein":
        return {
            "hidden_states": noise(1, 64, 128),
            "encoder_hidden_states": noise(1, 20, 96),
            "timestep": torch.tensor([500.0]),
        }
    if kind.startswith("qwen-image"):
        return {
            "hidden_states": noise(1, 64, 64),
            "encoder_hidden_states": noise(1, 20, 64),
            "timestep": torch.tensor([500.0]),
        }
    frames, height, width = (5, 8, 12) if "video" in kind else (1, 16, 16)
    return {
        "hidden_states": noise(1, frames, height, width, 16 if kind.endswith("image-t2i") else 33),
        "encoder_hidden_states": noise(1, 20, 64),
        "pooled_projections": noise(1, 32),
        "timestep": torch.tensor([500.0]),
    }


def _forward(model: Any, kind: str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    if kind == "sana" or kind.startswith("wan"):
        return model(**inputs).sample
    if kind == "z-image":
        hidden, texts, timestep = inputs.values()
        return torch.stack(model([*hidden], timestep / 1000, [*texts]).sample)
    if kind == "flux2-klein":
        image_ids, text_ids = (
            torch.cartesian_prod(*map(torch.arange, sides)) for sides in ((1, 8, 8, 1), (1, 1, 1, 20))
        )
        return model(**inputs | {"timestep": inputs["timestep"] / 1000}, img_ids=image_ids, txt_ids=text_ids).sample
    if kind.startswith("qwen-image"):
        return model(**inputs | {"timestep": inputs["timestep"] / 1000}, img_shapes=[[(1, 8, 8)]]).sample
    _, frames, height, width, _ = inputs["hidden_states"].shape
    positions = [torch.arange(n) for n in (frames, height // 2, width // 2)]
    return model(**inputs, visual_rope_pos=positions, text_rope_pos=torch.arange(20)).sample


@pytest.mark.parametrize("kind", PIPELINES)
def test_output_is_of_order_half_and_depends_on_every_input(models: Path, kind: str) -> None:
    model = load_part(models, kind, "transformer")
    inputs = _inputs(kind)
    with torch.no_grad():
        output = _forward(model, kind, inputs)
        assert 0.25 < output.std() < 1.2
        variants = {name: torch.full((1,), 300.0) if name == "timestep" else -value for name, value in inputs.items()}
        changes = {name: inputs | {name: value} for name, value in variants.items()}
        if inputs["hidden_states"].shape[-1] == 33:
            for name, channels in (("condition", slice(16, 32)), ("mask", slice(32, 33))):
                hidden = inputs["hidden_states"].clone()
                hidden[..., channels] += 1
                changes[name] = inputs | {"hidden_states": hidden}
        for name, changed in changes.items():
            assert (_forward(model, kind, changed) - output).abs().mean() > 0.02, f"{name} hardly matters"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kandinsky5-image-t2i", long("sana")])
def test_a_small_lora_learns(models: Path, kind: str) -> None:
    peft = pytest.importorskip("peft")
    model = load_part(models, kind, "transformer").requires_grad_(False)
    torch.manual_seed(0)
    names = ("to_query", "to_key", "to_value", "to_q", "to_k", "to_v", "feed_forward.in_layer")
    model.add_adapter(peft.LoraConfig(r=8, lora_alpha=8, target_modules=list(names)))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3)
    inputs = _inputs(kind)
    clean = torch.randn_like(inputs["hidden_states"])

    def loss(noise: torch.Tensor, sigma: float) -> torch.Tensor:
        noisy = {
            "hidden_states": (1 - sigma) * clean + sigma * noise,
            "timestep": torch.tensor([1000 * sigma]),
        }
        return (_forward(model, kind, inputs | noisy) - (noise - clean)).square().mean()

    def evaluate() -> float:
        noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            return sum(loss(noise, sigma).item() for sigma in (0.1, 0.3, 0.5, 0.7, 0.9)) / 5

    before = evaluate()
    for _ in range(60):
        loss(torch.randn_like(clean), torch.sigmoid(torch.randn(())).item()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert evaluate() < 0.9 * before


# --- true sizes and the command line ---


@pytest.mark.parametrize(
    ("part", "size", "billions"),
    [
        ("video", "true", 2.0), ("image", "true", 6.0), ("video", "pro", 19.3), ("sana", "true", 1.6),
        ("qwen", "true", 8.3), ("clip", "true", 0.123), ("clip_model", "true", 0.428), ("gemma", "true", 2.6),
        ("dinov2", "true", 1.14),
    ],
)  # fmt: skip
def test_true_sizes_have_the_true_numbers_of_parameters(part: str, size: str, billions: float) -> None:
    with torch.device("meta"):
        model = tiny_models.make_untrained(part, size)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e9 == pytest.approx(billions, rel=0.025)


def test_only_writes_what_is_named_and_unknown_names_are_answered(tmp_path: Path) -> None:
    tiny_models.build("kandinsky5-image-t2i", tmp_path, only=["transformer", "scheduler"])
    assert {path.name for path in tmp_path.iterdir()} == {"model_index.json", "transformer", "scheduler"}
    with pytest.raises(ValueError, match=r"'sdxl' is unknown; choose one of kandinsky5-image-t2i"):
        tiny_models.build("sdxl", tmp_path)
    with pytest.raises(ValueError, match=r"unet.*choose from .*transformer"):
        tiny_models.build("sana", tmp_path, only=["unet"])


def test_help_imports_no_torch() -> None:
    script = (
        "import sys; from examples import tiny_models\n"
        "try: tiny_models.main(['--help'])\nexcept SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    root = Path(tiny_models.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0 and "--kind" in done.stdout, done.stderr
