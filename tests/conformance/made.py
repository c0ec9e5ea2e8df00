"""What the checks of a row share: a project from its files to a trained adapter, and the diffusers pipeline."""

import contextlib
import importlib
import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL import Image
from safetensors.torch import load_file

from cache.sets.set_lookup import open_configured_set
from cache.sets.trainset import TrainSet
from examples.load_adapter import load_trained
from examples.tiny_sets import write_set
from schemas.catalog import get_flavour
from schemas.config.methods import method_option
from schemas.config.pipeline import Config
from schemas.geometry import Bucket
from stages import bucket, discover, encode_latents, encode_text, index
from tests.conformance.flavours import ROWS, Row
from tests.project import make_project
from tests.qwen_processor import Processor, Processor3
from tests.trainer.conftest import mixed_items
from tests.trainer.methods.test_crepa import with_features
from trainer.__main__ import run as train
from trainer.batch import Batch
from trainer.families.base import module_of
from trainer.validation import Denoising, draw_inputs, list_samples, load_scheduler

CPU = torch.device("cpu")
STAGES = (discover.run, bucket.run, encode_text.run, encode_latents.run, index.run)
SOURCES = {"first": (97, 65), "second": (65, 211)}  # sizes of references
STEPS, TRAINED = 4, 2  # of denoising, of training


