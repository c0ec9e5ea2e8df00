"""train.timesteps and train.loss: which noise levels are trained, and what the loss of a prediction is."""

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from schemas.config.section import Problem, Section, UnitFloat, foreign_options

MODE_SCALE_LIMIT = 2 / (math.pi - 2)  # above it, mode's map of 0..1 is not monotonic (Esser et al. 2024)

Shape = Annotated[float, Field(ge=0.01, le=100)]


class Timesteps(Section):
    """The distribution of sigma before the shift."""

    sampling: Literal["logit_normal", "uniform", "mode", "beta", "list"] = Field(
        "logit_normal", description="distribution of sigma, before shift; list: the values as they are"
    )
    mean: float = Field(0.0, ge=-20, le=20, description="of logit_normal; above 0 more noise")
    std: float = Field(1.0, gt=0, le=20, description="of logit_normal; 1 is wide, 0.5 narrow")
    mode_scale: float = Field(1.29, ge=-1, le=MODE_SCALE_LIMIT, description="of mode; above 0 favors the middle")
    alpha: Shape = Field(2.0, description="of beta; above 1 fewer near data")
    beta: Shape = Field(2.0, description="of beta; above 1 fewer near noise")
    values: tuple[UnitFloat, ...] = Field((), strict=False, description="of list: sigmas, equally often")
    auto_shift: bool = Field(False, description="a shift of each bucket by the tokens of one frame")
    low_discrepancy: bool = Field(False, description="spread the draws evenly, over a global batch and over steps")

    def _problems(self) -> Iterator[Problem]:
        owners = {"mean": "logit_normal", "std": "logit_normal", "mode_scale": "mode"}
        owners |= {"alpha": "beta", "beta": "beta", "values": "list"}
        yield from foreign_options(self, "sampling", {name: (owner,) for name, owner in owners.items()})
        if self.sampling == "list" and not self.values:
            yield ("values",), "sampling list needs at least one sigma, from 0 (data) to 1 (noise)"
        if self.sampling == "list" and self.auto_shift:
            yield ("auto_shift",), "the values of sampling list are not shifted; remove it"


class Loss(Section):
    """Of a prediction of the velocity, and how much each noise level counts."""

    type: Literal["mse", "huber", "smooth_l1"] = Field("mse", description="huber, smooth_l1: less of large errors")
    huber_c: float = Field(0.1, gt=0, le=1000, description="error at which huber and smooth_l1 turn linear")
    huber_schedule: Literal["constant", "exponential", "snr"] = Field(
        "constant", description="of huber_c by sigma; the last two: near mse at data, huber_c at noise"
    )
    weighting: Literal["none", "cosmap", "sigma_sqrt", "bell", "half_bell", "min_snr"] = Field(
        "none", description="factor of the loss by sigma"
    )
    snr_gamma: float = Field(5.0, gt=0, le=1e6, description="of min_snr")

    def _problems(self) -> Iterator[Problem]:
        robust = ("huber", "smooth_l1")
        yield from foreign_options(self, "type", {"huber_c": robust, "huber_schedule": robust})
        yield from foreign_options(self, "weighting", {"snr_gamma": ("min_snr",)})
        if self.huber_schedule != "constant" and self.huber_c > 1:
            yield ("huber_c",), f"with huber_schedule {self.huber_schedule} it falls from 1 to huber_c: at most 1"
