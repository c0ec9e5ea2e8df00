"""Builds the demo's checkpoints: checkpoints of tiny_models with an autoencoder that was trained on the demo's media,
and a transformer that learns fast.

    python -m examples.demo_models --autoencoder dc_ae --media demo/media --out demo/models sana

A random autoencoder decodes any latents to texture; after a minute of training on one core, photographs are blurred but
can be recognized. Its matrices are trained with Muon (Keller Jordan 2024): eight photographs were reconstructed at 20.3
dB after 200 steps, with Adam at 17.0 dB. The text encoders stay random, because different captions have different
embeddings.
"""

import argparse
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from stages.rehearsing.tiny_models import build, make_untrained
from stages.rehearsing.tiny_shapes import KINDS

CLIP_RATE = 4  # frames per second of the demo's clips
MOTION = 0.5  # weight of the error of changes within a clip
NOISE = 0.05  # standard deviation of the noise on latents in training the decoder, and of the posterior


@dataclass(frozen=True)
class Recipe:
    """How an autoencoder is trained. size: width, height and frames of the media. crop: width, height and frames of a
    training example. shape: keys that replace keys of the tiny configuration. small_steps: steps on media of half the
    width and height before `steps`, each a quarter of the work."""

    media: tuple[str, ...]
    size: tuple[int, int, int]
    crop: tuple[int, int, int]
    batch: int
    steps: int
    shape: dict[str, Any] = field(default_factory=dict)
    small_steps: int = 0


_DC_CHANNELS = (8, 8, 16, 32, 64, 64)
RECIPES = {
    "flux_vae": Recipe(
        ("images", "pairs/target"), (96, 96, 1), (64, 64, 1), 4, 500, {"block_out_channels": (8, 16, 32, 32)}
    ),
    "hunyuan_vae": Recipe(
        ("videos",), (96, 64, 5), (96, 64, 5), 2, 50, {"block_out_channels": (8, 16, 64, 64)}, small_steps=320
    ),
    "dc_ae": Recipe(
        ("images",), (128, 128, 1), (128, 128, 1), 2, 240,
        {"encoder_block_out_channels": _DC_CHANNELS, "decoder_block_out_channels": _DC_CHANNELS},
    ),
    "flux2_vae": Recipe(
        ("images",), (96, 96, 1), (64, 64, 1), 4, 500, {"block_out_channels": (8, 16, 32, 32)}
    ),
    "qwen_image_vae": Recipe(("images",), (96, 96, 1), (64, 64, 1), 4, 400),
    "qwen_image_21_vae": Recipe(("images",), (128, 128, 1), (96, 96, 1), 4, 400, {"dim_mult": [1, 2, 4, 8, 8]}),
    "wan_vae": Recipe(("videos",), (96, 64, 5), (48, 48, 5), 2, 300, {"dim_mult": [1, 2, 4, 8]}),
}  # fmt: skip
#: Autoencoders of clips; for these, a picture is a clip of one frame.
CLIP_CLASSES = ("AutoencoderKLHunyuanVideo", "AutoencoderKLQwenImage", "AutoencoderKLQwenImage21", "AutoencoderKLWan")


# --- autoencoders ---


def read_media(media: Path, recipe: Recipe) -> torch.Tensor:
    """Read media: (N, 3, T, H, W) in -1..1, cropped to the recipe's size like in encode-latents."""
    import numpy as np
    from PIL import Image, ImageOps

    from stages.media.image import load_image
    from stages.media.video import read_frames

    *size, frames = recipe.size
    clips = []
    for folder in recipe.media:
        for path in sorted(path for path in (media / folder).iterdir() if path.suffix != ".txt"):
            times = [number / CLIP_RATE for number in range(frames)]
            images = [load_image(path)] if frames == 1 else map(Image.fromarray, read_frames(path, times))
            fitted = [ImageOps.fit(image, (size[0], size[1]), Image.Resampling.LANCZOS) for image in images]
            clips.append(
                torch.from_numpy(np.stack([np.asarray(image) for image in fitted])).permute(3, 0, 1, 2) / 127.5 - 1
            )  # THWC -> CTHW
    return torch.stack(clips)


