"""Stored latents against the installed autoencoders and pipelines, for the same pixels and seeds."""

import importlib
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.autoencoders.autoencoder_dc import AutoencoderDC
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import AutoencoderKLHunyuanVideo
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.transformers.transformer_kandinsky import Kandinsky5Transformer3DModel
from diffusers.video_processor import VideoProcessor
from PIL import Image

from schemas.catalog import FAMILIES
from schemas.family import Family
from stages.media.sample_reader import normalize_pixels
from tests.forms import long
from tests.project import SETTINGS

CPU = torch.device("cpu")
# name -> (kind of checkpoint, diffusers' class, stride in space, frames to try)
AUTOENCODERS = {
    "flux": ("kandinsky5-image-i2i", AutoencoderKL, 8, (1,)),
    "hunyuan_video": ("kandinsky5-video-i2v", AutoencoderKLHunyuanVideo, 8, (1, 5, 17, 21)),
    "dc_ae": ("sana", AutoencoderDC, 32, (1,)),
    "qwen_image": ("qwen-image", AutoencoderKLQwenImage, 8, (1,)),
    "flux2": ("flux2-klein", AutoencoderKLFlux2, 16, (1,)),
    "wan": ("wan2.1-t2v", AutoencoderKLWan, 8, (1, 5, 13)),
    "wan 5B": ("wan2.2-5b-i2v", AutoencoderKLWan, 16, (1, 5, 13)),
}
NAMES = [*list(AUTOENCODERS)[:-1], long("wan 5B")]
FEW = [name if name in ("flux", "flux2") else long(name) for name in AUTOENCODERS]
VIDEO = ("hunyuan_video", "wan", "wan 5B")
LIMIT = 1e-5


@pytest.fixture(scope="module")
def loaded(tiny):
    """name -> (ours, diffusers' own), in float32."""
    torch.set_num_threads(1)
    diffusers.utils.logging.set_verbosity_error()
    pairs = {}
    for name, (kind, reference, *_) in AUTOENCODERS.items():
        family = family_of(name)
        module = importlib.import_module(f"stages.encoding.vae.{family.autoencoder}")
        ours = module.Autoencoder(str(tiny(kind)), None, torch.float32, CPU, normalization=family.normalization)
        pairs[name] = ours, reference.from_pretrained(tiny(kind) / "vae").eval()
    return pairs


def family_of(name: str) -> Family:
    return FAMILIES[SETTINGS[AUTOENCODERS[name][0]]["family"]]


def frames(count: int = 1, seed: int = 0, width: int = 96, height: int = 64) -> np.ndarray:
    """uint8 (T, H, W, 3): coarse colored forms that drift, with grain."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    picture = np.asarray(Image.fromarray(coarse).resize((width, height)))
    moving = np.stack([np.roll(picture, 3 * step, axis=1) for step in range(count)])
    return np.clip(moving.astype(int) + random.integers(-8, 9, moving.shape), 0, 255).astype(np.uint8)


def pixels(*clips: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.stack([normalize_pixels(clip) for clip in clips]))


def generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def normalization_of(vae) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and factor of each channel, as Wan's pipelines compute them."""
    mean, deviation = (torch.tensor(vae.config[key]).view(1, -1, 1, 1, 1) for key in ("latents_mean", "latents_std"))
    return mean, 1.0 / deviation


class Sampled:
    """An autoencoder whose posterior's mode is what was drawn."""

    def __init__(self, vae, drawn: torch.Tensor) -> None:
        self.bn, self.config, self.drawn = vae.bn, vae.config, drawn

    def encode(self, pixels_BCHW: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: self.drawn))


