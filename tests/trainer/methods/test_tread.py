"""TREAD against blocks that are run by hand on gathered tokens, one sample at a time, with drops by the definition."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from schemas.config.pipeline import Config
from schemas.errors import USAGE
from stages.rehearsing.tiny_models import build, make_model
from tests.forms import long
from tests.trainer.conftest import KINDS, row_of
from tests.trainer.methods.tread_by_hand import LAYERS, NABLA, OUTSIDE, ROUTES, NablaByHand, loss_by_hand
from tests.trainer.runs import LOADS, prepared
from trainer import train as loop
from trainer.families.kandinsky5 import Kandinsky5, install_processors

BUCKETS = {"t2i": "96x64", "i2i": "96x64", "t2v": "96x64@9", "i2v": "96x64@9", "nabla": "256x256@13", "sana": "256x192"}


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """kind -> a checkpoint with LAYERS blocks of visual tokens."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            name = KINDS.get("t2v" if kind == "nabla" else kind, kind)
            build(name, made[kind], only=["transformer", "scheduler"])
            shutil.rmtree(made[kind] / "transformer")
            part = {"t2i": "image", "i2i": "image", "sana": "sana"}.get(kind, "video")
            more: dict[str, Any] = {row_of("t2v" if kind == "nabla" else kind).spec.layers[0]: LAYERS}
            more |= {"visual_cond": True} if kind == "i2i" else NABLA if kind == "nabla" else {}
            make_model(part, overrides=more).save_pretrained(made[kind] / "transformer")
        return made[kind]

    return get


@pytest.fixture
def start(make_config, make_set, helpers, deep) -> Callable[..., loop.TrainState]:
    """start(kind, routes or None, masks=, tread=, **train options): a run of full rank, two samples a batch."""

    def get(kind: str, routes: list | None, *, masks: bool = False, tread: dict | None = None, **settings: Any) -> Any:
        methods = {} if routes is None else {"tread": {"routes": routes, **(tread or {})}}
        methods |= {"masked_loss": {"unmasked_weight": OUTSIDE}} if masks else {}
        settings = {"adapter": {"type": "full"}, "batch_size": 2, "caption_dropout": 0.0, **settings}
        settings["optimizer"] = {"max_grad_norm": 1e12, "warmup": 0}
        config = make_config("t2v" if kind == "nabla" else kind, methods=methods, **settings)
        model = config.model.model_copy(update={"path": str(deep(kind))})
        config = config.model_copy(update={"model": model})
        if not Path(config.root).exists():
            make_set(config, *samples(helpers, config, BUCKETS[kind], masks))
        return prepare(config)

    return get


def samples(helpers, config: Config, bucket: str, masks: bool):
    """Four of one bucket, with captions of unequal lengths; of two every other has a mask."""
    rng, pooled, items = np.random.default_rng(3), "pooled" in config.model.family_spec.text_widths, []
    for number in range(4):
        x0 = helpers.latent(rng, config, bucket)
        given = config.model.family_spec.condition_frames(config.model.task)
        condition = {"i2v": x0[:, :given], "i2i": rng.normal(size=x0.shape).astype(np.float32)}.get(config.model.task)
        item = helpers.Item(bucket, x0, [helpers.caption(rng, 3 + number, pooled)], condition)
        if masks and number % 2:
            item.mask = np.zeros(x0.shape[1:], np.float32)
            item.mask[-1, 1:-1, 1 : 1 + x0.shape[3] // 2] = 0.5
        items.append(item)
    return items, helpers.caption(rng, 2, pooled), []


def prepare(config: Config) -> loop.TrainState:
    run = prepared(config)
    if isinstance(run.family, Kandinsky5):  # rounding to bfloat16 makes a last bit's difference 60,000 times larger
        install_processors(run.model, float32_rotary=True)
    return run


def step_once(run: loop.TrainState) -> SimpleNamespace:
    """loss, gradients, and the arguments of the forward passes of the first step."""
    seen, gradients = [], {}
    run.denoiser.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    run.optimizer.step = lambda: gradients.update({key: it.grad.clone() for key, it in run.trainable.items()})
    return SimpleNamespace(
        loss=loop.finish_step(run, loop.train_step(run, run.loader.step(0)))["loss"], gradients=gradients, seen=seen
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "masks", "checkpointed"),
    [
        ("t2i", True, 1),
        long("i2i", False, 1),
        long("t2v", True, 0),
        long("i2v", True, 2),
        ("sana", True, 2),
        long("nabla", False, 1),
    ],
)
def test_a_route_equals_its_blocks_by_hand(start, kind, masks, checkpointed, record_property) -> None:
    """Loss and gradients of every weight; masks: with a masked loss; checkpointed: every how many blocks."""
    options = {"gradient_checkpointing": checkpointed > 0, "gradient_checkpointing_interval": max(checkpointed, 1)}
    run = start(kind, ROUTES, masks=masks, **options)
    found = step_once(run)
    [(noisy, sigma, batch)] = found.seen
    if masks:
        assert sorted(float(mask.min()) for mask in batch.extras["mask"]) == [0, 1], "one of the two has a mask"
    for block in run.model.visual_transformer_blocks if kind == "nabla" else ():
        block.self_attention.set_processor(NablaByHand())
    loss = loss_by_hand(run, kind, noisy, sigma)
    loss.backward()
    record_property("loss by hand and difference", (loss.item(), found.loss - loss.item()))
    assert found.loss == pytest.approx(loss.item(), rel=1e-5)
    for name, weight in run.trainable.items():
        error = (found.gradients[name] - weight.grad).norm()
        assert error <= 1e-4 * weight.grad.norm().clamp(min=1e-3), (name, error, weight.grad.norm())
    plain = step_once(start(kind, None, masks=masks, name="plain"))
    assert abs(plain.loss - found.loss) > 1e-4 * found.loss, "tokens were dropped"


