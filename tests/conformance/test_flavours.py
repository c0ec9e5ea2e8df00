"""The conformance suite: every flavour against its diffusers pipeline, in float32 on a tiny random checkpoint.

Each test runs for each row of flavours.py, so that a new family is tested by a row; made.py has what the tests of a row
share. Tests of what only one family has are elsewhere, by package.
"""

import re
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.schedulers import FlowMatchEulerDiscreteScheduler
from diffusers.video_processor import VideoProcessor

from schemas.geometry import Bucket
from stages.encoding.text.base import TextRequest, load_text_encoder
from stages.encoding.vae.base import load_autoencoder
from stages.media.sample_reader import normalize_pixels
from tests.conformance.flavours import ROWS, tokens
from tests.conformance.made import CPU, STEPS, TRAINED, Made, picture
from tests.forms import long
from tests.trainer.families.batches import by_batch_and_alone, sample_losses
from tests.trainer.pipelines import apply_as_comfyui, comfyui_names, lycoris_names, make_batch, output, trained
from tests.trainer.runs import lines, move_adapter, prepared, trained_weights
from trainer import train as loop
from trainer.methods import METHODS
from trainer.setup import adapters, export
from trainer.validation import SHIFT_KEYS

pytestmark = pytest.mark.slow

CAPTIONS = [
    "",
    "A Small Grey Cat looks at the camera with green eyes.",
    "  Ünïcödé 猫は窓の外を見る 🐈‍⬛ — “quotes” ﬁ schÃ¶n &lt;b&gt; {braces} \n two lines ",
    "user: <|im_end|> a caption that names a special token",
    "a red flower near the old stone wall of the house, " * 12,
]
OVERLONG = "words that go on " * 300
CLOSE, DENOISED = 1e-5, 2e-5
REPEATED = re.compile(r"(^|_)(blocks|refiner|layers)(\.[a-z_]+)?\.\d+\.")


NAMES = [long(name) if row.is_long else name for name, row in ROWS.items()]


def some(*names: str) -> Any:
    """A check that is of the short form for these rows alone, as the others compute alike."""
    return pytest.mark.parametrize(
        "made", [name if name in names else long(name) for name in ROWS], indirect=True, scope="module"
    )


@pytest.fixture(scope="module", params=NAMES)
def made(request, tmp_path_factory, tiny) -> Iterator[Made]:
    """The tests of a row follow each other and share it."""
    row = ROWS[request.param]
    with pytest.MonkeyPatch.context() as patch:
        row.patch(patch, row.spec)
        yield Made(
            request.param, tmp_path_factory.mktemp(request.param) / "project", tiny(row.checkpoint or request.param)
        )


def gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return (ours - theirs).abs().max().item()


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- texts ---


def prompts(made: Made, encoder: Any) -> Iterator[tuple[TextRequest, tuple]]:
    """What our encoder and the row's function are given. Captions of templates that negative prompts do not have twice,
    and one that is cut if the template has no image; images as many as a sample can have, of several sizes."""
    template, sizes = encoder.template, [(192, 128), (128, 192), (160, 160), (320, 64), (192, 128)]
    count = made.row.spec.conditions[made.row.task].most if template.with_image else 0
    texts = [*product(CAPTIONS, (False, True)[: 2 - template.negative_uses_template])]
    texts += [] if template.with_image else [(OVERLONG, False)]
    for number, (caption, negative) in enumerate(texts):
        images = [picture(seed, *sizes[(number + seed) % len(sizes)]) for seed in range(count)]
        shown = images
        if template.image_size:
            sides = [template.image_size.fit(np.array([image.width]), np.array([image.height])) for image in images]
            shown = [image.resize((int(w[0]), int(h[0])), 1) for image, (w, h, _) in zip(images, sides, strict=True)]
        request = TextRequest(template.cleaner.text(caption), negative, tuple(shown))
        yield request, (caption, images, negative)


