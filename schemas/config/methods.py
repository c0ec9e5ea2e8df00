"""train.timesteps, train.loss and train.methods: the noise levels in training, the loss of a prediction, and the
methods that add to it, a section for each method."""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from schemas.config.section import (
    MOST_STEPS,
    Count,
    NoEffect,
    Problem,
    Section,
    Steps,
    UnitFloat,
    foreign_options,
    idle_options,
)

MODE_SCALE_LIMIT = 2 / (math.pi - 2)  # above it, mode's map of 0..1 is not monotonic (Esser et al. 2024)

MOST_LAYERS = 10_000

Shape = Annotated[float, Field(ge=0.01, le=100)]


class Timesteps(Section, json_schema_extra={"affects": "run"}):
    """The distribution of sigma before the shift."""

    sampling: Literal["logit_normal", "uniform", "mode", "beta", "list"] = Field(
        "logit_normal", description="distribution of sigma before the shift; list: `values`, without shift"
    )
    mean: float = Field(0.0, ge=-20, le=20, description="mean of logit_normal; above 0: more noise")
    std: float = Field(1.0, gt=0, le=20, description="standard deviation of logit_normal; 1 is wide, 0.5 narrow")
    mode_scale: float = Field(
        1.29, ge=-1, le=MODE_SCALE_LIMIT, description="scale of mode; above 0: more in the middle"
    )
    alpha: Shape = Field(2.0, description="alpha of beta; above 1: fewer samples near data")
    beta: Shape = Field(2.0, description="beta of beta; above 1: fewer samples near noise")
    values: tuple[UnitFloat, ...] = Field((), strict=False, description="sigmas of list, equally often")
    auto_shift: bool = Field(False, description="compute the shift of each bucket from the tokens of one frame")
    low_discrepancy: bool = Field(False, description="spread sigmas evenly over a global batch and over steps")

    def _problems(self) -> Iterator[Problem]:
        owners = {"mean": "logit_normal", "std": "logit_normal", "mode_scale": "mode"}
        owners |= {"alpha": "beta", "beta": "beta", "values": "list"}
        yield from foreign_options(self, "sampling", {name: (owner,) for name, owner in owners.items()})
        if self.sampling == "list" and not self.values:
            yield ("values",), "is required with sampling: list; set it to sigmas from 0 (data) to 1 (noise)"
        if self.sampling == "list" and self.auto_shift:
            yield ("auto_shift",), NoEffect("has no effect with sampling: list; remove it")


class Loss(Section, json_schema_extra={"affects": "run"}):
    """The loss of a prediction of the velocity, and how much each noise level counts."""

    type: Literal["mse", "huber", "smooth_l1"] = Field(
        "mse", description="loss function; huber, smooth_l1: large errors count less"
    )
    huber_c: float = Field(0.1, gt=0, le=1000, description="error above which huber and smooth_l1 are linear")
    huber_schedule: Literal["constant", "exponential", "snr"] = Field(
        "constant", description="schedule of huber_c by sigma; exponential, snr: near mse at data, huber_c at noise"
    )
    weighting: Literal["none", "cosmap", "sigma_sqrt", "bell", "half_bell", "min_snr"] = Field(
        "none", description="factor of the loss by sigma"
    )
    snr_gamma: float = Field(5.0, gt=0, le=1e6, description="gamma of min_snr")

    def _problems(self) -> Iterator[Problem]:
        robust = ("huber", "smooth_l1")
        yield from foreign_options(self, "type", {"huber_c": robust, "huber_schedule": robust})
        yield from foreign_options(self, "weighting", {"snr_gamma": ("min_snr",)})
        if self.huber_schedule != "constant" and self.huber_c > 1:
            yield (
                ("huber_c",),
                f"{self.huber_c:g} is not valid with huber_schedule: {self.huber_schedule}; valid: at most 1",
            )


