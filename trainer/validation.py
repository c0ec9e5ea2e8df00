"""Validation in training: a loss on a fixed grid, and the validation prompts denoised as the pipelines do.

Nothing here uses a global random state, so validating more or less often does not change the training.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from pathlib import Path
from statistics import fmean
from typing import Any

import diffusers.schedulers
import numpy as np
import torch

from cache.models.compatibility import find_index
from cache.sets.trainset import TrainSet, ValidationPrompt
from schemas.catalog import FAMILIES
from schemas.config.pipeline import Config
from schemas.config.section import listed
from schemas.config.validation import SizedPrompt, Validation, ValidationSample
from schemas.devices import has_float64, to_device
from schemas.family import REFERENCE_PARTS, Family, ModularPipeline, Task
from schemas.geometry import Bucket
from schemas.identity import hash_json
from trainer import flow
from trainer.adapters.files import write_tensors
from trainer.attention import validation_attention
from trainer.batch import Batch, make_batch
from trainer.data import BatchReader, to_tensor
from trainer.families.base import SIGMAS, ModelFamily, sampling
from trainer.noise import draw_latents, seeded_noise
from trainer.run.resume import DataChange

#: (noisy_BCTHW, sigma_B, batch) -> velocity_BCTHW
PredictVelocity = Callable[[torch.Tensor, torch.Tensor, Batch], torch.Tensor]
SHIFT_KEYS = ("shift", "flow_shift")  # config keys of FlowMatchEulerDiscreteScheduler, and of other schedulers


@torch.no_grad()
def compute_eval_loss(
    predict: PredictVelocity,
    reader: BatchReader,
    settings: Validation,
    batch_size: int,
    device: torch.device,
    skip_frames: int = 0,
    advance: Callable[[], object] = lambda: None,
    data_changes: Sequence[DataChange] = (),
) -> dict[str, Any]:
    """Returns the metrics "eval_loss" (mean loss over `eval_samples` rows of the set with their first captions),
    "eval_by_sigma" (mean at each of `eval_sigmas`; 0: data, 1: noise), "eval_by_bucket" (mean over the rows of each
    bucket), "eval_on" (description of the rows, see `TrainSet.choose_eval_rows`) and "eval_id" (a hash; losses with
    equal hashes can be compared).

    Noise and draws from stored posteriors depend only on (seed, sample id), so checkpoints and runs of one set can be
    compared. The loss of training samples shows fitting, not generalizing. advance: called after each sample.
    data_changes: data changes of the run; losses can only be compared between two changes.
    """
    losses: list[tuple[Sequence[float], str, torch.Tensor]] = []  # sigmas, bucket, (B,) on the device
    ids: list[str] = []
    data, seed = reader.data, listed(settings.seed)[0]
    rows, source = data.choose_eval_rows(settings.eval_samples)
    family = FAMILIES[data.meta.family]
    for row in rows:
        texts = data.row_texts.first(np.array([row]))
        stored_batch = reader.read(np.array([row]), texts, data.bucket(row))
        if not stored_batch.is_finite():
            data.sample(row)  # raises an error that names the number
        (id,) = stored_batch.ids
        ids += [id, data.text_id(int(texts[0]))]
        for first in range(0, len(settings.eval_sigmas), batch_size):
            sigmas = settings.eval_sigmas[first : first + batch_size]
            batch = stored_batch.select(torch.zeros(len(sigmas), dtype=torch.long)).to(device, torch.float32)
            batch = draw_latents(batch, family, [f"{seed}/{id}/eval"] * len(sigmas))
            noise = seeded_noise([f"{seed}/{id}"], "eval", batch.latents_BCTHW.shape[1:], device)
            noise_BCTHW = noise.expand_as(batch.latents_BCTHW)
            sigma_B = to_device(torch.tensor(sigmas), device)
            noisy = flow.interpolate(batch.latents_BCTHW, noise_BCTHW, sigma_B)
            target = flow.velocity(batch.latents_BCTHW, noise_BCTHW)
            loss_B = flow.loss_per_sample(predict(noisy, sigma_B, batch), target, skip_frames)
            losses.append((sigmas, data.bucket(row), loss_B))
        advance()
    at_sigma: dict[float, list[float]] = {sigma: [] for sigma in settings.eval_sigmas}
    by_bucket: dict[str, list[float]] = {}
    values = iter(torch.cat([loss_B for *_, loss_B in losses]).tolist())
    for batch_sigmas, bucket, _ in losses:
        for sigma in batch_sigmas:
            at_sigma[sigma].append(value := next(values))
            by_bucket.setdefault(bucket, []).append(value)
    compared = hash_json([ids, seed, settings.eval_sigmas, *(change.model_dump() for change in data_changes)])
    by_sigma = {f"{sigma:g}": fmean(values) for sigma, values in at_sigma.items()}
    bucket_means = {bucket: fmean(values) for bucket, values in sorted(by_bucket.items())}
    means = {"eval_loss": fmean(by_sigma.values()), "eval_by_sigma": by_sigma, "eval_by_bucket": bucket_means}
    return {**means, "eval_on": source, "eval_id": compared}


def list_samples(config: Config, data: TrainSet) -> list[ValidationSample]:
    """Returns the validation samples of the set's prompts, in order."""
    return config.validation_samples([SizedPrompt(entry.name, entry.bucket) for entry in data.meta.validation])