@torch.no_grad()
def test_texts_are_the_pipelines(made: Made, record_property) -> None:
    """In a batch, behind a shared prefix if the model has one; every third alone; and without the shared prefix."""
    config, largest = made.home.config(), 0.0
    encoder = load_text_encoder(config.model, config.text, CPU)
    given = (encoder.source, None, encoder.template, encoder.max_length, encoder.dtype, CPU)
    whole, cases = type(encoder)(*given, share_prefix=False), [*prompts(made, encoder)]
    together, apart = (each.encode([each.prepare(request) for request, _ in cases]) for each in (encoder, whole))
    for number, ((request, asked), result, other) in enumerate(zip(cases, together, apart, strict=True)):
        embeds, pooled = made.row.text(made.pipe, *asked)
        assert result.kept == len(embeds) and (result.tokens > result.kept) == (asked[0] == OVERLONG)
        assert (result.pooled is None) == (pooled is None)
        ours = [result, other, *(encoder.encode([encoder.prepare(request)]) if number % 3 == 0 else ())]
        gaps = [gap(each.embeds, embeds) for each in ours]
        gaps += [gap(each.pooled, pooled) for each in ours if pooled is not None]
        largest = max(largest, *gaps)
    record_property("largest difference", largest)
    assert largest <= CLOSE


@some("sana")
@torch.no_grad()
def test_texts_in_bfloat16_are_as_near_to_float32_as_the_pipelines(made: Made, record_property) -> None:
    """In roundings to bfloat16 of a number of the states' scale, of which a few layers make a few."""
    config = made.home.config("text.precision=bfloat16")
    encoder, half = load_text_encoder(config.model, config.text, CPU), made.load_pipeline(dtype=torch.bfloat16)
    cases, gaps = [*prompts(made, encoder)], [[], [], []]
    for (_, asked), result in zip(cases, encoder.encode([encoder.prepare(case[0]) for case in cases]), strict=True):
        rows = zip(
            (result.embeds, result.pooled), made.row.text(half, *asked), made.row.text(made.pipe, *asked), strict=True
        )
        for ours, theirs, exact in (row for row in rows if row[0] is not None):
            assert ours.dtype == theirs.dtype == torch.bfloat16
            scale = exact.square().mean().sqrt() * 2.0**-8
            pairs = (ours.float() - exact, theirs.float() - exact, ours.float() - theirs.float())
            for found, pair in zip(gaps, pairs, strict=True):
                found.append((pair / scale).flatten())
    ours, theirs, between = (torch.cat(each) for each in gaps)
    mean, their_mean, apart = (each.square().mean().sqrt().item() for each in (ours, theirs, between))
    most, their_most = (each.abs().max().item() for each in (ours, theirs))
    record_property("roundings", (mean, their_mean, most, their_most, apart))
    assert mean <= 1.1 * their_mean and most <= 1.25 * their_most
    assert mean <= made.row.roundings / 5 and most <= made.row.roundings and apart <= their_mean


# --- latents ---


def clip(frames: int, seed: int) -> np.ndarray:
    """uint8 (T, H, W, 3): coarse colored forms that drift, with grain."""
    random, forms = np.random.default_rng(seed), np.asarray(picture(seed, 64, 32))
    moving = np.stack([np.roll(forms, 3 * step, axis=1) for step in range(frames)])
    return np.clip(moving.astype(int) + random.integers(-8, 9, moving.shape), 0, 255).astype(np.uint8)