class Method(Section):
    """needs: tensor of a sample -> next step for the user if the training set lacks the tensor."""

    needs: ClassVar[Mapping[str, str]] = {}

    def layer_problems(self, layers: int) -> Iterator[Problem]:
        """Yield the options that are invalid for a transformer with `layers` blocks of visual tokens."""
        yield from ()

    def find_conflicts(self, train: Any) -> Iterator[str]:
        """Yield conflicts of the method with other settings. train: the Train section."""
        yield from ()


class MaskedLoss(Method, json_schema_extra={"affects": "run"}):
    needs: ClassVar[Mapping[str, str]] = {
        "mask": "Set mask_data or mask_column of a dataset, or add `masks`, and run `latentpress run`."
    }

    unmasked_weight: UnitFloat = Field(0.0, description="factor of the loss outside the mask")
    unmasked_probability: UnitFloat = Field(0.0, description="fraction of samples that are trained without their mask")
    normalize_area: bool = Field(False, description="divide each sample's loss by the mean of its factors")
    prior_weight: float = Field(
        0.0,
        ge=0,
        le=1000,
        description="factor of the squared difference from the model without adapter, outside the mask",
    )

    def _problems(self) -> Iterator[Problem]:
        if self.unmasked_probability == 1:
            reason = "has no effect with unmasked_probability: 1; lower that, or remove this"
            yield from idle_options(self, ("unmasked_weight", "normalize_area", "prior_weight"), reason)
        elif self.unmasked_weight == 1:
            reason = "has no effect with unmasked_weight: 1; lower that, or remove this"
            yield from idle_options(self, ("normalize_area",), reason)


class Route(Section, json_schema_extra={"affects": "run"}):
    selection_ratio: float = Field(ge=0, lt=1, description="fraction of tokens to drop; for i2v, after the first frame")
    start_layer_idx: int = Field(
        ge=-MOST_LAYERS, le=MOST_LAYERS, description="index of the first block; -1: the last block of the model"
    )
    end_layer_idx: int = Field(
        ge=-MOST_LAYERS, le=MOST_LAYERS, description="index of the last block with dropped tokens"
    )

    def layers(self, count: int) -> range:
        """The indices of the route's blocks. count: number of blocks. Empty if the route ends before it starts."""
        start, end = (index + count if index < 0 else index for index in (self.start_layer_idx, self.end_layer_idx))
        return range(start, end + 1)

    def _problems(self) -> Iterator[Problem]:
        start, end = self.start_layer_idx, self.end_layer_idx
        if (start < 0) == (end < 0) and end < start:
            yield ("end_layer_idx",), f"{end} is before start_layer_idx ({start})"


class Tread(Method, json_schema_extra={"affects": "run"}):
    routes: tuple[Route, ...] = Field(
        strict=False, min_length=1, description="ranges of blocks, in order, without overlap"
    )
    drop_first_frame: bool = Field(False, description="for i2v: drop tokens of the given first frame, too")
    keep_masked: bool = Field(True, description="never drop tokens inside a sample's mask")

    def layer_problems(self, layers: int) -> Iterator[Problem]:
        free = 0  # the first block after the previous routes
        for number, route in enumerate(self.routes):
            blocks, key = route.layers(layers), ("routes", number)
            for name, value, layer in (
                ("start_layer_idx", route.start_layer_idx, blocks.start),
                ("end_layer_idx", route.end_layer_idx, blocks.stop - 1),
            ):
                if not 0 <= layer < layers:
                    yield (*key, name), f"{value} is not a block of the transformer; valid: 0 to {layers - 1}"
            if not blocks:
                yield (
                    (*key, "end_layer_idx"),
                    f"block {blocks.stop - 1} is before the route's first block, {blocks.start}",
                )
            if blocks.start < free:
                yield (
                    (*key, "start_layer_idx"),
                    f"block {blocks.start} is not after the previous route; valid: {free} or more",
                )
            free = max(free, blocks.stop)


