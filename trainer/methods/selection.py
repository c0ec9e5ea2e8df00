"""The methods of a configuration."""

from collections.abc import Callable
from typing import Any

from schemas.config.methods import Methods
from trainer.methods.base import Method
from trainer.methods.crepa import CREPAMethod
from trainer.methods.masked_loss import MaskedLossMethod
from trainer.methods.tread import TreadMethod

#: Key of train.methods -> what makes the method from its section.
METHODS: dict[str, Callable[[Any], Method]] = {
    "masked_loss": MaskedLossMethod,
    "tread": TreadMethod,
    "crepa": CREPAMethod,
}


def make_methods(settings: Methods) -> dict[str, Method]:
    """Name -> method of each that is configured."""
    return {name: METHODS[name](section) for name, section in settings.used.items()}