def test_latents_are_the_pipelines_and_are_decoded_as_by_it(made: Made, record_property) -> None:
    """A sample of the posterior by its seed, alone and in a batch, and its moments."""
    config, spec, vae, seeds = made.home.config(), made.row.spec, made.pipe.vae, (3, 2**62 + 5)
    ours = load_autoencoder(config.model, config.latents, CPU)
    has_time = any(isinstance(part, torch.nn.Conv3d) for part in vae.modules()) or "z_dim" in vae.config
    largest = 0.0
    for count in (1, made.row.frames) if spec.video else (1,):
        pixels = torch.from_numpy(np.stack([normalize_pixels(clip(count, seed)) for seed in range(2)]))
        together, moments = (ours.encode(pixels, seeds, kind) for kind in ("sample", "moments"))
        mean, logvar = moments.chunk(2, 1) if spec.posterior else (moments, None)
        decoded = ours.decode(mean)
        assert torch.equal(decoded, ours.decode(moments))
        shape = Bucket.parse(f"64x32@{count}").latent_shape(spec.spatial_stride, spec.temporal_stride)
        assert together.shape[1:] == (spec.latent_channels, *shape)
        for number, seed in enumerate(seeds):
            one = pixels[[number]] if has_time else pixels[[number], :, 0]
            if made.row.has_alpha:
                one = torch.cat([one, torch.ones_like(one[:, :1])], 1)
            with torch.no_grad():
                encoded = vae.encode(one)
                mode = encoded.latent_dist.mode() if spec.posterior else encoded.latent
                drawn = encoded.latent_dist.sample(generator(seed)) if spec.posterior else mode
                shown = vae.decode(mode).sample[:, :3]
                deviation = encoded.latent_dist.std if spec.posterior else torch.zeros_like(mode)
            raw = [each if has_time else each[:, :, None] for each in (drawn, mode, mode + deviation)]
            wanted, wanted_mean, beside = (made.row.latents(vae, each) for each in raw)
            alone = ours.encode(pixels[[number]], [seed], "sample")
            gaps = [gap(each, wanted) for each in (alone, together[[number]])]
            gaps.append(gap(mean[[number]], wanted_mean))
            if logvar is not None:
                gaps.append(gap((logvar[[number]] / 2).exp(), beside - wanted_mean))
            largest = max(largest, max(gaps) / max(1.0, wanted.abs().max().item()))
            frames = VideoProcessor(8).postprocess_video(shown if has_time else shown[:, :, None], output_type="np")[0]
            unlike = np.abs(decoded[number].numpy() - (frames * 255).round())
            assert unlike.max() <= 1 and unlike.mean() < 1e-2  # roundings
    record_property("largest difference", largest)
    assert largest <= CLOSE


# --- predictions and samples ---


def test_predictions_are_the_pipelines(made: Made, record_property) -> None:
    """From cached texts and conditions to the velocity that the scheduler is given, without guidance: at fractional
    noise levels too, which training has, and at those of the checkpoint's scheduler with another shift."""
    own, gaps = made.pipe.scheduler, []
    key = next(key for key in SHIFT_KEYS if key in own.config)
    fixed = {"use_dynamic_shifting": False} if own.config.get("use_dynamic_shifting") else {}
    theirs = FlowMatchEulerDiscreteScheduler(shift=2.7), type(own).from_config(own.config, **{key: 2.7}, **fixed)
    ours = FlowMatchEulerDiscreteScheduler(shift=2.7), made.scheduler(2.7)
    try:
        for scheduler, made.pipe.scheduler in zip(ours, theirs, strict=True):
            seen, found = made.generate(made.pipe, guided=False, steps=3), made.denoise(scheduler, 3)
            gaps += [made.apart(*pair) for pair in zip(found.velocities, seen.velocities, strict=True)]
    finally:
        made.pipe.scheduler = own
    record_property("largest difference", max(gaps))
    assert max(gaps) <= CLOSE


@some("kandinsky5-video-i2v", "wan2.2-a14b-i2v")
def test_samples_are_the_pipelines_before_and_after_training(made: Made, record_property) -> None:
    """With the checkpoint's scheduler, guidance and a negative prompt; after training with what it has saved, loaded by
    the pipeline's own loader."""
    gaps = [made.apart(made.shown(0), made.generate(made.pipe).final)]
    gaps.append(made.apart(made.shown(TRAINED), made.generate(made.trained_pipe).final))
    assert gap(made.shown(0), made.shown(TRAINED)) > 1e-3
    record_property("largest differences", gaps)
    assert max(gaps) <= DENOISED


