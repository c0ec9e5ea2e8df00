"""What is stored of a posterior: a sample, its mean, or its moments; and numbers that are not finite."""

import math

import pytest
import torch
from diffusers import Flux2KleinPipeline
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from schemas.catalog import FAMILIES
from schemas.config.pipeline import Config
from stages import encode_latents
from stages.encoding import model_loading
from stages.encoding.vae import base, dc_ae, flux, flux2, hunyuan_video, qwen_image, wan
from tests.project import SETTINGS

CPU = torch.device("cpu")
KINDS = {
    "kandinsky5-image-t2i": (flux, 1),
    "kandinsky5-video-t2v": (hunyuan_video, 5),
    "sana": (dc_ae, 1),
    "qwen-image": (qwen_image, 1),
    "flux2-klein": (flux2, 1),
    "z-image": (flux, 1),
    "wan2.1-t2v": (wan, 5),
    "wan2.2-5b-i2v": (wan, 5),
}
WITH_POSTERIOR = [kind for kind in KINDS if kind != "sana"]
WITH_TIME = (
    "kandinsky5-video-t2v",
    "qwen-image",
    "wan2.1-t2v",
    "wan2.2-5b-i2v",
)  # an autoencoder of other kinds knows images only


@pytest.fixture(scope="module")
def encoders(tiny):
    """kind -> (autoencoder, pixels_BCTHW of two clips)."""
    torch.set_num_threads(1)
    found = {}
    for kind, (module, frames) in KINDS.items():
        coarse = torch.rand(2, 3, frames, 6, 6, generator=torch.Generator().manual_seed(2)) * 2 - 1
        pixels = torch.nn.functional.interpolate(coarse, (frames, 64, 64), mode="trilinear")
        normalization = FAMILIES[SETTINGS[kind]["family"]].normalization
        ours = module.Autoencoder(str(tiny(kind)), None, torch.float32, CPU, normalization=normalization)
        if kind == "flux2-klein":  # the tiny one's variances are equal
            ours._vae.bn.running_var.mul_(torch.linspace(0.5, 2, 128))
            ours._normalizer = ours._make_normalizer(normalization)
        found[kind] = ours, pixels
    return found


def noise(seed: int, shape) -> torch.Tensor:
    return torch.randn((1, *shape), generator=torch.Generator().manual_seed(seed))[0]


def normalized(kind: str, vae, values: torch.Tensor, deviation: bool = False) -> torch.Tensor:
    """A posterior's mean, or its deviation, as the family's pipelines normalize latents; (B, C, T, h, w)."""
    if kind == "flux2-klein":
        values = Flux2KleinPipeline._patchify_latents(values)
        shift, scale = vae.bn.running_mean, 1 / torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps)
    elif kind.startswith(("wan", "qwen")):
        shift, scale = torch.tensor(vae.config.latents_mean), 1 / torch.tensor(vae.config.latents_std)
    else:
        shift = torch.tensor([vae.config.shift_factor if kind == "z-image" else 0.0])
        scale = torch.tensor([vae.config.scaling_factor])
    shift, scale = (each.view(1, -1, *[1] * (values.ndim - 2)) for each in (shift, scale))
    made = (values - (0 if deviation else shift)) * scale
    return made if kind in WITH_TIME else made.unsqueeze(2)


@pytest.mark.parametrize("kind", WITH_POSTERIOR)
def test_moments_are_the_pipelines_mean_and_deviation(encoders, kind, record_property) -> None:
    encoder, pixels = encoders[kind]
    with torch.no_grad():
        posterior = encoder._vae.encode(pixels if kind in WITH_TIME else pixels[:, :, 0]).latent_dist
    mean, logvar = encoder.encode(pixels, [3, 4], "moments").chunk(2, dim=1)
    wanted = normalized(kind, encoder._vae, posterior.mode())
    relative = (logvar / 2).exp() / normalized(kind, encoder._vae, posterior.std, deviation=True) - 1
    largest = max((mean - wanted).abs().max().item(), relative.abs().max().item())
    record_property("largest difference", largest)
    assert mean.shape == wanted.shape and largest <= 5e-6


def to_squares(values_CHW: torch.Tensor) -> torch.Tensor:
    return Flux2KleinPipeline._patchify_latents(values_CHW[None])[0]


