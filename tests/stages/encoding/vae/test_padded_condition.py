"""A condition over all frames: the first frame followed by zeros, for clips and for validation prompts."""

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from cache.sets.set_lookup import current_plan, open_configured_set
from cache.store.store import Store
from schemas.recipe import latents_settings
from stages import bucket, discover, encode_latents, encode_text, index, verify
from stages.media.sample_reader import read_sample_frames
from tests.forms import long
from trainer.__main__ import run as train

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("form", ["arrow", long("webdataset")])
def test_encoded_conditions_equal_the_pipelines(project, tiny, record_property, form) -> None:
    """Also a clip of the data from which a prompt without an image starts; then the conditions are trained on."""
    home = project("wan2.2-a14b-i2v", cache={"unit_mib": 1.0, "format": form})
    home.video("a.mp4", frames=24, size=(64, 64))
    home.video("b.mp4", frames=24, size=(64, 64))
    photo = home.image("../photo.png", (96, 64))
    home.settings["validation"] = {
        "prompts": [{"name": "given", "prompt": "a", "image": str(photo)}, {"name": "taken", "prompt": "b"}],
        "size": "64x64@5",
        "steps": 1,
        "eval_samples": 1,
    }
    home.settings["train"] |= {"steps": 1, "device": "cpu", "threads": 1, "adapter": {"rank": 2}}
    for program in (discover.run, bucket.run, encode_text.run, encode_latents.run, index.run):
        report = home.run(program)
        assert not report.remaining and not report.rejects
    assert home.run(verify.run).exit_code == 0
    config = home.config()
    assert latents_settings(config.model, config.latents)["condition_frames"] is None
    plan, data = current_plan(Store(config.root), config), open_configured_set(config, lambda _: None)
    vae = diffusers.AutoencoderKLWan.from_pretrained(tiny("wan2.2-a14b-i2v") / "vae")
    pipe = diffusers.WanImageToVideoPipeline(None, None, vae, None)

    def expected(frame: np.ndarray, frames: int) -> torch.Tensor:
        image = pipe.video_processor.preprocess(Image.fromarray(frame), height=64, width=64)
        return pipe.prepare_latents(image, 1, 16, 64, 64, frames, torch.float32, torch.device("cpu"))[1][0, 4:]

    gaps = []
    for number in range(2):
        sample = data.sample(number)
        sample_row = plan.samples[sample.id]
        frames = read_sample_frames(home.media / sample_row["path"], sample_row, "pyav")
        assert sample.tensors["condition"].shape == sample.tensors["latent"].shape == (16, 3, 8, 8)
        condition = torch.from_numpy(sample.tensors["condition"].numpy().copy())
        gaps.append((condition - expected(frames[0], 9)).abs().max().item())
        clip = torch.from_numpy(sample.tensors["latent"].numpy().copy())
        assert (condition - clip)[:, 1:].abs().max() > 1e-2, "it is not the clip"
    with Image.open(photo) as image:
        middle = np.asarray(image.convert("RGB").crop((16, 0, 80, 64)))
    with_image, without_image = data.validation
    assert with_image.condition.shape == without_image.condition.shape == (16, 2, 8, 8)
    gaps.append((torch.from_numpy(with_image.condition.numpy().copy()) - expected(middle, 5)).abs().max().item())
    record_property("largest difference", max(gaps))
    print(f"conditions: largest difference {max(gaps):.2e}")
    assert max(gaps) <= 1e-5
    data.close()
    assert home.run(train).done == 1
    assert {path.stem for path in (config.run_folder / "validation" / "step-000001").iterdir()} == {"given", "taken"}
