"""The tiny checkpoints: reproducible, of sane numbers, whole enough for the real pipelines to generate."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import tiny_models
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


def test_all_kinds_are_small(models: Path) -> None:
    sizes = {kind: sum(map(len, _files(models / kind).values())) for kind in tiny_models.KINDS}
    assert max(sizes.values()) < 6e6 and sum(sizes.values()) < 66e6, sizes


# --- tokenizers ---


# --- numbers ---


def _photo_folder() -> Path | None:
    spec = find_spec("skimage")
    return Path(next(iter(spec.submodule_search_locations or []))) / "data" if spec else None


PHOTOS = _photo_folder()


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