IN_BFLOAT16 = [long(name) if row.is_long else name for name, row in ROWS.items() if row.same_in_bfloat16]


@pytest.mark.parametrize("made", IN_BFLOAT16, indirect=True, scope="module")
def test_samples_in_bfloat16_are_the_pipelines_in_every_bit(made: Made) -> None:
    """Timesteps, guidance and steps are rounded where the pipeline rounds them. The texts are those of float32."""
    pipe, encode = made.load_pipeline(), made.pipe.encode_prompt

    def in_half(part: Any) -> Any:
        return part.to(torch.bfloat16) if isinstance(part, torch.Tensor) and part.is_floating_point() else part

    pipe.encode_prompt = lambda *arguments, **options: tuple(map(in_half, encode(*arguments, **options)))
    pipe.transformer = type(pipe.transformer).from_pretrained(
        made.checkpoint / "transformer", torch_dtype=torch.bfloat16
    )
    ours = made.denoise(made.scheduler(), STEPS, guided=True, dtype=torch.bfloat16).final
    assert ours.dtype == torch.bfloat16 and made.apart(ours, made.generate(pipe).final) == 0


# --- training ---


def test_a_prediction_does_not_depend_on_the_batch_or_on_checkpointing(made: Made, record_property) -> None:
    """Losses and gradients of samples with unequal texts: in a batch, alone, and with gradient checkpointing, which
    changes no bit."""
    model = made.load(made.row.spec.components[-1])
    batch = make_batch(made.name, model, [3, 40, 8], side=6)
    together, single, gradients = by_batch_and_alone(made.family, model, batch, made.row.task, least=1e-3)
    record_property("loss, gradients", (gap(together, single), gradients))
    assert gap(together, single) <= CLOSE and gradients <= 1e-4

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        losses = sample_losses(made.family, model, batch, made.row.task)
        losses.mean().backward()
        return [losses.detach(), *(weight.grad for weight in model.parameters() if weight.grad is not None)]

    plain = step()
    model.enable_gradient_checkpointing()
    assert all(map(torch.equal, plain, step()))


