"""Training methods: one file per method; `METHODS` lists them."""

from collections.abc import Callable, Mapping
from typing import Any

from schemas.config.methods import Method as Section
from trainer.methods.base import Method
from trainer.methods.crepa import CREPAMethod
from trainer.methods.input_perturbation import InputPerturbationMethod
from trainer.methods.masked_loss import MaskedLossMethod
from trainer.methods.regularization import RegularizationMethod
from trainer.methods.scheduled_sampling import ScheduledSamplingMethod
from trainer.methods.tread import TreadMethod

#: Key of train.methods -> class that makes the method from its section. In the order in which `prepare` is called:
#: scheduled sampling requires an input on the line between latents and noise, and regularization computes the base
#: model's prediction for the final input. Methods that change the input are in between.
METHODS: dict[str, Callable[[Any], Method]] = {
    "masked_loss": MaskedLossMethod,
    "tread": TreadMethod,
    "crepa": CREPAMethod,
    "scheduled_sampling": ScheduledSamplingMethod,
    "input_perturbation": InputPerturbationMethod,
    "regularization": RegularizationMethod,
}


def make_methods(sections: Mapping[str, Section]) -> dict[str, Method]:
    """Name -> method of each section of train.methods, in the order of METHODS."""
    return {name: make(sections[name]) for name, make in METHODS.items() if name in sections}