class Made:
    """A project of two samples of one bucket and a validation prompt. What is costly is made when it is first used."""

    def __init__(self, name: str, folder: Path, checkpoint: Path) -> None:
        torch.set_num_threads(1)
        diffusers.utils.logging.set_verbosity_error()  # pipelines print what they truncate, thousands of words
        self.name, self.row, self.checkpoint = name, ROWS[name], checkpoint
        row, spec = self.row, self.row.spec
        self.size = f"96x64@{row.frames}" if spec.video else "96x64"
        condition = spec.conditions.get(row.task)
        kind = condition.kind if condition else None
        prompt: dict[str, Any] = {"name": "one", "prompt": "A grey cat", "negative_prompt": "blurred, 3 legs"}
        names = ["second", "first"][: condition.most if condition and kind == "references" else 1]
        if kind:
            self.images = [folder / f"pictures/{name}.png" for name in names]
            prompt["image"] = [str(path) for path in self.images] if len(names) > 1 else str(self.images[0])
        if spec.negative_prompt is None:
            del prompt["negative_prompt"]
        home = self.home = make_project(
            folder,
            name,
            checkpoint,
            cache={"unit_mib": 1.0},
            latents={"posterior": "mode"} if spec.posterior else {},
            text={"max_length": row.longest} if row.longest else {},
            validation={
                "size": self.size, "steps": STEPS, "every": TRAINED, "eval_samples": 0, "prompts": [prompt],
                **({"guidance": 4.0} if spec.guidance <= self.family.UNGUIDED_SCALE else {}),
            },
            train={
                "steps": TRAINED, "batch_size": 2, "device": "cpu", "threads": 1, "checkpoint_every": 1,
                "optimizer": {"lr": 5e-3, "warmup": 0},
                "adapter": {"rank": 4, "alpha": 6.0, "dropout": 0.2},
                **({"experts": "both"} if len(spec.components) > 1 else {}),
                **({"guidance": {"scale": 2.0}} if get_flavour(row.family, row.flavour).has_guidance else {}),
            },
        )  # fmt: skip
        dataset = home.settings["datasets"][0]
        for seed, (source, size) in enumerate(SOURCES.items()):
            home.image(f"../pictures/{source}.png", size if kind == "references" else (96, 64), seed=10 + seed)
        for seed, caption in enumerate(("A cat.", "A second picture, of which there is more to say: it is longer.")):
            if spec.video:
                dataset["video"]["num_frames"] = row.frames
                home.video(f"{seed}.mp4", row.frames + 3, (96, 64), caption=caption)
            else:
                home.image(f"{seed}.png", (96, 64), caption, seed)
            for number, source in enumerate(names if kind in ("source", "references") else ()):
                target = home.folder / f"given{number}" / f"{seed}.png"
                target.parent.mkdir(exist_ok=True)
                target.write_bytes((home.folder / f"pictures/{source}.png").read_bytes())
        if kind in ("source", "references"):
            folders = [f"given{number}" for number in range(len(names))]
            dataset["conditioning_data"] = folders if len(folders) > 1 else folders[0]

    @cached_property
    def config(self) -> Config:
        """Of the project, whose stages have run."""
        for program in STAGES:
            report = self.home.run(program)
            assert report.exit_code == 0 and not report.rejects, (program, self.home.said)
        return self.home.config()

    @cached_property
    def data(self) -> TrainSet:
        return open_configured_set(self.config, lambda _: None)

    @cached_property
    def trained(self) -> list[Config]:
        """The finished runs: one, or one of each expert."""
        return self.train()

    def train(self, *overrides: str) -> list[Config]:
        assert self.config
        for run in self.home.config(*overrides).expert_runs:
            expert = (f"train.experts={run.train.experts}",) if run.train.experts else ()
            assert self.home.run(train, *overrides, *expert).exit_code == 0, self.home.said
        return self.home.config(*overrides).expert_runs

    def sampled(self, name: str, methods: dict[str, Any], *overrides: str) -> Config:
        """Of one run, the last expert's if there are two, on a set of random samples that have what methods need."""
        expert = ("train.experts=low",) if len(self.row.spec.components) > 1 else ()
        name += "-regularized" * ("regularization" in methods)
        chosen = (f"{method_option(method)}={json.dumps(options)}" for method, options in methods.items())
        own = (f"root={name}", f"output={name}", "train.guidance=null", *chosen, *expert)
        config = self.home.config(*own, *overrides)
        if not (Path(config.root) / "sets").exists():
            samples = SimpleNamespace(mixed_items=mixed_items)
            write_set(Path(config.root), config, *with_features(samples, config, masks=True))
        return config

    @cached_property
    def family(self) -> Any:
        return module_of(self.row.spec)

    def load(self, part: str = "transformer", dtype: torch.dtype = torch.float32) -> Any:
        return self.family.load(str(self.checkpoint), dtype=dtype, part=part).eval()

    def scheduler(self, shift: float | None = None) -> Any:
        return load_scheduler(str(self.checkpoint), shift=shift, modular=self.row.spec.modular)

    # --- the pipeline ---

    def load_pipeline(self, **options: Any) -> Any:
        return load_pipeline(self.row, self.checkpoint, **options)

    @cached_property
    def pipe(self) -> Any:
        """With the weights of the checkpoint."""
        return self.load_pipeline()

    @cached_property
    def trained_pipe(self) -> Any:
        """With what training has saved, loaded by the pipeline's own loader."""
        pipe = self.load_pipeline(texts=False)
        names = {*self.row.spec.text_components, *(["tokenizer"] if self.row.spec.modular else [])}
        pipe.register_modules(**{name: getattr(self.pipe, name) for name in names})
        for run in self.trained:
            load_trained(pipe, run)
        return pipe

    def inputs(self) -> tuple[Batch, Batch, torch.Tensor]:
        """The validation prompt as the set has it: its batch, its negative batch, and the noise of its sample."""
        [sample] = list_samples(self.config, self.data)
        return draw_inputs(self.row.spec, self.data.validation[0], sample, CPU)

    def shown(self, step: int) -> torch.Tensor:
        """The sample of the validation prompt after that many steps of training, the last run's if there are two."""
        folder = self.trained[-1 if step else 0].run_folder / "validation" / f"step-{step:06d}"
        return load_file(folder / "one.safetensors")["latent"][None]

    @torch.no_grad()
    def generate(self, pipe: Any, guided: bool = True, steps: int = STEPS) -> "Steps":
        """What the pipeline makes of the validation prompt from its noise, by its whole call. guided: with the
        family's guidance scale, else with the largest one at which it does not guide."""
        spec, size = self.row.spec, Bucket.parse(self.size)
        prompt = self.data.meta.validation[0]
        options: dict[str, Any] = {"prompt": prompt.prompt, "height": size.height, "width": size.width}
        if spec.negative_prompt is not None:
            options["negative_prompt"] = prompt.negative_prompt
        if spec.video:
            options["num_frames"] = size.frames
        if spec.own_sizes == "resolutions":
            pipe.resolutions = [(size.width, size.height)]
        elif spec.own_sizes:
            options[spec.own_sizes] = False
        if hasattr(self, "images"):
            images = [Image.open(path).convert("RGB") for path in self.images]
            options["image"] = images if len(images) > 1 else images[0]
        [sample] = list_samples(self.config, self.data)
        scales = {spec.guidance_argument: sample.guidance}
        if sample.guidance_low is not None:
            scales["guidance_scale_2"] = sample.guidance_low
        options |= scales if guided else dict.fromkeys(scales, self.family.UNGUIDED_SCALE)
        seen = Steps()
        with drawn(pipe, self.inputs()[2]), seen.of(pipe.scheduler):
            made = pipe(**options, num_inference_steps=steps, output_type="latent", return_dict=False)[0]
        last = seen.results[-1]
        seen.final = made if made.ndim == last.ndim else last  # some pipelines return the autoencoder's own latents
        return seen

    def denoise(self, scheduler: Any, steps: int, guided: bool = False, dtype: torch.dtype = torch.float32) -> "Steps":
        """The same by the trainer. dtype: of the transformers."""
        batch, negative, noise = self.inputs()
        [sample] = list_samples(self.config, self.data)
        experts = [(expert.part, expert.lowest) for expert in self.config.experts.values()] or [("transformer", 0.0)]
        models, seen = {part: self.load(part, dtype) for part, _ in experts}, Steps()
        with seen.of(scheduler):
            first = models[experts[0][0]]
            denoising = Denoising(first, self.family, self.row.task, batch, negative, noise, scheduler, steps)
            for part, lowest in experts:
                scale = sample.guidance if sample.guidance_low is None or lowest else sample.guidance_low
                denoising.take_steps(models[part], scale if guided else self.family.UNGUIDED_SCALE, lowest)
        seen.final = denoising.finish()
        return seen

    def apart(self, ours_BCTHW: torch.Tensor, theirs: torch.Tensor) -> float:
        """The largest difference of latents, or velocities, from the pipeline's, which may have given frames, too."""
        ours = self.row.layout(ours_BCTHW)
        assert ours.ndim == theirs.ndim and theirs.isfinite().all() and theirs.std() > 0.1
        return (ours - theirs[tuple(slice(-side, None) for side in ours.shape)]).abs().max().item()