def test_blocks_compute_the_tokens_of_the_grid_in_their_order(made: Made) -> None:
    model, family, called = made.load(), made.family, []
    batch = make_batch(made.name, model, frames=5)
    blocks = family.blocks(model, made.row.task)
    for block in blocks:
        block.register_forward_pre_hook(
            lambda block, inputs, named: called.append((block, next(iter((*inputs, *named.values()))).shape)),
            with_kwargs=True,
        )
    with torch.no_grad():
        made.family.predict(model, batch.latents_BCTHW, torch.full((2,), 0.5), batch, made.row.task)
    assert [block for block, _ in called] == blocks
    grid, visual, (_, shape) = family.token_grid(model, batch), family.visual_blocks(model), called[-1]
    edge = 1 if made.row.layout is tokens else made.row.spec.side_multiple // made.row.spec.spatial_stride
    assert (grid.frames, grid.rows, grid.columns) == (batch.latents_BCTHW.shape[2], 4 // edge, 4 // edge)
    assert shape[:-1].numel() >= 2 * grid.tokens and shape[-1] == family.hidden_size(model)
    assert [block for block in blocks if block in visual] == visual and blocks[-1] in visual
    everything = [*blocks, *family.idle_blocks(model, made.row.task)]
    listed = {id(weight) for block in everything for weight in block.parameters()}
    assert listed == {id(weight) for name, weight in model.named_parameters() if REPEATED.search(name)}


@pytest.mark.parametrize("form", ["lora", long("full")])
def test_every_trained_weight_gets_a_gradient(made: Made, form: str) -> None:
    """DistributedDataParallel waits for each. In full rank all are trained but those that the family names."""
    run, without = prepared(made.sampled("random", {}, f"train.adapter={{type: {form}}}")), []
    run.optimizer.step = lambda: without.extend(name for name, weight in run.trainable.items() if weight.grad is None)
    loop.train_step(run, run.loader.step(0))
    assert run.trainable and without == []
    unused = run.family.without_gradient(run.model, made.row.task)
    left_out = {id(weight) for part in unused for weight in part.parameters()}
    trained = {id(weight) for weight in run.trainable.values()}
    assert not left_out & trained
    if form == "full":
        assert left_out | trained == {id(weight) for weight in run.model.parameters()}


@some("kandinsky5-video-i2v")
def test_an_interrupted_run_continues_with_the_same_numbers(made: Made) -> None:
    """With dropout in the adapter and of captions."""
    made.train("output=cut", "train.steps=1")
    for whole, cut in zip(made.trained, made.train("output=cut"), strict=True):
        assert lines(cut) == lines(whole) and list(lines(cut)) == [1, 2]
        found, expected = trained_weights(cut), trained_weights(whole)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


METHODS_USED = {
    "masked_loss": {"unmasked_weight": 0.5},
    "tread": {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": 1}]},
    "crepa": {"block_index": 0},
    "scheduled_sampling": {"probability": 1.0},
    "input_perturbation": {},
    "regularization": {},
    "guidance": {"scale": 2.0},
}


@some("sana", "wan2.2-a14b-i2v")
def test_methods_train_or_are_rejected_with_a_reason(made: Made) -> None:
    """All at once, as they change the same step."""
    assert METHODS_USED.keys() == METHODS.keys()
    for method, reason in made.row.refused.items():
        with pytest.raises(ValueError, match=reason):
            made.sampled("random", {method: METHODS_USED[method]})
    used = {name: options for name, options in METHODS_USED.items() if name not in made.row.refused}
    numbers = []
    for chosen in (used, {}):
        run = prepared(made.sampled("random", chosen))
        move_adapter(run)
        numbers.append(loop.finish_step(run, loop.train_step(run, run.loader.step(0))))
        assert run.methods.keys() == chosen.keys() and numbers[-1]["grad_norm"] > 0
    assert "crepa_similarity" in numbers[0] and abs(numbers[0]["loss"] - numbers[1]["loss"]) > 1e-3


# --- adapters ---

BY_MODULE = {"rank_pattern": {r".*(to_q|to_query)": 6}, "alpha_pattern": {r".*\.0\..*": 3.0}}
LINEAR_TARGETS = (
    r".*(blocks|layers)\.\d+\.(attn[12]?|attention|self_attention|cross_attention)\."
    r"(to_.|to_out\.0|to_query|to_key|out_layer)"
)
LORA = {
    "alpha": {"alpha": 2.5},
    "dropout": {"rank": 3, "alpha": 6, "dropout": 0.5},
    "rslora": {"rank": 9, "rslora": True},
    "by module": {"rank": 4, **BY_MODULE},
    "dora": {"dora": True, "rslora": True, **BY_MODULE},
    "gaussian": {"init_weights": "gaussian"},
    "orthogonal": {"init_weights": "orthogonal", "dora": True, "targets": [LINEAR_TARGETS]},
    "pissa": {"init_weights": "pissa", "alpha": 2.5, "targets": [LINEAR_TARGETS]},
    "pissa, rslora, by module": {"init_weights": "pissa", "rslora": True, "targets": [LINEAR_TARGETS], **BY_MODULE},
    "olora": {"init_weights": "olora", "dropout": 0.5, "targets": [LINEAR_TARGETS], **BY_MODULE},
}
LOKR = {
    "factors": {"rank": 4, "alpha": 2.5},
    "whole": {"rank": 64, "alpha": 8.0},  # so large that neither matrix is factorized
    "both": {"rank": 2, "decompose_both": True, "decompose_factor": 16},
    "by module": {
        "rank": 4, "decompose_factor": 4, "rank_pattern": {".*(to_q|to_query)": 64}, "alpha_pattern": {".*": 3},
    },
}  # fmt: skip
FILE = "pytorch_lora_weights.safetensors"


def variant(made: Made, variants: dict[str, dict]) -> dict:
    """Each row has the next one."""
    order = sorted(ROWS, key=lambda name: ROWS[name].is_long)
    return [*variants.values()][order.index(made.name) % len(variants)]


@some("kandinsky5-image-t2i", "sana", "z-image", "qwen-image", "wan2.2-5b-i2v", "flux2-klein-i2i")
def test_a_lora_is_the_same_in_the_pipeline_and_in_comfyui(made: Made, tmp_path) -> None:
    """It starts at the base; then the pipeline loads diffusers' file, and ComfyUI's rule adds the other one to the
    weights."""
    options, part = variant(made, LORA), made.row.spec.components[-1]
    base, start = made.load(part), changed(made, moved=0.0, **options)
    # A product that is taken from the base weights leaves differences of 1e-7.
    assert gap(output(made.name, start), output(made.name, base)) <= CLOSE
    model, pipe = changed(made, **options), made.load_pipeline(texts=False)
    export.save_lora(model, tmp_path, made.row.family)
    pipe.load_lora_weights(tmp_path, **({"load_into_transformer_2": True} if part == "transformer_2" else {}))
    ours = output(made.name, model)
    assert gap(ours, output(made.name, base)) > 1e-2
    assert gap(output(made.name, getattr(pipe, part)), ours) <= 2e-6
    if not options.get("dora"):
        file = tmp_path / "for/comfyui.safetensors"
        export.save_lora(model, tmp_path, made.row.family, comfyui_file=file)
        apply_as_comfyui(base, file)
        assert gap(output(made.name, base), ours) <= CLOSE
        if not made.row.spec.comfyui_names.has_alpha:  # a file that diffusers reads, too
            pipe.delete_adapters(pipe.get_active_adapters())
            pipe.load_lora_weights(file)
            assert gap(output(made.name, getattr(pipe, part)), ours) <= 2e-6


@some("kandinsky5-image-t2i", "sana", "wan2.2-5b-i2v", "flux2-klein-i2i")
def test_a_lokr_is_the_same_in_the_pipeline_merged_and_in_comfyui(made: Made, tmp_path) -> None:
    part, model = made.row.spec.components[-1], changed(made, type="lokr", **variant(made, LOKR))
    export.save_lora(model, tmp_path, made.row.family, comfyui_file=tmp_path / "comfyui.safetensors")
    ours, loaded = output(made.name, model), getattr(made.load_pipeline(texts=False), part)
    before, scale = output(made.name, loaded), ours.abs().mean()
    assert (ours - before).abs().mean() > 5e-3 * scale
    loaded.load_lora_adapter(tmp_path, prefix="transformer", weight_name=FILE)
    found = [output(made.name, loaded)]
    loaded.fuse_lora()
    found.append(output(made.name, loaded))
    changes = {
        name: model.get_submodule(name).get_delta_weight("default") for name in adapters.list_adapted_modules(model)
    }
    for file, names in (("lycoris_weights", lycoris_names), ("comfyui", comfyui_names)):
        plain = made.load(part)
        applied = apply_as_comfyui(plain, tmp_path / f"{file}.safetensors", names)
        assert applied.keys() == changes.keys()
        assert max(gap(applied[name], change) for name, change in changes.items()) <= 1e-6
        found.append(output(made.name, plain))
    assert max((each - ours).abs().mean() / scale for each in found) <= 1e-6


def changed(made: Made, moved: float = 0.1, **options) -> torch.nn.Module:
    """A model with an adapter, a LoRA of rank 4 by default, that has moved away from its start."""
    return trained(made.name, made.checkpoint, moved, part=made.row.spec.components[-1], **options)