# --- what stays as it is ---


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["i2v", long("sana")])
def test_a_share_that_drops_no_token_changes_no_bit(start, kind) -> None:
    plain = step_once(start(kind, None, name="plain"))
    for share in (0.0, 0.01):
        found = step_once(start(kind, [ROUTES[0] | {"selection_ratio": share}]))
        assert found.loss == plain.loss
        assert all(torch.equal(found.gradients[name], each) for name, each in plain.gradients.items())


def kept_in_steps(run: loop.TrainState, steps: int) -> list[torch.Tensor]:
    """(B, K) of each micro-batch, of the first route."""
    kept = []
    for number in range(steps):
        for part in run.loader.step(number).micro_batches:
            step = loop.start_step(run, number, part)
            with torch.no_grad(), run.methods["tread"].around(step):
                run.denoiser(step.noisy_BCTHW, step.sigma_B, step.batch)
            kept.append(step.kept_tokens[0])
    return kept


@pytest.mark.slow
def test_the_choice_is_one_of_each_sample_and_step(start) -> None:
    """It is the same for any accumulation; that of a given frame is a choice only where asked for."""
    by_two = kept_in_steps(start("i2v", ROUTES, accumulate=2), 2)
    by_four = kept_in_steps(start("i2v", ROUTES, batch_size=4), 2)
    assert torch.equal(torch.cat(by_two), torch.cat(by_four)) and len(by_two) == 4
    first = range(24)  # tokens of frame 0
    assert len({tuple(kept) for part in by_two for kept in part.tolist()}) == 8
    assert all({*first} <= {*kept} for part in by_two for kept in part.tolist())
    dropping = kept_in_steps(start("i2v", ROUTES, tread={"drop_first_frame": True}), 1)[0]
    assert dropping.shape == (2, 36) and not any({*first} <= {*kept} for kept in dropping.tolist())


# --- what is refused ---


def test_compiled_blocks_that_convolve_are_refused(make_config) -> None:
    with pytest.raises(ValueError, match="blocks of sana"):
        make_config("sana", compile="blocks", methods={"tread": {"routes": ROUTES[:1]}})


def test_masks_that_keep_tokens_are_used(make_config) -> None:
    for keep, said in ((True, 0), (False, 1)):
        config = make_config("t2i", methods={"tread": {"routes": ROUTES, "keep_masked": keep}})
        masked = config.datasets[0].model_copy(update={"mask_data": "masks"})
        assert len([*config.model_copy(update={"datasets": (masked,)}).unused_features("masks")]) == said


def test_blocks_that_the_transformer_does_not_have_are_refused_before_it_is_loaded(ready, make_config, program) -> None:
    ready("sana")
    for (start, end), more, words in (
        ((1, 3), [], "routes.0.end_layer_idx: 3"),
        ((-4, -1), [], "routes.0.start_layer_idx: -4"),
        ((2, -2), [], "routes.0.end_layer_idx"),
        ((0, 1), [(-2, -1)], "routes.1.start_layer_idx"),
    ):
        routes = [{"selection_ratio": 0.5, "start_layer_idx": a, "end_layer_idx": b} for a, b in [(start, end), *more]]
        refused = make_config("sana", methods={"tread": {"routes": routes}})
        code, _, said = program(refused)
        assert code == USAGE and f"train.methods.tread.{words}" in said and LOADS not in said