def load_pipeline(row: Row, folder: Path, texts: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    """As from_pretrained makes it, of the row's task. Parts that need torchvision are replaced. texts: whether with the
    text encoders."""
    spec, parts = row.spec, {}
    if spec.modular:
        from tests.conformance.modular import Flux3Pipeline

        return Flux3Pipeline.of(folder, texts, dtype)
    if not texts:
        parts = dict.fromkeys(spec.text_components)
    if "tokenizer" not in spec.text_components:  # the pipeline asks its processor for the length of its instruction
        parts["processor"] = Processor3(folder / "processor")
    elif texts and "torchvision" in spec.pipeline_packages:
        name = "processor" if "processor" in spec.text_components else "tokenizer"
        parts[name] = Processor(folder / "tokenizer", folder / name)
    cls = getattr(diffusers, spec.pipelines[row.task])
    pipe = cls.from_pretrained(folder, use_safetensors=True, dtype=dtype, **parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


class Steps:
    """What a scheduler was given and gave."""

    def __init__(self) -> None:
        self.velocities: list[torch.Tensor] = []
        self.results: list[torch.Tensor] = []
        self.final = torch.empty(0)

    @contextlib.contextmanager
    def of(self, scheduler: Any) -> Iterator[None]:
        step = scheduler.step

        def noted(velocity: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            result = step(velocity, *arguments, **options)
            self.velocities.append(velocity)
            self.results.append(result[0])
            return result

        scheduler.step = noted
        try:
            yield
        finally:
            del scheduler.step


@contextlib.contextmanager
def drawn(pipe: Any, noise_BCTHW: torch.Tensor) -> Iterator[None]:
    """The pipeline draws this noise, in whichever order of axes it asks for, and of each posterior the mode."""
    forms = [noise_BCTHW[:, :, 0], noise_BCTHW, noise_BCTHW.transpose(1, 2), noise_BCTHW.movedim(1, -1)]
    module = importlib.import_module(type(pipe).__module__)
    draw, sample = module.randn_tensor, DiagonalGaussianDistribution.sample

    def noise(shape: Any, dtype: torch.dtype, **_: Any) -> torch.Tensor:
        return next(form for form in forms if form.shape == tuple(shape)).to(dtype, copy=True)

    module.randn_tensor, DiagonalGaussianDistribution.sample = noise, lambda self, generator=None: self.mode()
    try:
        yield
    finally:
        module.randn_tensor, DiagonalGaussianDistribution.sample = draw, sample


def picture(seed: int, width: int, height: int) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height))
