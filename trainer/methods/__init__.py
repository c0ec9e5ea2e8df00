"""Training methods: one file per method; `METHODS` lists them."""

from collections.abc import Callable, Mapping
from typing import Any

from schemas.config.methods import Method as Section
from trainer.methods.base import Method
from trainer.methods.crepa import CREPAMethod
from trainer.methods.guidance import GuidanceMethod
from trainer.methods.input_perturbation import InputPerturbationMethod
from trainer.methods.masked_loss import MaskedLossMethod
from trainer.methods.regularization import RegularizationMethod
from trainer.methods.scheduled_sampling import ScheduledSamplingMethod
from trainer.methods.tread import TreadMethod

#: Name of a method, `guidance` or a key of train.methods -> class that makes the method from its section. In the order
#: in which `prepare` is called: scheduled sampling requires an input on the line between latents and noise, methods
#: that change the input follow, guidance and regularization predict for the final input, and the base model's
#: prediction replaces a guided target.
METHODS: dict[str, Callable[[Any], Method]] = {
    "masked_loss": MaskedLossMethod,
    "tread": TreadMethod,
    "crepa": CREPAMethod,
    "scheduled_sampling": ScheduledSamplingMethod,
    "input_perturbation": InputPerturbationMethod,
    "guidance": GuidanceMethod,
    "regularization": RegularizationMethod,
}


def make_methods(sections: Mapping[str, Section]) -> dict[str, Method]:
    """Name -> method of each section, in the order of METHODS."""
    return {name: make(sections[name]) for name, make in METHODS.items() if name in sections}