class CREPA(Method, json_schema_extra={"affects": "run"}):
    """Cross-frame representation alignment; of images, and with adjacent_distance 0, REPA."""

    needs: ClassVar[Mapping[str, str]] = {
        "vision": "Set vision.model, for example to dinov2_vits14, and run `latentpress run`: it encodes the features."
    }

    block_index: int = Field(8, ge=0, le=MOST_LAYERS, description="index, from 0, of the visual block that is aligned")
    weight: float = Field(0.5, gt=0, le=1e6, description="factor of the loss (λ)")
    adjacent_distance: int = Field(
        1, ge=0, le=65_535, description="latent frames to the neighbors (d); 0: no neighbors"
    )
    adjacent_tau: float = Field(
        1.0, gt=0, le=1e6, description="temperature (τ) of neighbors' weights exp(-distance / tau)"
    )
    cumulative_neighbors: bool = Field(
        False, description="align with neighbors at all distances up to adjacent_distance, not only at it"
    )
    normalize_by_frames: bool = Field(True, description="average over frames; false: sum over frames, as in the paper")
    schedule: Literal["constant", "linear", "cosine", "polynomial"] = Field(
        "constant", description="schedule of the weight"
    )
    warmup: int = Field(0, ge=0, le=MOST_STEPS, description="steps of linear warmup of the weight")
    decay_steps: Steps | None = Field(None, description="steps of the schedule; default: to the last step")
    weight_end: float = Field(0.0, ge=0, le=1e6, description="final weight of linear, cosine and polynomial")
    power: float = Field(1.0, gt=0, le=100, description="exponent of the polynomial schedule")
    cutoff_step: Steps | None = Field(None, description="number of steps after which the alignment ends")
    similarity_threshold: float | None = Field(
        None, gt=0, le=1000, description="moving average of crepa_similarity at which the alignment ends"
    )
    similarity_ema_decay: float = Field(0.99, ge=0, lt=1, description="decay of the moving average, for each step")
    threshold_mode: Literal["permanent", "recoverable"] = Field(
        "permanent",
        description="end by similarity_threshold; recoverable: the alignment resumes if the average falls below it",
    )

    def layer_problems(self, layers: int) -> Iterator[Problem]:
        if self.block_index >= layers:
            yield ("block_index",), f"{self.block_index} is not a block of the transformer; valid: 0 to {layers - 1}"

    def _problems(self) -> Iterator[Problem]:
        if self.weight_end > self.weight:
            yield ("weight_end",), f"{self.weight_end:g} is greater than train.methods.crepa.weight ({self.weight:g})"
        changing = ("linear", "cosine", "polynomial")
        owners = {"decay_steps": changing, "weight_end": changing, "power": ("polynomial",)}
        yield from foreign_options(self, "schedule", owners)
        if self.similarity_threshold is None:
            reason = "has no effect without similarity_threshold; set that, or remove this"
            yield from idle_options(self, ("similarity_ema_decay", "threshold_mode"), reason)
        if self.adjacent_distance == 0:
            reason = "has no effect with adjacent_distance: 0; raise that, or remove this"
            yield from idle_options(self, ("adjacent_tau", "cumulative_neighbors"), reason)


