"""Stored latents, compared with the installed autoencoders and pipelines for the same pixels and seeds; stored
posteriors: a sample, the mean, or the moments."""

import math
from functools import cache
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import torch
from diffusers import Flux2KleinPipeline
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.models.transformers.transformer_kandinsky import Kandinsky5Transformer3DModel
from diffusers.video_processor import VideoProcessor
from PIL import Image

from stages import encode_latents
from stages.encoding import model_loading
from stages.encoding.vae import base
from tests.forms import long
from tests.stages.encoding.vae.autoencoders import (
    AUTOENCODERS,
    CPU,
    LIMIT,
    frames,
    open_autoencoder,
    open_reference,
    pixels,
)

NAMES = [long(name) if name == "wan 5B" else name for name in AUTOENCODERS]
FEW = [name if name in ("flux", "flux2") else long(name) for name in AUTOENCODERS]
WITH_POSTERIOR = [name for name in AUTOENCODERS if name != "dc_ae"]


@pytest.fixture(scope="module")
def loaded(tiny):
    """loaded(name) -> (ours, diffusers' own)."""
    diffusers.utils.logging.set_verbosity_error()

    def pair(name: str):
        ours, vae = open_autoencoder(tiny, name), open_reference(tiny, name)
        if name == "flux2":  # the variances of the tiny autoencoder are equal
            for model in (ours._vae, vae):
                model.bn.running_var.mul_(torch.linspace(0.5, 2, 128))
            ours._normalizer = ours._make_normalizer(AUTOENCODERS[name].family.normalization)
        return ours, vae

    return cache(pair)


def generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def statistics(name: str, vae) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and factor of each channel, or of all channels, as the families' pipelines compute them; they broadcast to
    BCTHW."""
    if name == "flux2":
        mean, factor = vae.bn.running_mean, 1 / torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps)
    elif name.startswith(("wan", "qwen")):
        mean, factor = torch.tensor(vae.config.latents_mean), 1 / torch.tensor(vae.config.latents_std)
    else:
        mean = torch.tensor([vae.config.shift_factor if name == "shifted flux" else 0.0])
        factor = torch.tensor([vae.config.scaling_factor])
    return mean.view(1, -1, 1, 1, 1), factor.view(1, -1, 1, 1, 1)


class Sampled:
    """An autoencoder whose posterior's mode is the drawn sample."""

    def __init__(self, vae, sample: torch.Tensor) -> None:
        self.bn, self.config, self.sample = vae.bn, vae.config, sample

    def encode(self, pixels_BCHW: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: self.sample))


