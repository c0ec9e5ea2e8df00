"""LoKr as peft computes it. The conformance suite has its files."""

import pytest
import torch
from peft import LoKrConfig

from schemas.config.training import Adapter
from tests.trainer.pipelines import random
from trainer.families.kandinsky5 import Kandinsky5
from trainer.setup import adapters
from trainer.setup.adapters import make_trainable

KIND = "kandinsky5-image-t2i"
SETTINGS = {
    "factors": {"rank": 4, "alpha": 2.5},
    "whole": {"rank": 64, "alpha": 8.0},  # so large that neither matrix is factorized
    "both": {"rank": 2, "decompose_both": True, "decompose_factor": 16},
    "by module": {
        "rank": 4,
        "decompose_factor": 4,
        "rank_pattern": {".*(to_q|to_query)": 64},
        "alpha_pattern": {".*": 3},
    },
}


def trained(folder, settings: str) -> torch.nn.Module:
    """A model with a LoKr that has moved away from its start."""
    model = Kandinsky5().load(str(folder))
    torch.manual_seed(0)
    make_trainable(model, Kandinsky5(), "t2v", Adapter(type="lokr", **SETTINGS[settings]))
    assert {type(part) for part in model.modules() if isinstance(part, adapters.Linear)} == {adapters.KroneckerLinear}
    for i, parameter in enumerate(adapters.trainable_parameters(model).values()):
        parameter.data += random(*parameter.shape, seed=i) * 0.1
    return model.eval()


@pytest.mark.parametrize("settings", list(SETTINGS))
def test_it_computes_what_pefts_layer_does_without_the_product(tiny, settings):
    model, stock = trained(tiny(KIND), settings), Kandinsky5().load(str(tiny(KIND)))
    options = model.peft_config["default"].to_dict()
    stock.requires_grad_(False)
    stock.add_adapter(LoKrConfig(**{**options, "inference_mode": False}))
    own = adapters.trainable_parameters(stock)
    assert own.keys() == adapters.trainable_parameters(model).keys()
    for name, weight in adapters.trainable_parameters(model).items():
        own[name].data = weight.data.clone()
    path = "visual_transformer_blocks.0.feed_forward.in_layer"
    x = random(2, 5, model.get_submodule(path).in_features)
    results = [each.get_submodule(path)(x) for each in (model, stock)]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    for result in results:
        result.square().sum().backward()
    for name, weight in own.items():
        if name.startswith(path):
            torch.testing.assert_close(model.get_parameter(name).grad, weight.grad, rtol=1e-4, atol=1e-4)
