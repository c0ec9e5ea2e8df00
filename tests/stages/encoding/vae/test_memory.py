"""Memory options: options that give the plain result, options that do not, and that options are in effect."""

from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F

from stages import encode_latents
from stages.encoding.vae import base
from tests.forms import long
from tests.stages.encoding.vae.autoencoders import AUTOENCODERS, CPU, LIMIT, open_autoencoder, open_reference

NAMES = [name if name == "flux" else long(name) for name in AUTOENCODERS]


def clip(frames: int, height: int = 64, width: int = 96) -> torch.Tensor:
    """pixels_BCTHW that vary over space and time."""
    coarse = torch.rand(1, 3, max(2, frames // 3), 6, 9, generator=torch.Generator().manual_seed(frames)) * 2 - 1
    return F.interpolate(coarse, (frames, height, width), mode="trilinear").contiguous()


@pytest.fixture(scope="module")
def opened(tiny):
    """opened(name, **memory_options) -> our autoencoder."""
    return cache(partial(open_autoencoder, tiny))


@pytest.mark.slow
@pytest.mark.parametrize("frames_at_once", [long(1), long(2), 3, long(17)])
def test_chunked_frames_give_the_plain_result(opened, frames_at_once, record_property) -> None:
    """One frame, one window and several windows, with chunks that do and do not divide them."""
    plain, encoder = opened("hunyuan_video"), opened("hunyuan_video", chunk_frames=frames_at_once)
    for count in (1, 5, 17, 29):
        expected, result = (each.encode(clip(count, 32, 48), [0], "moments") for each in (plain, encoder))
        gap = (result - expected).abs().max().item()
        record_property(f"largest_difference_{count}_frames", gap)
        assert result.shape == expected.shape and gap <= LIMIT


@pytest.mark.parametrize("name", NAMES)
def test_slicing_is_encoding_one_by_one(opened, name) -> None:
    frames = 5 if AUTOENCODERS[name].family.video else 1
    pixels = torch.cat([clip(frames), clip(frames).flip(3)])
    plain, sliced = opened(name), opened(name, slicing=True)
    alone = torch.cat([plain.encode(pixels[i : i + 1], [i], "sample") for i in range(2)])
    assert torch.equal(sliced.encode(pixels, [0, 1], "sample"), alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_tiles_are_the_librarys_with_the_geometry_of_the_catalogue(tiny, opened, name, record_property) -> None:
    """The result differs from the result without tiles; the difference is recorded. A picture that is not larger than a
    tile has no tiles."""
    kind, family = AUTOENCODERS[name], AUTOENCODERS[name].family
    side, stride = family.tile
    assert stride % family.spatial_stride == 0 and side % family.spatial_stride == 0
    plain, tiled = opened(name), opened(name, tile=side, tile_stride=stride)
    frames = 5 if family.video else 1
    small, large = clip(frames, 64, 96), clip(frames, side // 2, side + stride // 2)
    assert torch.equal(plain.encode(small, [0], "mode"), tiled.encode(small, [0], "mode"))
    untiled, result = plain.encode(large, [0], "mode"), tiled.encode(large, [0], "mode")
    vae = open_reference(tiny, name)
    if name in ("flux", "flux2"):
        vae.enable_tiling()
        vae.tile_sample_min_size, vae.tile_latent_min_size = side, side // 8
    elif name.startswith("wan"):
        vae.enable_tiling()  # our tiles are its default, which it counts in squares of pixels
    else:
        vae.enable_tiling(side, side, tile_sample_stride_height=stride, tile_sample_stride_width=stride)
    with torch.no_grad():
        encoded = vae.encode(large if kind.takes_time else large[:, :, 0])
    z = encoded.latent if name == "dc_ae" else encoded.latent_dist.mode()
    expected = plain._normalizer.apply(z[:, :, None] if name == "flux2" else z)
    assert (result - expected.reshape(result.shape)).abs().max() <= LIMIT
    gap = ((result - untiled).abs().mean() / untiled.std()).item()
    record_property("mean_difference_in_deviations", gap)
    assert result.shape == untiled.shape and 1e-3 < gap < 1.0


def test_memory_options_are_in_the_caches_name_and_in_force(project) -> None:
    """As the stage loads it; slicing changes no value and is not a part of the name."""
    home, name = project("kandinsky5-video-t2v"), encode_latents.STAGE.fingerprint
    plain = encode_latents.STAGE.fingerprint_inputs(home.config())
    assert encode_latents.STAGE.fingerprint_inputs(home.config("latents.slicing=true")) == plain
    config = home.config("latents.tiling=true", "latents.chunk_frames=3", "latents.slicing=true")
    memory_options = {"tiling": True, "tile": 256, "tile_stride": 192, "chunk_frames": 3}
    assert encode_latents.STAGE.fingerprint_inputs(config)["settings"] == {**plain["settings"], **memory_options}
    loaded = base.load_autoencoder(config.model, config.latents, CPU)
    assert loaded._vae.use_slicing and loaded._vae.use_tiling and loaded._vae.tile_sample_min_height == 256
    for kind in ("wan2.1-t2v", "kandinsky5-image-t2i"):  # it already computes a few frames at a time, or has one frame
        second_home = project(kind)
        assert name(second_home.config("latents.chunk_frames=3")) == name(second_home.config())
    assert name(second_home.config("latents.tiling=true")) != name(second_home.config())