def encode(vae: Any, pixels_NCTHW: torch.Tensor) -> torch.Tensor:
    """Encode pixels. Returns the means of the latents."""
    if type(vae).__name__ in CLIP_CLASSES:
        if vae.config.get("in_channels", 3) == 4:  # pixels with alpha; pictures are opaque
            pixels_NCTHW = torch.nn.functional.pad(pixels_NCTHW, (0, 0, 0, 0, 0, 0, 0, 1), value=1.0)
        return vae.encode(pixels_NCTHW).latent_dist.mean
    encoded = vae.encode(pixels_NCTHW[:, :, 0])
    return (encoded.latent if hasattr(encoded, "latent") else encoded.latent_dist.mean)[:, :, None]


def decode(vae: Any, z_NCTHW: torch.Tensor) -> torch.Tensor:
    if type(vae).__name__ in CLIP_CLASSES:
        return vae.decode(z_NCTHW).sample[:, :3]
    return vae.decode(z_NCTHW[:, :, 0]).sample[:, :, None]


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Muon's five Newton-Schulz steps, after which the singular values are near 1."""
    x = matrix / (matrix.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (2.0315 * square @ square - 4.7750 * square) @ x
    return x.T if tall else x


class Trainer:
    """Optimizer: Muon for matrices and filters, Adam for other parameters and for the layers at pixels and latents."""

    def __init__(self, model: torch.nn.Module, muon_lr: float = 0.02, adam_lr: float = 5e-3) -> None:
        parameters, adam_names = [*model.named_parameters()], ("conv_in", "conv_out", "gamma")
        self.matrices = [w for name, w in parameters if w.ndim > 1 and not any(part in name for part in adam_names)]
        matrix_ids = {id(weight) for weight in self.matrices}
        adam_weights = [weight for _, weight in parameters if id(weight) not in matrix_ids]
        self.momenta = [torch.zeros_like(weight) for weight in self.matrices]
        self.muon_lr, self.adam_lr = muon_lr, adam_lr
        self.adam = torch.optim.Adam(adam_weights, adam_lr, betas=(0.9, 0.95))

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Update the parameters, at `factor` times the learning rates, and clear the gradients."""
        self.adam.param_groups[0]["lr"] = self.adam_lr * factor
        self.adam.step()
        for weight, momentum in zip(self.matrices, self.momenta, strict=True):
            if weight.grad is None:
                continue
            momentum.lerp_(weight.grad, 0.1)
            update = weight.grad.lerp(momentum, 0.9).flatten(1)
            scale = self.muon_lr * factor * max(1, update.shape[0] / update.shape[1]) ** 0.5
            weight.add_(orthogonalize(update).view_as(weight), alpha=-scale)
            weight.grad = None
        self.adam.zero_grad()


def draw_crops(media_NCTHW: torch.Tensor, recipe: Recipe, generator: torch.Generator) -> torch.Tensor:
    crops, (crop_width, crop_height, frames) = [], recipe.crop
    height, width = media_NCTHW.shape[-2:]

    def draw(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    for _ in range(recipe.batch):
        clip_CTHW = media_NCTHW[draw(len(media_NCTHW))]
        y, x = draw(height - crop_height + 1), draw(width - crop_width + 1)
        crops.append(clip_CTHW[:, :frames, y : y + crop_height, x : x + crop_width])
    return torch.stack(crops)


@torch.no_grad()
def begin_linear(vae: Any) -> None:
    """Initialize a HunyuanVideo autoencoder so that it averages cells and spreads the averages again, without residual
    branches.

    Four clips after 200 steps: from the classes' initialization 15.0 to 18.7 dB and nearly without motion (correlation
    of changes with the original 0.41, 0.06, 0.05, 0.21), from this initialization 15.4 to 19.5 dB (0.51, 0.28, 0.51,
    0.48).
    """
    for name, module in vae.named_modules():
        if name.endswith("conv2.conv"):
            module.weight.zero_(), module.bias.zero_()
        elif name.endswith("conv_shortcut.conv"):
            torch.nn.init.orthogonal_(module.weight.flatten(1))
        elif name.endswith("samplers.0.conv.conv"):
            width, identity = len(module.weight), torch.eye(len(module.weight))
            if "down" in name:
                # The taps of the cell: for a stride of 2, the last two.
                cell = module.weight[:, :, -module.stride[0] :, 1:, 1:]
                places = cell[0, 0].numel()
                noise = 0.5 * torch.randn_like(cell) / (width * places) ** 0.5
                module.weight.zero_()
                cell.copy_(identity.view(width, width, 1, 1, 1) / places + noise)
            else:
                module.weight *= 0.3
                module.weight[:, :, 2, 1, 1] += identity
            module.bias.zero_()


@contextmanager
def half_size(vae: Any) -> Iterator[None]:
    """Context in which a HunyuanVideo autoencoder does not have the outer halving and doubling of width and height."""
    outer, last = vae.encoder.down_blocks[0], vae.decoder.up_blocks[2].upsamplers[0]
    halving, factor = outer.downsamplers, last.upsample_factor
    outer.downsamplers, last.upsample_factor = None, (2, 1, 1)
    try:
        yield
    finally:
        outer.downsamplers, last.upsample_factor = halving, factor


def train_autoencoder(
    part: str, media: Path, out: Path, log: Callable[[str], None] = print, steps: int | None = None
) -> Path:
    """Train an autoencoder on the demo's media and save it. The loss is the L1 of pixels, and latents get mean 0 and
    deviation 1."""
    recipe = RECIPES[part]
    small, steps = recipe.small_steps, steps or recipe.steps
    torch.manual_seed(0)
    vae, media_NCTHW = make_untrained(part, **recipe.shape), read_media(media, recipe)
    if small:
        begin_linear(vae)
    trainer, generator = Trainer(vae), torch.Generator().manual_seed(0)
    half_NCTHW = torch.nn.functional.interpolate(media_NCTHW, scale_factor=(1, 0.5, 0.5), mode="area")
    small_recipe = replace(recipe, crop=(recipe.crop[0] // 2, recipe.crop[1] // 2, recipe.crop[2]))
    total = small + steps
    for step in range(total):
        is_small = step < small
        with half_size(vae) if is_small else nullcontext():
            if is_small:
                pixels = draw_crops(half_NCTHW, small_recipe, generator)
            else:
                pixels = draw_crops(media_NCTHW, recipe, generator)
            error = take_step(vae, trainer, pixels, min(1, (step + 1) / 20, 2.5 * (1 - step / total) + 0.02))
        if (step + 1) % 100 == 0 or step + 1 == total:
            log(f"autoencoder {part}: step {step + 1} of {total}, error {error / 2:.3f}")
    with torch.no_grad():
        finish_autoencoder(vae, part, encode(vae, media_NCTHW))
    vae.save_pretrained(out)
    return out


def change(clip_NCTHW: torch.Tensor) -> torch.Tensor:
    """The changes since the first frame."""
    return clip_NCTHW[:, :, 1:] - clip_NCTHW[:, :, :1]


def take_step(vae: Any, trainer: Trainer, pixels: torch.Tensor, factor: float) -> float:
    """Train on pixels in -1..1, at `factor` times the learning rates. Returns the error before the step."""
    z = encode(vae, pixels)
    decoded = decode(vae, z + NOISE * torch.randn_like(z))
    error = (decoded - pixels).abs().mean()
    if pixels.shape[2] > 1:  # L1 alone prefers a clip without motion to a clip with slightly too much motion
        error = error + MOTION * (change(decoded) - change(pixels)).abs().mean()
    spread = z.transpose(0, 1).flatten(1)
    (error + 0.01 * (spread.mean(1).square() + (spread.std(1) - 1).square()).mean()).backward()
    trainer.step(factor)
    return error.item()


def finish_autoencoder(vae: Any, part: str, z_NCTHW: torch.Tensor) -> None:
    """Set the scaling factor, or the means and deviations, so that normalized latents have deviation 1. The posterior
    gets a constant deviation."""
    deviation, channels = z_NCTHW.std(), z_NCTHW.shape[1]
    if part in ("qwen_image_vae", "qwen_image_21_vae", "wan_vae"):
        mean, deviation = (find(z_NCTHW.transpose(0, 1).flatten(1), 1) for find in (torch.mean, torch.std))
        vae.register_to_config(latents_mean=mean.tolist(), latents_std=deviation.tolist())
    elif part == "flux2_vae":
        squares_CN = torch.nn.functional.pixel_unshuffle(z_NCTHW[:, :, 0], 2).transpose(0, 1).flatten(1)
        vae.bn.running_mean.copy_(squares_CN.mean(1))
        vae.bn.running_var.copy_(squares_CN.var(1))
    else:
        vae.register_to_config(scaling_factor=round(1 / deviation.item(), 4))
    if part == "dc_ae":
        return
    last = vae.encoder.conv_out if part == "flux_vae" else vae.quant_conv
    last.weight[channels:] = 0
    last.bias[channels:] = 2 * torch.log(NOISE * deviation)


# --- checkpoints ---


# -- transformers with an initialization for fast training

TRANSFORMERS: dict[str, dict[str, Any]] = {
    "image": {"model_dim": 128, "ff_dim": 384},
    "video": {"model_dim": 128, "ff_dim": 384},
    "sana": {"num_attention_heads": 4, "num_cross_attention_heads": 4, "cross_attention_dim": 128, "num_layers": 3},
    "z_image": {"dim": 128, "axes_dims": (16, 24, 24)},
    "qwen_image": {"num_attention_heads": 4},
    "qwen_image_21": {"num_attention_heads": 4},
    "flux2": {"num_attention_heads": 4},
    "flux3": {"num_attention_heads": 4, "num_single_layers": 4},
    "krea2": {"intermediate_size": 384},
    "wan": {"num_attention_heads": 4, "ffn_dim": 384},
}


def make_transformer(part: str, **overrides: Any) -> Any:
    """Make a transformer that starts as the identity and can learn the positions of its tokens.

    With the classes' initialization, a transformer must first learn to pass the noise through. And Kandinsky 5 has only
    rotary embeddings, which are relative: in pure noise, a token can find its position only from the number of tokens
    that it attends to. So biases of queries and keys give self-attention windows of random width and direction. After
    300 steps, six captions reproduced their photographs; without these biases, colors were in wrong places.
    """
    torch.manual_seed(0)
    model = make_untrained(part, **TRANSFORMERS[part], **overrides)
    with torch.no_grad():
        if part == "sana":
            _carry_through(model.patch_embed.proj.weight.flatten(1), model.proj_out.weight, range(32))
            return model
        if part == "z_image":  # the pipeline negates its output
            _carry_through(model.all_x_embedder["2-1"].weight, model.all_final_layer["2-1"].linear.weight, range(64))
            model.all_final_layer["2-1"].linear.weight.neg_()
            return model
        if part in ("qwen_image", "qwen_image_21"):
            _carry_through(model.img_in.weight, model.proj_out.weight, range(64))
            return model
        if part == "flux2":
            _carry_through(model.x_embedder.weight, model.proj_out.weight, range(128))
            return model
        if part == "flux3":
            _carry_through(model.x_embedders["image"].weight, model.proj_out.weight, range(128))
            return model
        if part == "krea2":
            _carry_through(model.img_in.weight, model.final_layer.linear.weight, range(64))
            for block in model.transformer_blocks:
                block.scale_shift_table[2::3] = 0.5  # rows: scale, shift and gate, twice
            return model
        if part == "wan":
            _begin_wan(model)
            return model
        channels, inputs = 16, model.visual_embeddings.in_layer.in_features // 4
        # The input has a patch's channels last, the output has them first.
        order = [place * inputs + channel for channel in range(channels) for place in range(4)]
        _carry_through(model.visual_embeddings.in_layer.weight, model.out_layer.out_layer.weight, order)
        for block in model.visual_transformer_blocks:
            for projection in (block.self_attention.to_query, block.self_attention.to_key):
                projection.bias.normal_()
            block.self_attention.to_query.weight *= 0.5
            gates = block.visual_modulation.out_layer.bias.view(9, -1)  # shift, scale and gate, three times
            gates[2::3] = 0.5
    return model


def _begin_wan(model: Any) -> None:
    """Initialize a Wan transformer. It gets the windows and gates of Kandinsky 5, because its positions are relative,
    too. And because no mask hides the padding after a text (about seventy of 512 tokens), padding gets scores and
    values of 0, and queries of cross-attention are scaled by 3, so that the text dominates the result.

    Four clips as averages of 8x8 cells, 300 steps: the loss at a noise level of 0.95 was 0.58, without this
    initialization 0.82.
    """
    # The output has a patch's channels last.
    order = [channel * 4 + place for place in range(4) for channel in range(16)]
    _carry_through(model.patch_embedding.weight.flatten(1), model.proj_out.weight, order)
    embedder = model.condition_embedder.text_embedder
    for layer in (embedder.linear_1, embedder.linear_2):
        layer.bias.zero_()
    for block in model.blocks:
        for projection in (block.attn1.to_q, block.attn1.to_k):
            projection.bias.normal_()
        block.attn1.to_q.weight *= 0.5
        block.scale_shift_table[:, 2::3] = 0.5  # rows: shift, scale and gate, twice
        for projection in (block.attn2.to_k, block.attn2.to_v):
            projection.bias.zero_()
        block.attn2.norm_q.weight *= 3


def _carry_through(into: torch.Tensor, out: torch.Tensor, columns: Sequence[int]) -> None:
    """Set `into` to a random embedding of the input's `columns`, and `out` to its inverse."""
    basis = torch.nn.init.orthogonal_(torch.empty(len(into), len(columns)))
    gain = (len(into) / len(columns)) ** 0.5
    into[:, list(columns)] = basis * gain
    out.copy_(basis.T / gain)