class ScheduledSampling(Method, json_schema_extra={"affects": "run"}):
    probability: UnitFloat = Field(
        0.5, description="fraction of the samples with a rollout, after the ramp; drawn for each sample and step"
    )
    prob_start: UnitFloat = Field(0.0, description="fraction of the samples with a rollout, before the ramp")
    start_step: int = Field(0, ge=0, le=MOST_STEPS, description="step at which the ramp begins")
    ramp_steps: int = Field(0, ge=0, le=MOST_STEPS, description="steps of the ramp; 0: probability from start_step on")
    ramp_shape: Literal["linear", "cosine"] = Field(
        "linear", description="shape of the ramp; cosine: gentle start and end"
    )
    max_step_offset: Count = Field(5, description="Euler steps of the longest rollout; the length is drawn from 1 on")
    strategy: Literal["uniform", "biased_early", "biased_late"] = Field(
        "uniform",
        description="distribution of rollout lengths; biased_early: more short rollouts; biased_late: more long "
        "rollouts",
    )
    schedule_steps: Count = Field(
        50, description="denoising steps from noise to data, as at inference; a rollout takes some of them"
    )
    correction: UnitFloat = Field(1.0, description="fraction of the rollout's error that the target corrects")

    def _problems(self) -> Iterator[Problem]:
        if not self.ramp_steps:
            reason = "has no effect without ramp_steps; set that, or remove this"
            yield from idle_options(self, ("ramp_shape",), reason)
        if not (self.start_step or self.ramp_steps):
            reason = "has no effect without start_step and ramp_steps; set one of them, or remove this"
            yield from idle_options(self, ("prob_start",), reason)
        if self.max_step_offset == 1:
            reason = "has no effect with max_step_offset: 1; raise that, or remove this"
            yield from idle_options(self, ("strategy",), reason)


class InputPerturbation(Method, json_schema_extra={"affects": "run"}):
    strength: float = Field(
        0.1, gt=0, le=1, description="additional noise in the input (gamma), relative to the noise; the paper has 0.1"
    )
    decay_steps: Steps | None = Field(
        None, description="steps over which strength falls linearly to 0; default: constant"
    )


class Regularization(Method, json_schema_extra={"affects": "run"}):
    needs: ClassVar[Mapping[str, str]] = {
        "regularization": "Set is_regularization_data of a dataset, and run `latentpress run`."
    }

    target: Literal["base", "data"] = Field(
        "base", description="target of the loss; base: the prediction without adapter; data: the sample itself"
    )
    weight: float = Field(
        1.0, ge=0, le=1000, description="factor of these samples' loss: DreamBooth's prior_loss_weight"
    )

    def find_conflicts(self, train: Any) -> Iterator[str]:
        adapter, step = train.adapter, "set train.methods.regularization.target to data"
        if self.target == "data":
            return
        if adapter.type == "full":
            yield (
                "target: base needs the prediction of the base model, which train.adapter.type: full changes; set that "
                f"to lora or lokr, or {step}"
            )
        if adapter.init_weights in ("pissa", "olora"):
            yield (
                "target: base needs the prediction of the base model, which train.adapter.init_weights: "
                f"{adapter.init_weights} changes; choose other initial weights, or {step}"
            )


class Guidance(Method, json_schema_extra={"affects": "run"}):
    """Guidance loss, for checkpoints into which guidance was distilled."""

    needs: ClassVar[Mapping[str, str]] = {
        "null_text": "Run `latentpress index`: it makes a set with the null prompt of each sample."
    }

    scale: float = Field(3.5, ge=1, le=1000, description="guidance scale of the target; 1: the plain target")
    below: float = Field(
        0.15, ge=0, lt=1, description="noise level, before the shift, below which the target is the plain target"
    )

    def _problems(self) -> Iterator[Problem]:
        if self.scale == 1:
            yield from idle_options(self, ("below",), "has no effect with scale: 1; raise that, or remove this")


class Methods(Section):
    """Methods in addition to the plain flow-matching loss. A configured section turns its method on."""

    masked_loss: MaskedLoss | None = Field(None, description="train inside masks only")
    tread: Tread | None = Field(None, description="drop tokens in some blocks")
    crepa: CREPA | None = Field(None, description="align a block's hidden states with vision features")
    scheduled_sampling: ScheduledSampling | None = Field(None, description="train on rollouts of the model itself")
    input_perturbation: InputPerturbation | None = Field(None, description="more noise in the input than in the target")
    regularization: Regularization | None = Field(None, description="training of datasets with is_regularization_data")

    @property
    def used(self) -> dict[str, Method]:
        return {name: settings for name, settings in self if settings is not None}


def method_option(name: str) -> str:
    """Return the key of a method's section in the configuration."""
    return f"train.methods.{name}" if name in Methods.model_fields else f"train.{name}"
