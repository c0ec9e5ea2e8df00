"""Methods at once, with another loss, weights and distribution of noise levels than the plain ones."""

import math

import numpy as np
import pytest

from tests.forms import long
from tests.trainer.runs import lines, train

TOGETHER = {
    "masked_loss": {"unmasked_weight": 0.2, "prior_weight": 0.5, "normalize_area": True},
    "tread": {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 0, "end_layer_idx": -1}]},
    "input_perturbation": {"decay_steps": 4},
}
OBJECTIVE = {
    "loss": {"type": "huber", "huber_schedule": "snr", "weighting": "min_snr"},
    "timesteps": {"sampling": "mode", "low_discrepancy": True, "auto_shift": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [long("t2i"), "i2v", "sana"])
def test_they_train_together_and_a_resumed_run_goes_on_as_a_whole_one(make_config, make_set, made, kind) -> None:
    found = {}
    for name, stops in (("whole", (3,)), ("cut", (2, 3))):
        for steps in stops:
            settings = {"steps": steps, "batch_size": 2, "accumulate": 2, "checkpoint_every": 2, "methods": TOGETHER}
            config = make_config(kind, name=name, caption_dropout=0.5, gradient_noise_every=1, **settings, **OBJECTIVE)
            if steps == stops[0]:
                items, null, prompts = made.mixed_items(config)
                for number, item in enumerate(items):
                    mask = np.random.default_rng(number).random(item.latent.shape[1:], dtype=np.float32)
                    item.mask = np.where(mask < 0.5, 0, mask) if number % 3 else None
                make_set(config, items, null, prompts)
            train(config)
        found[name] = lines(config), lines(config, "gradient_noise_scale")
    assert found["cut"] == found["whole"]
    assert len(found["whole"][0]) == 3 and all(math.isfinite(loss) and loss > 0 for loss in found["whole"][0].values())