@torch.no_grad()
def reference_latents(name, vae, pixels_BCTHW, seed) -> torch.Tensor:
    """latents_BCTHW by the autoencoder itself."""
    if name == "qwen_image":  # as in its image-to-image pipeline
        pipe = diffusers.QwenImageImg2ImgPipeline(*[None] * 5)
        pipe.vae = vae
        return pipe._encode_vae_image(pixels_BCTHW, generator(seed))
    takes_time = AUTOENCODERS[name].takes_time
    encoded = vae.encode(pixels_BCTHW if takes_time else pixels_BCTHW[:, :, 0])
    z = encoded.latent if name == "dc_ae" else encoded.latent_dist.sample(generator(seed))
    if name == "flux2":  # as in its pipeline, which uses the mode for references
        pipe = Flux2KleinPipeline(*[None] * 5)
        pipe.vae = Sampled(vae, z)
        return pipe._encode_vae_image(pixels_BCTHW[:, :, 0], None).unsqueeze(2)
    mean, factor = statistics(name, vae)
    return ((z if takes_time else z.unsqueeze(2)) - mean) * factor


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_latents_equal_diffusers(loaded, name, record_property):
    ours, vae = loaded(name)
    kind = AUTOENCODERS[name]
    for count in kind.frames:
        gap = 0.0
        for index, seed in enumerate((3, 2**62 + 5)):
            inputs = pixels(frames(count, index))
            latents = ours.encode(inputs, [seed], "sample")
            assert latents.shape[2:] == ((count + 3) // 4, 64 // kind.stride, 96 // kind.stride)
            gap = max(gap, (latents - reference_latents(name, vae, inputs, seed)).abs().max().item())
        record_property(f"largest_difference_{count}_frames", gap)
        assert gap <= LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_latents_do_not_depend_on_what_they_are_batched_with(loaded, name, record_property):
    ours, _ = loaded(name)
    clips = [frames(AUTOENCODERS[name].frames[-1], seed) for seed in range(2)]
    together = ours.encode(pixels(*clips), [11, 12], "sample")
    alone = ours.encode(pixels(clips[1]), [12], "sample")
    # Kernels round differently at another batch size: rounding of float32, relative to the largest value.
    gap = ((together[1] - alone[0]).abs().max() / alone.abs().max()).item()
    record_property("largest_relative_difference", gap)
    assert gap <= LIMIT
    assert torch.equal(alone, ours.encode(pixels(clips[1]), [12], "sample"))


@pytest.mark.parametrize("name", ["flux", "hunyuan_video"])
def test_what_a_sample_starts_from_equals_the_pipelines(loaded, tiny, name, record_property):
    """A source image, and the first frame of a clip."""
    ours, vae = loaded(name)
    clip, options = frames(), {}
    pipe = (diffusers.Kandinsky5I2IPipeline if name == "flux" else diffusers.Kandinsky5I2VPipeline)(*[None] * 7)
    pipe.vae = vae
    if name == "hunyuan_video":
        pipe.transformer = Kandinsky5Transformer3DModel.from_pretrained(tiny("kandinsky5-video-i2v") / "transformer")
        options = {"num_frames": 9}
    # The pipeline draws its starting noise from the same generator first; starting the generator anew when the encoder
    # is reached makes the posterior's draw the draw of a generator with this seed.
    random = generator(5)
    handle = vae.encoder.register_forward_pre_hook(lambda *_: random.manual_seed(5) and None)
    try:
        arguments = {"width": 96, "height": 64, "dtype": torch.float32, "device": CPU, "generator": random}
        latents_BTHWC = pipe.prepare_latents(Image.fromarray(clip[0]), 1, 16, **arguments, **options)
    finally:
        handle.remove()
    channels = slice(16, 32) if name == "flux" else slice(16)
    pipeline_latents = latents_BTHWC[:, :1, ..., channels].permute(0, 4, 1, 2, 3)
    gap = (pipeline_latents - ours.encode(pixels(clip), [5], "sample")).abs().max().item()
    record_property("largest_difference", gap)
    assert latents_BTHWC.shape[1] == (1 if name == "flux" else 3) and gap <= LIMIT


@pytest.mark.slow
def test_wans_first_frame_equals_the_pipelines(loaded, record_property):
    ours, vae = loaded("wan 5B")
    clip = frames(9)
    pipe = diffusers.WanImageToVideoPipeline(
        tokenizer=None, text_encoder=None, vae=vae, scheduler=None, expand_timesteps=True
    )
    image = pipe.video_processor.preprocess(Image.fromarray(clip[0]), height=64, width=96)
    _, condition, _ = pipe.prepare_latents(image, 1, 48, 64, 96, 9, torch.float32, CPU, generator(0))
    posterior = AUTOENCODERS["wan 5B"].family.conditions["i2v"].posterior
    gap = (ours.encode(pixels(clip[:1]), [5], posterior) - condition).abs().max().item()
    record_property("largest_difference", gap)
    assert gap <= LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_decoded_pictures_equal_the_pipelines(loaded, name):
    """Latents and stored moments, whose mean is decoded."""
    ours, vae = loaded(name)
    clips = [frames(AUTOENCODERS[name].frames[-1], seed) for seed in range(2)]
    latents = ours.encode(pixels(*clips), [0, 1], "mode")
    decoded = ours.decode(latents)
    assert decoded.dtype == torch.uint8 and decoded.shape == np.stack(clips).shape
    assert torch.equal(ours.decode(ours.encode(pixels(*clips), [0, 1], "moments")), decoded)
    mean, factor = statistics(name, vae)
    z = latents / factor + mean
    with torch.no_grad():
        if name == "flux2":
            z = Flux2KleinPipeline._unpatchify_latents(z[:, :, 0])[:, :, None]
        if AUTOENCODERS[name].family.video:
            videos = VideoProcessor(8).postprocess_video(vae.decode(z).sample, output_type="pil")
        else:
            images = vae.decode(z).sample[:, :, 0] if name == "qwen_image" else vae.decode(z[:, :, 0]).sample
            videos = [[image] for image in VaeImageProcessor().postprocess(images, output_type="pil")]
    expected = np.stack([np.stack([*map(np.asarray, video)]) for video in videos])
    gap = np.abs(decoded.numpy().astype(int) - expected)
    assert gap.max() <= 1 and gap.mean() < 1e-3  # roundings, because kernels depend on the memory alignment


def to_squares(values_BCHW: torch.Tensor) -> torch.Tensor:
    return Flux2KleinPipeline._patchify_latents(values_BCHW)


@pytest.mark.parametrize("name", WITH_POSTERIOR)
def test_moments_are_the_pipelines_mean_and_deviation(loaded, name, record_property) -> None:
    """A sample is the mean plus the deviation times the seed's noise, in the shape in which diffusers draws it."""
    ours, vae = loaded(name)
    kind = AUTOENCODERS[name]
    inputs = pixels(*(frames(min(5, kind.frames[-1]), seed, 64) for seed in range(2)))
    with torch.no_grad():
        posterior = vae.encode(inputs if kind.takes_time else inputs[:, :, 0]).latent_dist

    def to_latents(values: torch.Tensor) -> torch.Tensor:
        values = to_squares(values) if name == "flux2" else values
        return values if kind.takes_time else values.unsqueeze(2)

    (shift, factor), (center, deviation) = statistics(name, vae), map(to_latents, (posterior.mode(), posterior.std))
    moments = ours.encode(inputs, [3, 4], "moments")
    mean, logvar = moments.chunk(2, dim=1)
    assert moments.shape[1] == 2 * kind.family.latent_channels
    relative = (logvar / 2).exp() / (deviation * factor) - 1
    largest = max((mean - (center - shift) * factor).abs().max().item(), relative.abs().max().item())
    record_property("largest difference", largest)
    assert largest <= 5e-6
    assert torch.allclose(mean, ours.encode(inputs, [3, 4], "mode"), atol=1e-6)
    sampled = ours.encode(inputs, [3, 4], "sample")
    for i, seed in enumerate((3, 4)):
        draws = to_latents(torch.randn(posterior.mean[:1].shape, generator=generator(seed)))
        mine = mean[i] + (logvar[i] / 2).exp() * draws[0]
        assert (mine - sampled[i]).abs().max() <= 2e-6 and (mine - mean[i]).abs().max() > 0.1
    assert torch.equal(moments, ours.encode(inputs, [5, 6], "moments")), "no seed is used"


def test_log_variances_are_clamped_as_diffusers_does() -> None:
    logvar_1411 = torch.tensor([-99.0, -1.0, 3.0, 99.0]).view(1, 4, 1, 1)
    parameters = torch.cat([torch.zeros(1, 4, 2, 2), logvar_1411.expand(1, 4, 2, 2)], dim=1)
    logvar = base.posterior_moments(parameters, base.Normalizer(0.5))[0, 4:, 0, 0] - 2 * math.log(0.5)
    assert torch.allclose(logvar, torch.tensor([-30.0, -1.0, 3.0, 20.0]))
    assert torch.allclose((logvar / 2).exp(), DiagonalGaussianDistribution(parameters).std[0, :, 0, 0])


def test_the_posterior_is_part_of_the_caches_name_if_there_is_one(project) -> None:
    for kind, count in (("kandinsky5-image-t2i", 3), ("sana", 1)):
        home = project(kind)
        configs = [home.config(f"latents.posterior={posterior}") for posterior in ("sample", "mode", "moments")]
        assert len(set(map(encode_latents.STAGE.fingerprint, configs))) == count
    assert home.config().latents.precision == "float32", "the default for Sana"


@pytest.mark.parametrize("name", ["hunyuan_video", "dc_ae"])
def test_one_sample_that_is_not_finite_spoils_no_other(loaded, name) -> None:
    broken = pixels(*(frames(AUTOENCODERS[name].frames[-1], seed) for seed in range(2)))
    broken[0, 0, 0, 5, 5] = math.nan
    for posterior in ("sample", "moments"):
        latents = loaded(name)[0].encode(broken, [0, 1], posterior)
        assert [model_loading.to_array(sample).is_finite() for sample in latents] == [False, True]
