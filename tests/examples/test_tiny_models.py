"""The tiny checkpoints: reproducible, of sane numbers, whole enough for the real pipelines to generate."""

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from examples import tiny_models, tiny_tokenizers

KANDINSKY = [kind for kind in tiny_models.KINDS if kind.startswith("kandinsky5")]
PIPELINES = [kind for kind, spec in tiny_models.KINDS.items() if spec.pipeline]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[[str], Path]) -> Path:
    """The checkpoints that all tests share; another process or an earlier run may have built them."""
    out = tmp_path_factory.mktemp("models")
    for kind in tiny_models.KINDS:
        (out / kind).symlink_to(tiny(kind))
    return out


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
    assert here.getvalue() == other and len(other.splitlines()) == 4


def test_a_build_leaves_torch_as_it_was(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    tiny_models.build("dinov2", tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() == torch.float32


def test_all_kinds_are_small(models: Path) -> None:
    sizes = {kind: sum(map(len, _files(models / kind).values())) for kind in tiny_models.KINDS}
    assert max(sizes.values()) < 6e6 and sum(sizes.values()) < 40e6, sizes


# --- tokenizers ---


@pytest.mark.parametrize("kind", KANDINSKY)
def test_template_prefix_has_the_length_its_pipeline_crops(models: Path, kind: str) -> None:
    from transformers import AutoTokenizer

    pipe = _pipeline_class(kind)(*[None] * 7)
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
    vae = _load(models, kind, "vae")
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
        encoder = _load(models, kind, "text_encoder" + subfolder)
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
    frames, height, width = (5, 8, 12) if "video" in kind else (1, 16, 16)
    return {
        "hidden_states": noise(1, frames, height, width, 16 if kind.endswith("image-t2i") else 33),
        "encoder_hidden_states": noise(1, 20, 64),
        "pooled_projections": noise(1, 32),
        "timestep": torch.tensor([500.0]),
    }


def _forward(model: Any, kind: str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    if kind == "sana":
        return model(**inputs).sample
    _, frames, height, width, _ = inputs["hidden_states"].shape
    positions = [torch.arange(n) for n in (frames, height // 2, width // 2)]
    return model(**inputs, visual_rope_pos=positions, text_rope_pos=torch.arange(20)).sample


@pytest.mark.parametrize("kind", PIPELINES)
def test_output_is_of_order_half_and_depends_on_every_input(models: Path, kind: str) -> None:
    model = _load(models, kind, "transformer")
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
@pytest.mark.parametrize("kind", ["kandinsky5-image-t2i", "sana"])
def test_a_small_lora_learns(models: Path, kind: str) -> None:
    peft = pytest.importorskip("peft")
    model = _load(models, kind, "transformer").requires_grad_(False)
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


# --- the real pipelines ---


class Processor:
    """Text and images in, ids, mask and patches out: the part of Qwen2VLProcessor that the pipelines use."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self.tokenizer = AutoTokenizer.from_pretrained(folder, subfolder="tokenizer")
        self.images = Qwen2VLImageProcessorPil.from_pretrained(folder, subfolder="tokenizer")
        self.image_token_id = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")

    def __call__(self, text: list[str], images: Any = None, videos: None = None, **options: Any) -> Any:
        if images is None:
            return self.tokenizer(text, **options)
        seen = self.images(images=images, return_tensors="pt")
        counts = (seen["image_grid_thw"].prod(-1) // self.images.merge_size**2).tolist()
        expanded = [one.replace("<|image_pad|>", "<|image_pad|>" * n) for one, n in zip(text, counts, strict=True)]
        encoded = self.tokenizer(expanded, **options)
        encoded["mm_token_type_ids"] = (encoded["input_ids"] == self.image_token_id).int()
        encoded.update(seen)
        return encoded


def _pipeline_class(kind: str) -> Any:
    import diffusers

    return getattr(diffusers, tiny_models.KINDS[kind].pipeline or "")


def _load(models: Path, kind: str, component: str) -> Any:
    import diffusers
    import transformers

    library, name = json.loads((models / kind / "model_index.json").read_text())[component]
    module = {"diffusers": diffusers, "transformers": transformers}[library]
    return getattr(module, name).from_pretrained(models / kind, subfolder=component)


def _pipeline(models: Path, kind: str) -> Any:
    from transformers import AutoTokenizer

    index = json.loads((models / kind / "model_index.json").read_text())
    names = [name for name in index if not name.startswith("_")]
    parts = {name: _load(models, kind, name) for name in names if not name.startswith("tokenizer")}
    if "tokenizer_2" in index:
        parts["tokenizer"] = Processor(models / kind)
        parts["tokenizer_2"] = AutoTokenizer.from_pretrained(models / kind, subfolder="tokenizer_2")
    else:
        parts["tokenizer"] = AutoTokenizer.from_pretrained(models / kind, subfolder="tokenizer")
    pipe = _pipeline_class(kind)(**parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in PIPELINES if not kind.endswith("nabla")])
def test_the_real_pipeline_generates(models: Path, kind: str) -> None:
    pipe = _pipeline(models, kind)
    call = {"num_inference_steps": 2, "height": 64, "width": 64, "output_type": "pt"}
    if kind == "sana":
        call["use_resolution_binning"] = False
    elif "image" in kind:
        pipe.resolutions = [(64, 64)]
    else:
        # The i2v pipeline fits its first four latent frames to later ones: with none it gives NaN.
        call |= {"width": 96, "num_frames": 17 if kind.endswith("i2v") else 9}
    if "i2" in kind:
        call["image"] = Image.effect_mandelbrot((call["width"], 64), (-2, -1, 1, 1), 50).convert("RGB")
    results = []
    for prompt in ("a grey cat on a wall", "two red rockets in the night sky"):
        output = pipe(prompt=prompt, generator=torch.Generator().manual_seed(0), **call)
        results.append(torch.as_tensor(next(iter(output.values()))))
    assert results[0].shape[-2:] == (64, call["width"]) and results[0].isfinite().all()
    assert results[0].shape[-3] == 3 and (results[0].shape[-4] == call.get("num_frames") or "video" not in kind)
    assert results[0].std() > 0.02 and (results[0] - results[1]).abs().mean() > 1e-3


@pytest.mark.slow
def test_the_rest_of_a_pipeline_loads_from_the_folder(models: Path) -> None:
    from diffusers import DiffusionPipeline

    absent = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    for kind in KANDINSKY:
        pipe = DiffusionPipeline.from_pretrained(models / kind, **absent)
        assert type(pipe).__name__ == tiny_models.KINDS[kind].pipeline
    assert DiffusionPipeline.from_pretrained(models / "sana").tokenizer.bos_token == "<bos>"


@pytest.mark.slow
def test_configs_say_what_the_flavours_need(models: Path) -> None:
    configs = {kind: _load(models, kind, "transformer").config for kind in KANDINSKY}
    cond = {kind: config.visual_cond for kind, config in configs.items()}
    assert [kind for kind, value in cond.items() if not value] == ["kandinsky5-image-t2i"]
    nabla = configs["kandinsky5-video-t2v-nabla"]
    assert (nabla.attention_type, nabla.attention_P, nabla.attention_add_sta) == ("nabla", 0.9, True)
    assert configs["kandinsky5-video-t2v"].attention_type == "regular"
    pipe = _pipeline(models, "kandinsky5-video-t2v-nabla")
    assert pipe.get_sparse_params(torch.zeros(1, 3, 16, 32, 33), "cpu")["visual_shape"] == (3, 8, 16)
    scheduler = _load(models, "sana", "scheduler").config
    assert (scheduler.prediction_type, scheduler.use_flow_sigmas, scheduler.flow_shift) == (
        "flow_prediction",
        True,
        3,
    )


# --- true sizes and the command line ---


@pytest.mark.parametrize(
    ("part", "size", "billions"),
    [
        ("video", "true", 2.0), ("image", "true", 6.0), ("video", "pro", 19.3), ("sana", "true", 1.6),
        ("qwen", "true", 8.3), ("clip", "true", 0.123), ("gemma", "true", 2.6), ("dinov2", "true", 1.14),
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
