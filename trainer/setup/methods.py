"""Methods, sized for the transformer and the set."""

from collections.abc import Mapping

import torch

from cache.sets.trainset import TrainSet
from schemas.config.pipeline import Config
from schemas.identity import derive_seed
from trainer.families.base import FamilyModule
from trainer.methods.base import Method
from trainer.setup.load import empty_transformer, explain_checkpoint_errors


def set_up_methods(methods: Mapping[str, Method], config: Config, family: FamilyModule, data: TrainSet) -> None:
    """`Method.setup` of each; MethodError where one can't be used. Reads the transformer's config.json and a sample."""
    if not methods:
        return
    with explain_checkpoint_errors(config):
        model = empty_transformer(config)
    shapes = {name: tuple(array.shape) for name, array in data.sample(0).tensors.items()}
    for name, method in methods.items():
        torch.manual_seed(derive_seed(f"{config.train.seed}/{name}", "method"))
        method.setup(model, family, shapes)