def build_checkpoint(kind: str, autoencoder: Path, out: Path) -> Path:
    """Build a complete checkpoint in diffusers layout. The index of the pipeline is written last."""
    spec = KINDS[kind]
    texts = [name for name in spec.components if name.startswith("text_encoder")]
    make_transformer(spec.components["transformer"], **spec.transformer).save_pretrained(out / "transformer")
    shutil.copytree(autoencoder, out / "vae", dirs_exist_ok=True)
    tokenizers = [name.replace("text_encoder", spec.tokenizer) for name in texts]
    return build(kind, out, only=[*texts, *tokenizers, "scheduler"])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = [kind for kind in KINDS if "transformer" in KINDS[kind].components]
    parser.add_argument("kinds", nargs="+", choices=kinds, help="checkpoints to build")
    parser.add_argument(
        "--autoencoder",
        choices=RECIPES,
        required=True,
        help="autoencoder of the checkpoints; it is trained unless it exists",
    )
    parser.add_argument(
        "--media", type=Path, required=True, help="media of examples/demo_media.py to train the autoencoder on"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder that gets a folder for each checkpoint")
    arguments = parser.parse_args(argv)
    from schemas.cli.starting import silence_libraries

    silence_libraries()
    torch.set_num_threads(1)
    folder = arguments.out / arguments.autoencoder
    if not (folder / "config.json").exists():
        train_autoencoder(arguments.autoencoder, arguments.media, folder, lambda text: print(text, flush=True))
    for kind in arguments.kinds:
        build_checkpoint(kind, folder, arguments.out / kind)


if __name__ == "__main__":
    main()