def _drawn(kind: str, latent_CTHW: torch.Tensor) -> tuple[int, ...]:
    """The shape in which diffusers draws: an image VAE knows no time, and nothing of squares."""
    if kind == "flux2-klein":
        channels, _, height, width = latent_CTHW.shape
        return channels // 4, 2 * height, 2 * width
    return tuple(latent_CTHW.shape) if kind in WITH_TIME else tuple(latent_CTHW[:, 0].shape)


@pytest.mark.parametrize("kind", WITH_POSTERIOR)
def test_a_sample_is_its_moments_and_the_seeds_noise(encoders, kind) -> None:
    encoder, pixels = encoders[kind]
    moments = encoder.encode(pixels, [3, 4], "moments")
    mean, logvar = moments.chunk(2, dim=1)
    assert moments.shape[1] == 2 * FAMILIES[SETTINGS[kind]["family"]].latent_channels
    assert torch.allclose(mean, encoder.encode(pixels, [3, 4], "mode"), atol=1e-6)
    sampled = encoder.encode(pixels, [3, 4], "sample")
    for i, seed in enumerate((3, 4)):
        drawn = noise(seed, _drawn(kind, mean[i]))
        drawn = to_squares(drawn) if kind == "flux2-klein" else drawn
        mine = mean[i] + (logvar[i] / 2).exp() * drawn.reshape(mean[i].shape)
        assert (mine - sampled[i]).abs().max() <= 2e-6 and (mine - mean[i]).abs().max() > 0.1
    assert torch.equal(moments, encoder.encode(pixels, [5, 6], "moments")), "no seed is used"
    assert (moments[1:] - encoder.encode(pixels[1:], [4], "moments")).abs().max() <= 1e-5, "alone as in a batch"


def test_log_variances_are_clamped_as_diffusers_does() -> None:
    parameters = torch.cat([torch.zeros(1, 4, 2, 2), torch.tensor([-99.0, -1.0, 3.0, 99.0]).view(1, 4, 1, 1)
                            .expand(1, 4, 2, 2)], dim=1)  # fmt: skip
    logvar = base.posterior_moments(parameters, base.Normalizer(0.5))[0, 4:, 0, 0] - 2 * math.log(0.5)
    assert torch.allclose(logvar, torch.tensor([-30.0, -1.0, 3.0, 20.0]))
    assert torch.allclose((logvar / 2).exp(), DiagonalGaussianDistribution(parameters).std[0, :, 0, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_moments_are_decoded_as_their_mean(encoders, kind) -> None:
    encoder, pixels = encoders[kind]
    moments, mode = (encoder.encode(pixels, [0, 1], posterior) for posterior in ("moments", "mode"))
    assert torch.equal(encoder.decode(moments), encoder.decode(mode))
    assert (moments.shape == mode.shape) == (kind == "sana"), "DC-AE has no posterior"


def test_the_posterior_is_part_of_the_caches_name_where_there_is_one(project) -> None:
    def names(kind: str) -> list[str]:
        home = project(kind)
        return [
            encode_latents.STAGE.fingerprint(home.config(f"latents.posterior={posterior}"))
            for posterior in ("sample", "mode", "moments")
        ]

    assert len(set(names("kandinsky5-image-t2i"))) == 3 and len(set(names("sana"))) == 1


def finite(latents: torch.Tensor) -> list[bool]:
    """Of each sample, as the worker asks before it stores one."""
    return [model_loading.to_array(sample).is_finite() for sample in latents]


@pytest.mark.parametrize("kind", ["kandinsky5-video-t2v", "sana"])
def test_one_sample_that_is_not_finite_spoils_no_other(encoders, kind) -> None:
    encoder, pixels = encoders[kind]
    broken = pixels.clone()
    broken[0, 0, 0, 5, 5] = math.nan
    for posterior in ("sample", "moments"):
        assert finite(encoder.encode(broken, [0, 1], posterior)) == [False, True]


def test_sana_encodes_in_float32_unless_told_otherwise() -> None:
    def precision(family: str, **latents) -> str:
        datasets = [{"id": "a", "instance_data_dir": "b"}]
        made = {"root": "r", "model": {"family": family}, "datasets": datasets, "latents": latents}
        config = Config.model_validate(made)
        assert Config.model_validate(config.model_dump(by_alias=True)) == config
        return config.latents.precision or config.model.precision

    assert precision("sana") == "float32" and precision("kandinsky5-image") == "bfloat16"
    assert precision("sana", precision="bfloat16") == "bfloat16"
