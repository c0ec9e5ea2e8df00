"""What is stored of a posterior. The conformance suite compares every family's latents with its pipeline."""

import math

import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from stages import encode_latents
from stages.encoding import model_loading
from stages.encoding.vae import base
from tests.stages.encoding.vae.autoencoders import open_autoencoder


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
    assert home.config().latents.precision == "float32", "of Sana, unless told otherwise"


@pytest.mark.parametrize(("name", "frames"), [("hunyuan_video", 5), ("dc_ae", 1)])
def test_one_sample_that_is_not_finite_spoils_no_other(tiny, name, frames) -> None:
    broken = torch.rand(2, 3, frames, 64, 96) * 2 - 1
    broken[0, 0, 0, 5, 5] = math.nan
    ours = open_autoencoder(tiny, name)
    for posterior in ("sample", "moments"):
        latents = ours.encode(broken, [0, 1], posterior)
        assert [model_loading.to_array(sample).is_finite() for sample in latents] == [False, True]
