"""CREPA: the hidden states of one transformer block are aligned with vision features of the frame and its neighbors.

Hwang et al. 2025, "Cross-Frame Representation Alignment for Fine-Tuning Video Diffusion Models", arXiv 2506.09229. The
term that is added to a sample's loss is

    -weight * mean over frames f and their tokens of [cos(p(h_f), y_f) + sum over k = f - d, f + d of
                                                      exp(-d / tau) * cos(p(h_f), y_k)]

with h the block's output, p a LayerNorm and a Linear that are trained and thrown away, y DINOv2's patch tokens, d the
distance and tau a temperature. Neighbors outside of the clip have no term. A clip of one frame, or an image, has no
neighbors: the loss is then REPA (Yu et al. 2024, arXiv 2410.06940).

encode-vision has computed y from the frames themselves, so nothing is decoded here and no vision model is loaded. y is
enlarged to the transformer's tokens (bilinear), and never shifted: both grids divide the same frame evenly. Text tokens
have no term. i2v's clean first frame has a term, as in SimpleTuner. If another method weights the squared errors
(`masked_loss`), the same factors weight the tokens' similarities. Tokens that another method drops in the block
(`tread`) have no term.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.hooks import RemovableHandle

from schemas.config.methods import CREPA
from trainer.families.base import FIRST_TOKENS, ModelFamily
from trainer.methods.base import Method, MethodError, MethodStep
from trainer.schedules import scheduled_value


class CREPAMethod(Method):
    """similarity: moving average of the bracket above. ended: whether the loss has ended because of the threshold."""

    def __init__(self, settings: CREPA) -> None:
        self.settings = settings
        self.similarity: float | None = None
        self.ended = False
        self._projection: torch.nn.Module | None = None
        self._width = 0  # width of the hidden states
        self._hidden: torch.Tensor | None = None  # (B, L or more, D)
        self._hook: RemovableHandle | None = None
        self._tokens = FIRST_TOKENS  # positions of the visual tokens in the block's output

    def setup(self, model: Any, family: ModelFamily, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._width = family.hidden_size(model)
        linear = torch.nn.Linear(self._width, shapes["vision"][-1])
        parts = {"norm": torch.nn.LayerNorm(self._width), "linear": linear}
        self._projection = torch.nn.Sequential(OrderedDict(parts))

    def modules(self) -> torch.nn.Module | None:
        return self._projection

    def weight(self, number: int, steps: int) -> float:
        """The weight of step `number` (from 0) of `steps`, by schedule and cut-offs."""
        settings = self.settings
        if self.ended or (settings.cutoff_step is not None and number >= settings.cutoff_step):
            return 0.0
        if self.similarity is not None and self.similarity >= (settings.similarity_threshold or math.inf):
            return 0.0
        last = steps if settings.decay_steps is None else settings.warmup + settings.decay_steps
        ends, options = (settings.weight, settings.weight_end), settings.model_dump(include={"warmup", "power"})
        return scheduled_value(settings.schedule, *ends, number, last, **options)

    def measures(self, number: int, steps: int) -> bool:
        """Whether the similarity is computed in this step: for the loss, or because it may fall below the threshold
        again."""
        past = self.settings.cutoff_step is not None and number >= self.settings.cutoff_step
        recovers = self.settings.threshold_mode == "recoverable" and self.settings.similarity_threshold is not None
        return self.weight(number, steps) > 0 or (recovers and not past)

    @contextmanager
    def around(self, step: MethodStep) -> Iterator[None]:
        if not self.measures(step.number, step.steps):
            yield
            return
        block = step.family.visual_blocks(step.model)[self.settings.block_index]
        self._tokens = step.family.block_tokens(block)
        self._hook = block.register_forward_hook(self._keep, prepend=True)
        try:
            yield
        finally:
            self._release()

    def _keep(self, block: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep the block's output. With gradient checkpointing this is the same tensor that the next block reads, so
        gradients reach it; `loss` removes the hook before the block is computed again."""
        if torch.is_grad_enabled():
            self._hidden = self._tokens.read_output(output)

    def _release(self) -> torch.Tensor | None:
        """Remove the hook; return the kept output, and forget it."""
        if self._hook is not None:
            self._hook.remove()
        hidden, self._hidden, self._hook = self._hidden, None, None
        return hidden

    def loss(self, step: MethodStep) -> torch.Tensor:
        weight, hidden = self.weight(step.number, step.steps), self._release()
        assert self._projection is not None
        step.log("crepa_weight", torch.full_like(step.sigma_B, weight))
        if not self.measures(step.number, step.steps):
            return self.nothing(step)
        assert hidden is not None, "the block was not called"
        with nullcontext() if weight else torch.no_grad():
            targets_BLC = self.take(step, self.targets(step))
            hidden_BLD, _ = self._tokens.divide(hidden, targets_BLC.shape[1])
            projected_BLC = F.normalize(self._projection(hidden_BLD.float()), dim=-1)
            similarity_BL = (projected_BLC * targets_BLC).sum(-1)
        step.log("crepa_similarity", similarity_BL.detach().mean(1))
        if not weight:
            return self.nothing(step)
        if step.weight_BTHW is not None:
            similarity_BL = similarity_BL * self.take(step, token_factors(step))[..., 0]
        frames = 1 if self.settings.normalize_by_frames else step.grid.frames
        loss_B = -weight * frames * similarity_BL.mean(1)
        step.log("crepa_loss", loss_B.detach())
        return loss_B

    def nothing(self, step: MethodStep) -> torch.Tensor:
        """Returns zeros (B,) that depend on every weight of the projection."""
        assert self._projection is not None
        return 0.0 * self._projection(step.sigma_B.new_zeros(len(step.batch), self._width)).mean(-1)

    def targets(self, step: MethodStep) -> torch.Tensor:
        """Returns (B, T, rows, columns, C): the vector by which a token's projection is multiplied, the weighted sum of
        the unit vectors at its position in its own frame and in the neighboring frames."""
        features_BTHWC, grid = step.batch.extras["vision"].float(), step.grid
        if features_BTHWC.ndim != 5 or features_BTHWC.shape[1] != grid.frames:
            raise MethodError(
                f"the vision features of {step.batch.ids[0]} are of shape {tuple(features_BTHWC.shape[1:])}, and its "
                f"latents have {grid.frames} frames",
                "Run `latentpress encode-vision` and `latentpress index`.",
            )
        frames_NCHW = features_BTHWC.flatten(0, 1).movedim(-1, 1)
        size = (grid.rows, grid.columns)
        if frames_NCHW.shape[2:] != size:
            frames_NCHW = F.interpolate(frames_NCHW, size, mode="bilinear", align_corners=False)
        unit_BTHWC = F.normalize(frames_NCHW, dim=1).movedim(1, -1).unflatten(0, features_BTHWC.shape[:2])
        return add_neighbors(unit_BTHWC, self.distances, self.settings.adjacent_tau)

    def take(self, step: MethodStep, values_BTHWD: torch.Tensor) -> torch.Tensor:
        """Returns (B, L, D): values on the token grid for the tokens that the block computes, in token order."""
        values_BLD, positions_BK = step.grid.flatten(values_BTHWD), step.kept_tokens.get(self.settings.block_index)
        return values_BLD if positions_BK is None else values_BLD.take_along_dim(positions_BK[..., None], 1)

    @property
    def distances(self) -> range:
        last = self.settings.adjacent_distance
        return range(1 if self.settings.cumulative_neighbors else max(1, last), last + 1)

    @property
    def reads_numbers(self) -> bool:
        return self.settings.similarity_threshold is not None

    def finish_step(self, logged: Mapping[str, float]) -> None:
        similarity, settings = logged.get("crepa_similarity"), self.settings
        if settings.similarity_threshold is None or similarity is None or not math.isfinite(similarity):
            return
        decay = settings.similarity_ema_decay if self.similarity is not None else 0.0
        self.similarity = decay * (self.similarity or 0.0) + (1 - decay) * similarity
        if settings.threshold_mode == "permanent" and self.similarity >= settings.similarity_threshold:
            self.ended = True

    def state(self) -> dict[str, Any]:
        return {"similarity": self.similarity, "ended": self.ended}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.similarity, self.ended = state["similarity"], state["ended"]


def add_neighbors(values_BTHWC: torch.Tensor, distances: range, tau: float) -> torch.Tensor:
    """Add to each frame the frames at distance d before and after it, times exp(-d / tau), for each d in
    `distances`."""
    summed = values_BTHWC.clone()
    for d in distances:
        factor = math.exp(-d / tau)
        summed[:, :-d] += factor * values_BTHWC[:, d:]
        summed[:, d:] += factor * values_BTHWC[:, :-d]
    return summed


def token_factors(step: MethodStep) -> torch.Tensor:
    """(B, T, rows, columns, 1): the mean factor of the squared errors that each token predicts."""
    grid, weight_BTHW = step.grid, step.weight_BTHW
    assert weight_BTHW is not None
    pooled_BTHW = F.adaptive_avg_pool2d(weight_BTHW.float(), (grid.rows, grid.columns))
    return pooled_BTHW.expand(-1, grid.frames, -1, -1)[..., None]