def divide_samples(samples: Sequence[ValidationSample], share: tuple[int, int]) -> list[tuple[ValidationSample, bool]]:
    """Returns the samples that a rank denoises, each with whether its result counts. share: (i, n) for rank i of n,
    which denoises every n-th sample from i on. Ranks with one sample less repeat the last sample, because all ranks
    must compute the same number of samples."""
    first, every = share
    numbers = range(first, -(-len(samples) // every) * every, every)
    return [(samples[min(number, len(samples) - 1)], number < len(samples)) for number in numbers]


def write_validation_latents(
    model: torch.nn.Module,
    family: ModelFamily,
    config: Config,
    data: TrainSet,
    folder: Path | None,
    device: torch.device,
    share: tuple[int, int] = (0, 1),
    autocast: torch.dtype | None = None,
    advance: Callable[[], object] = lambda: None,
    other_expert: Callable[[], AbstractContextManager[Any]] | None = None,
) -> int:
    """Denoise the validation samples of the set's prompts to `folder`/<name>.safetensors; returns the number of
    samples. model: transformer in eval mode. folder: output folder; None to write nothing, on all ranks of a sharded
    model except rank 0. share: see `divide_samples`. advance: called after each denoising step. other_expert: a context
    with the expert that is not trained, if the model has two. One expert computes its steps for all samples before the
    next expert does, so that each is loaded once.

    Each file has a float32 tensor, `latent` (C, T, h, w) in model space, and JSON under the metadata key "latentpress".
    A sample has the same noise at every step of every run. Files appear whole. `latentpress decode` makes pictures of
    them.
    """
    samples = list_samples(config, data)
    if not samples:
        return 0
    prompts, task = data.validation, config.model.task
    own_sigmas = (find_index(config.model) or {}).get(SIGMAS)
    scheduler = load_scheduler(
        config.model.source,
        config.model.revision,
        config.validation.shift,
        config.model.family_spec.modular,
        config.model.flavour_spec.scheduler,
        own_sigmas,
    )
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    started = dict[int, Denoising]()
    for name, expert in config.experts.items() or ((None, None),):
        trained, lowest = name == config.train.experts, expert.lowest if expert else 0.0
        assert trained or other_expert is not None, "the other expert is needed, too"
        with nullcontext(model) if trained or other_expert is None else other_expert() as current:
            for number, (sample, counts) in enumerate(divide_samples(samples, share)):
                prompt = prompts[sample.prompt_index]
                denoising = started.pop(number, None)
                if denoising is None:
                    inputs = draw_inputs(config.model.family_spec, prompt, sample, device)
                    denoising = Denoising(current, family, task, *inputs, deepcopy(scheduler), sample.steps)
                scale = sample.guidance if sample.guidance_low is None or lowest else sample.guidance_low
                precision = torch.autocast(device.type, autocast, enabled=autocast is not None)
                attention = validation_attention(current, family, config.validation.attention)
                with precision, attention, sampling(current):
                    denoising.take_steps(current, scale, lowest, advance)
                if lowest:
                    started[number] = denoising
                elif folder is not None and counts:
                    metadata = describe_sample(config, data, prompt, sample)
                    temp = folder / f".{sample.name}.{os.getpid()}.tmp"
                    latent = denoising.finish()[0].float().cpu().contiguous()
                    write_tensors({"latent": latent}, temp, {"latentpress": json.dumps(metadata)})
                    temp.replace(folder / f"{sample.name}.safetensors")
            del current  # so that the device holds at most one expert
    return len(samples)


def draw_inputs(
    spec: Family, prompt: ValidationPrompt, sample: ValidationSample, device: torch.device
) -> tuple[Batch, Batch, torch.Tensor]:
    """Returns the batches of the prompt and of its negative prompt, and the noise (1, C, T, h, w)."""
    grid_THW = Bucket.parse(prompt.bucket).latent_shape(spec.spatial_stride, spec.temporal_stride)
    shape = (spec.latent_channels, *grid_THW)
    batches = []
    for text in (prompt.text, prompt.negative):
        tensors = {f"text.{name}": to_tensor(array)[None] for name, array in text.items()}
        tensors["latent"] = torch.zeros(1, *shape)
        if prompt.condition is not None:
            tensors["condition"] = to_tensor(prompt.condition)[None]
        for part, reference in zip(REFERENCE_PARTS, prompt.references, strict=False):
            tensors[part] = to_tensor(reference)[None]
        batch = make_batch([prompt.name], prompt.bucket, tensors, [text["embeds"].shape[0]])
        batches.append(draw_latents(batch.to(device, torch.float32), spec, [f"{sample.draw}/validation"]))
    batch, negative = batches
    return batch, negative, seeded_noise([sample.draw], "validation", shape, device)


def describe_sample(
    config: Config, data: TrainSet, prompt: ValidationPrompt, sample: ValidationSample
) -> dict[str, Any]:
    """Returns the metadata of a file of validation latents: everything that determines the latents except the
    weights."""
    stated, model, few = data.meta.validation[sample.prompt_index].values(), config.model, config.validation.adapter
    return {key: stated[key] for key in ("image",) if key in stated} | {
        "family": model.family,
        "flavour": model.flavour_spec.name,
        "task": model.task,
        "name": sample.name,
        "group": sample.group,
        "prompt_name": sample.prompt,
        "prompt": prompt.prompt,
        "negative_prompt": prompt.negative_prompt,
        "bucket": prompt.bucket,
        "set": data.id,
        "seed": sample.seed,
        "steps": sample.steps,
        "guidance": sample.guidance,
        **({} if sample.guidance_low is None else {"guidance_low": sample.guidance_low}),
        **({} if few is None else {"adapter": Path(few.path).name}),
    }


def load_scheduler(
    source: str,
    revision: str | None = None,
    shift: float | None = None,
    modular: ModularPipeline | None = None,
    changes: Mapping[str, Any] | None = None,
    sigmas: Sequence[float] | None = None,
) -> Any:
    """Returns the scheduler of a checkpoint's folder `scheduler`, or of a modular pipeline. shift: replaces the
    checkpoint's shift, also a shift that depends on the number of tokens. changes: other values of the scheduler's
    config (`Flavour.scheduler`). sigmas: the noise levels of a distilled checkpoint, which are added to the config.

    Raises ValueError for a class that diffusers lacks, or that has no shift.
    """
    any_class = diffusers.schedulers.FlowMatchEulerDiscreteScheduler  # all classes read the same file
    if modular is not None:
        config = {"_class_name": any_class.__name__, **modular.scheduler}
    else:
        config = any_class.load_config(source, subfolder="scheduler", revision=revision)
    name = config.get("_class_name", "")
    scheduler_class = getattr(diffusers.schedulers, name, None) if name.endswith("Scheduler") else None
    if scheduler_class is None:
        raise ValueError(
            f"{source}/scheduler names the class {name!r}, which the installed diffusers "
            f"{diffusers.__version__} does not have; install a newer version"
        )
    config = {**config, **(changes or {})}
    scheduler = scheduler_class.from_config(config)
    if shift is not None:
        key = next((key for key in SHIFT_KEYS if key in scheduler.config), None)
        if key is None:
            raise ValueError(f"{source}/scheduler is a {name}, which has no shift; remove validation.shift")
        fixed = {"use_dynamic_shifting": False} if scheduler.config.get("use_dynamic_shifting") else {}
        scheduler = scheduler_class.from_config(config, **{key: shift}, **fixed)
    if sigmas:
        scheduler.register_to_config(**{SIGMAS: [*sigmas]})  # from_config would warn that it is not used
    return scheduler


class Denoising:
    """Latents (B, C, T, h, w) in model space, on the model's device, during denoising; at the end equal to the
    pipelines' output with `output_type="latent"` for equal weights, embeddings and noise. Several models may take
    steps.

    model: transformer in eval mode. batch, negative: batches whose texts and conditions are used, but not their
    latents; `negative` is only used above the family's UNGUIDED_SCALE.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        family: ModelFamily,
        task: Task,
        batch: Batch,
        negative: Batch | None,
        noise_BCTHW: torch.Tensor,
        scheduler: Any,
        steps: int,
    ) -> None:
        device = batch.text_BLD.device
        plain = getattr(model, "module", model)
        self._family, self._task, self._batch, self._negative = family, task, batch, negative
        self._scheduler, self._dtype, self._steps_done = scheduler, family.sampling_dtype(plain), 0
        self._x = family.initial_latents(noise_BCTHW.to(device, self._dtype), batch, task)
        family.set_timesteps(scheduler, steps, family.token_grid(plain, batch).tokens, device)
        scheduler.set_begin_index(0)  # otherwise the scheduler searches the first timestep, and waits for the device

    @torch.no_grad()
    def take_steps(
        self,
        model: torch.nn.Module,
        guidance: float,
        lowest: float = 0.0,
        advance: Callable[[], object] = lambda: None,
    ) -> None:
        """Take the steps from noise levels of at least `lowest` that were not taken yet. advance: called after each."""
        family, task, dtype, clean = self._family, self._task, self._dtype, self._family.clean_frames(self._task)
        timesteps, x = self._scheduler.timesteps, self._x
        last = int((timesteps >= 1000 * lowest).sum()) if lowest else len(timesteps)  # waits for the device
        for t in timesteps[self._steps_done : last]:
            # In float64, so that 1000 sigma equals the scheduler's timestep exactly.
            sigma_B = ((t.double() if has_float64(x.device) else t) / 1000).expand(x.shape[0])
            # Guided and stepped in the dtype in which the family's pipeline keeps latents.
            velocity = family.predict(model, x, sigma_B, self._batch, task).to(dtype)
            if guidance > family.UNGUIDED_SCALE and self._negative is not None:
                unguided = family.predict(model, x, sigma_B, self._negative, task).to(dtype)
                velocity = family.guide(velocity, unguided, guidance)
            stepped = self._scheduler.step(velocity[:, :, clean:], t, x[:, :, clean:], return_dict=False)[0]
            x = torch.cat([x[:, :, :clean], stepped], 2)
            advance()
        self._x, self._steps_done = x, max(last, self._steps_done)

    def finish(self) -> torch.Tensor:
        return self._family.postprocess_latents(self._x, self._task)