@torch.no_grad()
def reference_latents(name, vae, pixels_BCTHW, seed) -> torch.Tensor:
    """latents_BCTHW by the autoencoder itself, of Wan as `prepare_latents` normalizes them."""
    if name.startswith("wan"):
        mean, factor = normalization_of(vae)
        return (vae.encode(pixels_BCTHW).latent_dist.sample(generator(seed)) - mean) * factor
    if name == "hunyuan_video":
        return vae.encode(pixels_BCTHW).latent_dist.sample(generator(seed)) * vae.config.scaling_factor
    if name == "qwen_image":  # as its image-to-image pipeline
        pipe = diffusers.QwenImageImg2ImgPipeline(*[None] * 5)
        pipe.vae = vae
        return pipe._encode_vae_image(pixels_BCTHW, generator(seed))
    encoded = vae.encode(pixels_BCTHW[:, :, 0])
    if name == "flux2":  # as its pipeline, which takes the mode of its references
        pipe = diffusers.Flux2KleinPipeline(*[None] * 5)
        drawn = encoded.latent_dist.sample(generator(seed))
        pipe.vae = Sampled(vae, drawn)
        return pipe._encode_vae_image(pixels_BCTHW[:, :, 0], None).unsqueeze(2)
    z = encoded.latent if name == "dc_ae" else encoded.latent_dist.sample(generator(seed))
    return z.unsqueeze(2) * vae.config.scaling_factor


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_latents_equal_diffusers(loaded, name, record_property):
    ours, vae = loaded[name]
    stride, counts = AUTOENCODERS[name][2:]
    for count in counts:
        gap = 0.0
        for index, seed in enumerate((3, 2**62 + 5)):
            inputs = pixels(frames(count, index))
            latents = ours.encode(inputs, [seed], "sample")
            assert latents.shape[2:] == ((count + 3) // 4, 64 // stride, 96 // stride)
            gap = max(gap, (latents - reference_latents(name, vae, inputs, seed)).abs().max().item())
        record_property(f"largest_difference_{count}_frames", gap)
        print(f"{name}, {count} frames: largest difference {gap:.2e} of deviation {latents.std():.2f}")
        assert gap <= LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_latents_do_not_depend_on_what_they_are_batched_with(loaded, name, record_property):
    ours, _ = loaded[name]
    clips = [frames(AUTOENCODERS[name][3][-1], seed) for seed in range(2)]
    together = ours.encode(pixels(*clips), [11, 12], "sample")
    alone = ours.encode(pixels(clips[1]), [12], "sample")
    # Kernels round otherwise at another batch size: float32's rounding, relative to the largest value.
    gap = ((together[1] - alone[0]).abs().max() / alone.abs().max()).item()
    record_property("largest_relative_difference", gap)
    print(f"{name}, in a batch and alone: largest relative difference {gap:.2e}")
    assert gap <= LIMIT
    assert torch.equal(alone, ours.encode(pixels(clips[1]), [12], "sample"))


def prepared(pipe, vae, image: Image.Image, seed: int, **options) -> torch.Tensor:
    """What the pipeline's prepare_latents makes of an image, BTHWC.

    It draws its starting noise from the same generator first; starting the generator anew when the encoder is
    reached makes the posterior's draw that of a generator with this seed.
    """
    random = generator(seed)
    handle = vae.encoder.register_forward_pre_hook(lambda *_: random.manual_seed(seed) and None)
    try:
        width, height = image.size
        shared = {
            "width": width,
            "height": height,
            "dtype": torch.float32,
            "device": CPU,
            "generator": random,
        }
        return pipe.prepare_latents(image, 1, 16, **shared, **options)
    finally:
        handle.remove()


def test_i2i_source_equals_the_pipelines(loaded, tiny, record_property):
    ours, vae = loaded["flux"]
    pipe = diffusers.Kandinsky5I2IPipeline(*[None] * 7)
    pipe.vae = vae
    clip = frames()
    latents_BTHWC = prepared(pipe, vae, Image.fromarray(clip[0]), 5)
    stored = ours.encode(pixels(clip), [5], "sample")
    gap = (latents_BTHWC[..., 16:32].permute(0, 4, 1, 2, 3) - stored).abs().max().item()
    record_property("largest_difference", gap)
    print(f"i2i source: largest difference {gap:.2e}")
    assert latents_BTHWC.shape == (1, 1, 8, 12, 33) and gap <= LIMIT


def test_i2v_first_frame_equals_the_pipelines(loaded, tiny, record_property):
    ours, vae = loaded["hunyuan_video"]
    pipe = diffusers.Kandinsky5I2VPipeline(*[None] * 7)
    pipe.vae = vae
    pipe.transformer = Kandinsky5Transformer3DModel.from_pretrained(tiny("kandinsky5-video-i2v") / "transformer")
    clip = frames(9)
    latents_BTHWC = prepared(pipe, vae, Image.fromarray(clip[0]), 5, num_frames=9)
    stored = ours.encode(pixels(clip[:1]), [5], "sample")
    gap = (latents_BTHWC[:, :1, ..., :16].permute(0, 4, 1, 2, 3) - stored).abs().max().item()
    record_property("largest_difference", gap)
    print(f"i2v first frame: largest difference {gap:.2e}")
    assert latents_BTHWC.shape[1] == 3 and gap <= LIMIT


def denormalized(vae, latents) -> torch.Tensor:
    """As the pipelines of the autoencoders with and without numbers for each channel do."""
    if "batch_norm_eps" in vae.config:
        mean, variance = (values.view(1, -1, 1, 1) for values in (vae.bn.running_mean, vae.bn.running_var))
        z = latents[:, :, 0] * torch.sqrt(variance + vae.config.batch_norm_eps) + mean
        return diffusers.Flux2KleinPipeline._unpatchify_latents(z)[:, :, None]
    if "latents_mean" not in vae.config or vae.config.latents_mean is None:
        return latents / vae.config.scaling_factor
    shape = (1, vae.config.z_dim, 1, 1, 1)
    inverse = 1.0 / torch.tensor(vae.config.latents_std).view(shape)
    return latents / inverse + torch.tensor(vae.config.latents_mean).view(shape)


@pytest.mark.slow
def test_wans_first_frame_equals_the_pipelines(loaded, record_property):
    ours, vae = loaded["wan 5B"]
    family, clip = family_of("wan 5B"), frames(9)
    pipe = diffusers.WanImageToVideoPipeline(
        tokenizer=None, text_encoder=None, vae=vae, scheduler=None, expand_timesteps=True
    )
    image = pipe.video_processor.preprocess(Image.fromarray(clip[0]), height=64, width=96)
    _, condition, _ = pipe.prepare_latents(image, 1, 48, 64, 96, 9, torch.float32, CPU, generator(0))
    gap = (ours.encode(pixels(clip[:1]), [5], family.conditions["i2v"].posterior) - condition).abs().max().item()
    record_property("largest_difference", gap)
    print(f"wan 5B first frame: largest difference {gap:.2e}")
    assert gap <= LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_decoded_pictures_equal_the_pipelines(loaded, name):
    ours, vae = loaded[name]
    clips = [frames(AUTOENCODERS[name][3][-1], seed) for seed in range(2)]
    latents = ours.encode(pixels(*clips), [0, 1], "mode")
    decoded = ours.decode(latents)
    assert decoded.dtype == torch.uint8 and decoded.shape == np.stack(clips).shape
    with torch.no_grad():
        z = denormalized(vae, latents)
        if name in VIDEO:
            videos = VideoProcessor(8).postprocess_video(vae.decode(z).sample, output_type="pil")
        else:
            images = vae.decode(z).sample[:, :, 0] if name == "qwen_image" else vae.decode(z[:, :, 0]).sample
            videos = [[image] for image in VaeImageProcessor().postprocess(images, output_type="pil")]
    wanted = np.stack([np.stack([*map(np.asarray, video)]) for video in videos])
    apart = np.abs(decoded.numpy().astype(int) - wanted)
    assert apart.max() <= 1 and apart.mean() < 1e-3  # roundings, as kernels depend on where memory begins


@torch.no_grad()
def test_latents_are_shifted_where_the_family_says(tiny):
    """Z-Image's pipeline decodes z / scaling_factor + shift_factor."""
    family, folder = FAMILIES["z-image"], tiny("z-image")
    module = importlib.import_module(f"stages.encoding.vae.{family.autoencoder}")
    ours = module.Autoencoder(str(folder), None, torch.float32, CPU, normalization=family.normalization)
    vae, inputs = AutoencoderKL.from_pretrained(folder / "vae").eval(), pixels(frames())
    assert vae.config.shift_factor > 0.1
    sampled = vae.encode(inputs[:, :, 0]).latent_dist.sample(generator(7))
    latents = ours.encode(inputs, [7], "sample")
    wanted = (sampled - vae.config.shift_factor) * vae.config.scaling_factor
    assert (latents[:, :, 0] - wanted).abs().max() <= LIMIT
    decoded = vae.decode(latents[:, :, 0] / vae.config.scaling_factor + vae.config.shift_factor).sample
    shown = VaeImageProcessor().postprocess(decoded, output_type="np")
    assert np.abs(ours.decode(latents)[:, 0].numpy() - 255 * shown).max() <= 0.51
