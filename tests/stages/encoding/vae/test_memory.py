"""Memory options: what equals the plain result, what does not, and that they are in force."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.autoencoders import autoencoder_kl_hunyuan_video as diffusers_hunyuan
from diffusers.models.autoencoders.autoencoder_dc import AutoencoderDC
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan

from schemas.catalog import FAMILIES
from stages import encode_latents
from stages.encoding.vae import base
from stages.encoding.vae.base import MemoryOptions
from tests.forms import long

CPU = torch.device("cpu")
LIMIT = 1e-5
HunyuanVideo = diffusers_hunyuan.AutoencoderKLHunyuanVideo
# autoencoder -> (checkpoint, diffusers' class, family)
KINDS = {
    "flux2": ("flux2-klein", AutoencoderKLFlux2, FAMILIES["flux2-klein"]),
    "flux": ("kandinsky5-image-t2i", AutoencoderKL, FAMILIES["kandinsky5-image"]),
    "hunyuan_video": ("kandinsky5-video-t2v", HunyuanVideo, FAMILIES["kandinsky5-video"]),
    "dc_ae": ("sana", AutoencoderDC, FAMILIES["sana"]),
    "qwen_image": ("qwen-image", AutoencoderKLQwenImage, FAMILIES["qwen-image"]),
    "wan": ("wan2.1-t2v", AutoencoderKLWan, FAMILIES["wan2.1"]),
    "wan 5B": ("wan2.2-5b-i2v", AutoencoderKLWan, FAMILIES["wan2.2-5b"]),
}


def clip(frames: int, height: int = 64, width: int = 96, batch: int = 1) -> torch.Tensor:
    """pixels_BCTHW that vary over space and time."""
    coarse = torch.rand(batch, 3, max(2, frames // 3), 6, 9, generator=torch.Generator().manual_seed(frames)) * 2 - 1
    return F.interpolate(coarse, (frames, height, width), mode="trilinear").contiguous()


@pytest.fixture(scope="module")
def opened(tiny):
    """opened(name, **memory_options) -> our autoencoder in float32."""
    torch.set_num_threads(1)

    def make(name: str, **memory_options):
        kind, _, family = KINDS[name]
        module = importlib.import_module(f"stages.encoding.vae.{family.autoencoder}")
        options, normalization = MemoryOptions(**memory_options), family.normalization
        return module.Autoencoder(str(tiny(kind)), None, torch.float32, CPU, options, normalization)

    return make


@pytest.fixture(scope="module")
def plain(opened):
    """T -> the plain encoder's moments of clip(T)."""
    encoder = opened("hunyuan_video")
    return {frames: encoder.encode(clip(frames), [0], "moments") for frames in (1, 5, 17, 29)}


@pytest.mark.slow
@pytest.mark.parametrize("frames_at_once", [long(1), long(2), 3, long(17)])
def test_chunked_frames_give_the_plain_result(opened, plain, frames_at_once, record_property) -> None:
    """One frame, one window and several, chunks that do and do not divide them."""
    encoder = opened("hunyuan_video", chunk_frames=frames_at_once)
    for count, wanted in plain.items():
        found = encoder.encode(clip(count), [0], "moments")
        gap = (found - wanted).abs().max().item()
        record_property(f"largest_difference_{count}_frames", gap)
        assert found.shape == wanted.shape and gap <= LIMIT


@pytest.mark.parametrize("name", [name if name == "flux" else long(name) for name in KINDS])
def test_slicing_is_encoding_one_by_one(opened, name) -> None:
    frames = 5 if KINDS[name][2].video else 1
    pixels = torch.cat([clip(frames), clip(frames).flip(3)])
    plain, sliced = opened(name), opened(name, slicing=True)
    alone = torch.cat([plain.encode(pixels[i : i + 1], [i], "sample") for i in range(2)])
    assert torch.equal(sliced.encode(pixels, [0, 1], "sample"), alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name if name == "flux" else long(name) for name in KINDS])
def test_tiles_are_the_librarys_with_the_geometry_of_the_catalogue(tiny, opened, name, record_property) -> None:
    """Another result than without; the difference is recorded. A picture no larger than a tile has none."""
    kind, reference, family = KINDS[name]
    side, stride = family.tile
    assert stride % family.spatial_stride == 0 and side % family.spatial_stride == 0
    plain, tiled = opened(name), opened(name, tile=side, tile_stride=stride)
    frames = 5 if KINDS[name][2].video else 1
    small, large = clip(frames, 64, 96), clip(frames, side // 2, side + stride // 2)
    assert torch.equal(plain.encode(small, [0], "mode"), tiled.encode(small, [0], "mode"))
    untiled, found = plain.encode(large, [0], "mode"), tiled.encode(large, [0], "mode")
    vae = reference.from_pretrained(tiny(kind) / "vae").eval()
    if name in ("flux", "flux2"):
        vae.enable_tiling()
        vae.tile_sample_min_size, vae.tile_latent_min_size = side, side // 8
    elif name.startswith("wan"):
        vae.enable_tiling()  # our tiles are its own by default, which it counts in squares of pixels
    else:
        vae.enable_tiling(side, side, tile_sample_stride_height=stride, tile_sample_stride_width=stride)
    with torch.no_grad():
        encoded = vae.encode(large if name == "qwen_image" or frames > 1 else large[:, :, 0])
    z = encoded.latent if name == "dc_ae" else encoded.latent_dist.mode()
    wanted = plain._normalizer.apply(z[:, :, None] if name == "flux2" else z)
    assert (found - wanted.reshape(found.shape)).abs().max() <= LIMIT
    gap = ((found - untiled).abs().mean() / untiled.std()).item()
    record_property("mean_difference_in_deviations", gap)
    assert found.shape == untiled.shape and 1e-3 < gap < 1.0


def test_memory_options_are_in_the_caches_name_and_in_force(project) -> None:
    """As the stage loads it; slicing changes no value and is no part of the name."""
    home = project("kandinsky5-video-t2v")
    plain = encode_latents.STAGE.fingerprint_inputs(home.config())
    assert encode_latents.STAGE.fingerprint_inputs(home.config("latents.slicing=true")) == plain
    config = home.config("latents.tiling=true", "latents.chunk_frames=3", "latents.slicing=true")
    memory_options = {"tiling": True, "tile": 256, "tile_stride": 192, "chunk_frames": 3}
    assert encode_latents.STAGE.fingerprint_inputs(config)["settings"] == {**plain["settings"], **memory_options}
    loaded = base.load_autoencoder(config.model, config.latents, CPU)
    assert loaded._vae.use_slicing and loaded._vae.use_tiling and loaded._vae.tile_sample_min_height == 256
    other = project("wan2.1-t2v")
    assert encode_latents.STAGE.fingerprint(other.config("latents.chunk_frames=3")) == encode_latents.STAGE.fingerprint(
        other.config()
    ), "of no effect on autoencoders that take a few frames at a time anyway"
    image = project("kandinsky5-image-t2i")
    name = encode_latents.STAGE.fingerprint
    assert name(image.config("latents.chunk_frames=3")) == name(image.config()), "of no effect on images"
    assert name(image.config("latents.tiling=true")) != name(image.config())
