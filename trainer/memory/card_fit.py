"""Predicts whether a run fits the available card, and which options make it fit; with `train --dry-run --card GIB`,
whether encode-text, encode-latents and train fit a card, from the configuration alone.

With --card nothing is downloaded: shapes of a published repository are from the catalog, shapes of a folder from its
config files. The buckets and the longest text are from the plan; without a plan, from the limits of the datasets and
the family.

Models of the encoding stages are built on torch's meta device. The autoencoder encodes a batch there, and its tensors
are counted. For the text encoder, the weights are counted and the activations of only one block are computed, because
they are small compared with the weights. Not counted: memory inside kernels (convolutions may take some hundred MB).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from pydantic import ValidationError

from cache.models.compatibility import bucket_side_multiple, find_published
from cache.models.places import is_local, read_part_config
from cache.models.weights import WeightsError, local_folder
from cache.sets import plans
from cache.sets.text_lengths import max_token_counts, reference_tokens
from cache.store.store import Store
from schemas.activities import activity
from schemas.checkpoint import Place
from schemas.cli.report import Report
from schemas.config.datasets import Dataset
from schemas.config.encoding import Latents, Model, Text
from schemas.config.pipeline import Config
from schemas.config.section import Section, listed
from schemas.config.training import Train
from schemas.devices import COMFORTABLE, RESERVED, DeviceNotFound, device_memory, device_name, find_device, judge_fit
from schemas.family import SOURCE_ROLES, Condition
from schemas.geometry import Bucket, largest_valid_frames, resolution_buckets
from schemas.recipe import plan_key
from trainer.families.base import on_meta
from trainer.memory.estimate import MemoryEstimate, estimate_memory, sum_bytes
from trainer.memory.meter import META, KernelMode, MemoryMeter
from trainer.setup.load import explain_checkpoint_errors
from trainer.setup.quantize import QUANTIZERS, packed_bytes

Shapes = dict[str, dict[str, Any]]
CAPTION_TOKENS = 512  # limit of a caption after references, whose template has no limit
MIN_SAVED = 0.01  # smallest share of the needed memory that an option saves to be suggested
BARELY = (
    "It fits if no other program, such as a desktop or a browser, uses the card, and the prediction is not too low."
)
OTHERWISE = "A smaller train.base_precision, train.adapter.rank, smaller buckets or fewer frames take less."


@dataclass(frozen=True)
class EncoderMemory:
    """Memory of an encoder on the device, in bytes."""

    weights: int
    activations: int

    @property
    def device(self) -> int:
        return self.weights + self.activations


def check_card(config: Config, card: float, ranks: int) -> Report:
    """Returns a report with a prediction in GiB for each program, and whether it fits `card` GiB: yes, barely or no. A
    program that does not fit is listed as failed; for it, and for a program that barely fits, the report lists the
    options that help."""
    size, report = int(card * 2**30), Report("train", dry_run=True)
    shapes, assumed = read_shapes(config.model)
    plan = find_plan(config)
    buckets, source = list_buckets(config.model, config.datasets, plan)
    largest = max(buckets, key=lambda bucket: Bucket.parse(bucket).pixels)
    settings = config.train.changed(device="cuda")  # as if the card were available
    config = config.changed(train=settings)
    length = longest_text(config, plan)

    def train(changed: Config) -> MemoryEstimate:
        return estimate_memory(changed, shapes["transformer"], buckets, length, ranks)

    def text(changed: Config) -> EncoderMemory:
        return estimate_text(changed.model, changed.text, shapes, length)

    def latents(changed: Config) -> EncoderMemory:
        return estimate_latents(changed.model, changed.latents, shapes, largest)

    rows, barely = list[dict[str, Any]](), list[str]()
    cpu_advice = "It runs on the CPU with stages.{}.device: cpu, or on another machine."
    for program, subject, predict, changes, otherwise in (
        ("encode-text", "encode-text", text, text_changes(config.text), cpu_advice),
        ("encode-latents", "encode-latents", latents, latent_changes(config.model, config.latents), cpu_advice),
        ("train", "the run", train, train_changes(config.train, ranks), OTHERWISE),
    ):
        with activity(f"predicting {program}"):
            estimate: MemoryEstimate | EncoderMemory = predict(config)
        need = estimate.device + RESERVED
        sizes = {"weights_gib": estimate.weights, "activations_gib": estimate.activations, "all_gib": need}
        row = {name: round(size / 2**30, 1) for name, size in sizes.items()}
        rows.append({"program": program, **row, "fits": judge_fit(need, size)})
        if rows[-1]["fits"] != "yes":
            described = (f"a card of {card:g} GiB", size)
            message = explain(config, subject, described, estimate.device, changes, predict, otherwise.format(program))
            if need > size:
                report.failed.append({"item": program, "reason": "does-not-fit", "message": message})
            else:
                barely.append(message)
    report.details = {"card_gib": card, "buckets_of": source, "largest_bucket": largest, "longest_text": length}
    report.details["memory"] = rows
    report.details |= {"barely_fits": barely} if barely else {}
    report.details |= {"experts": "one at a time"} if config.experts else {}
    report.details |= {"assumed": assumed} if assumed else {}
    return report


def read_shapes(model: Model) -> tuple[Shapes, list[str]]:
    """Returns component -> config, and messages about components that are assumed to have the published shape."""
    spec = model.family_spec
    shapes, assumed = Shapes(), list[str]()
    for part in spec.shapes:
        place = model.place(part)
        folder = local_folder(place.source) if isinstance(place, Place) else None
        if folder is not None and (folder / part / "config.json").exists():
            shapes[part] = read_part_config(model, part)
            continue
        shapes[part] = spec.published_shape(part, model.flavour_spec)
        if isinstance(place, Place) and (folder is not None or not find_published(place.source)):
            assumed.append(
                f"{place.source} has no {part} on this machine: the shape of {model.flavour_spec.repo} is assumed."
            )
    return shapes, assumed


def predict_step(
    config: Config, shape: Mapping[str, Any], buckets: Sequence[str], ranks: int, warn: Callable[[str], object]
) -> dict[str, Any]:
    """Returns details for a report: the memory of a step with the largest bucket and the longest text, by part. Warns
    if the card of train.device has less memory. shape: the transformer's config.json."""
    length = longest_text(config, find_plan(config) if config.train.set == "current" else None)

    def predict(config: Config) -> MemoryEstimate:
        return estimate_memory(config, shape, buckets, length, ranks)

    with explain_checkpoint_errors(config.model.source):
        estimate = predict(config)
    card = find_card(config.train.device)
    if card and judge_fit(estimate.device + RESERVED, card[1]) != "yes":
        changes = train_changes(config.train, ranks)
        warn(explain(config, "the run", card, estimate.device, changes, predict, OTHERWISE))
    places = {"host": "host, at its peak", "offloaded": "host, while training", "checkpoint": "disk, one checkpoint"}
    sizes = {name: value for name, value in vars(estimate).items() if isinstance(value, int)}
    rows = [{"part": name, "place": places.get(name, "device"), "mib": value >> 20} for name, value in sizes.items()]
    return {"memory_of_bucket": estimate.bucket, "memory": rows}


def find_card(device: str) -> tuple[str, int] | None:
    """Name and bytes of the card that a run on `device` would use; None without one."""
    try:
        torch_device = find_device(device)
    except DeviceNotFound:
        return None
    return None if torch_device.type == "cpu" else (device_name(torch_device), device_memory(torch_device)[1])


def explain(
    config: Config,
    subject: str,
    card: tuple[str, int],
    need: int,
    changes: Iterable[tuple[str, dict[str, Any]]],
    predict: Callable[[Config], Any],
    otherwise: str,
) -> str:
    """Returns a message with the needed memory, the `changes` that help, and `otherwise` if the changes are not enough.
    Changes are applied one after another; a change that does not save memory is skipped, and the list ends when the
    program fits. For a program that barely fits, it ends when the program fits comfortably. changes: (label, section of
    the configuration -> keys). need: bytes without changes."""
    (name, size), least, shown = card, need, list[str]()
    fits = judge_fit(need + RESERVED, size)
    enough = size if fits == "no" else COMFORTABLE * size
    for label, sections in changes:
        changed = change_config(config, sections)
        if changed is None or (smaller := predict(changed).device) > least * (1 - MIN_SAVED):
            continue
        least, config = smaller, changed
        shown.append(f"{label} ({gib(least + RESERVED)})")
        if least + RESERVED <= enough:
            break
    message = f"{subject} would need {gib(need + RESERVED)} on the device, 1 GiB of it for CUDA and its kernels, "
    message += f"and {name} has {gib(size)}."
    message += f" {BARELY}" if fits == "barely" else ""
    message += f" It would need less with {', and with '.join(shown)}." if shown else ""
    return message + (f" {otherwise}" if least + RESERVED > enough else "")


def change_config(config: Config, sections: Mapping[str, Any]) -> Config | None:
    """Returns the configuration with changed settings (section -> keys -> values); None if it has them already or if
    they are not valid, such as block offload of full rank."""
    try:
        values = {section: _change_settings(getattr(config, section), keys) for section, keys in sections.items()}
        changed = config.changed(**values)
    except ValidationError:
        return None
    return None if changed == config else changed


def _change_settings(settings: Section, values: Mapping[str, Any]) -> Section:
    """Returns `settings` updated with `values`, in which a nested section contains only the keys that change. Raises
    ValidationError for an invalid combination."""
    merged = settings.model_dump(by_alias=True)
    for key, value in values.items():
        merged[key] = {**merged[key], **value} if isinstance(value, dict) else value
    return type(settings).model_validate(merged)


def train_changes(settings: Train, ranks: int) -> list[tuple[str, dict[str, Any]]]:
    """Options that save memory and do not change the training result, with values, in the order in which they are
    tried."""
    every_block = {"gradient_checkpointing": True, "gradient_checkpointing_interval": 1}
    changes: list[tuple[str, dict[str, Any]]] = [("gradient_checkpointing true of every block", every_block)]
    if settings.ema:
        changes.append(("ema.device cpu", {"ema": {"device": "cpu"}}))
    if settings.offload.blocks:
        changes.append(("offload.streams false", {"offload": {"streams": False}}))
        changes.append(("offload.blocks_per_group 1", {"offload": {"blocks_per_group": 1}}))
    changes.append(("offload.activations true", {"offload": {"activations": True}}))
    if ranks == 1:
        changes.append(("offload.blocks true", {**every_block, "offload": {"blocks": True}}))
    else:
        changes.append(("parallel.strategy fsdp2", {"parallel": {"strategy": "fsdp2"}}))
        changes.append(("parallel.reshard_after_forward true", {"parallel": {"reshard_after_forward": True}}))
        changes.append(("parallel.cpu_offload true", {"parallel": {"cpu_offload": True}}))
    return [(f"train.{label}", {"train": values}) for label, values in changes]


def gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def find_plan(config: Config) -> plans.Plan | None:
    if "://" not in config.root and not Path(config.root).is_dir():
        return None
    return plans.newest_plan(Store(config.root), plan_key(config, _side_multiple(config.model)))


def list_buckets(model: Model, datasets: Sequence[Dataset], plan: plans.Plan | None) -> tuple[list[str], str]:
    """Returns the buckets and the name of their source: the plan, or the sizes and frames of the datasets."""
    if plan is not None:
        is_source = pc.is_in(plan.active.column("role"), value_set=pa.array(SOURCE_ROLES))  # sources are not trained on
        if buckets := pc.unique(plan.active.filter(pc.invert(is_source)).column("bucket")).to_pylist():
            return buckets, "the plan"
    return sorted(set(_possible_buckets(model, datasets))), "the datasets' sizes, because no plan exists yet"


def longest_text(config: Config, plan: plans.Plan | None) -> int:
    """Upper bound of the stored tokens of the longest text; for a text in the plan, one token per byte."""
    max_length = config.text.max_length or config.model.template.max_length
    if plan is not None:
        active = plan.text_table.filter(pc.is_in(plan.text_table.column("text_id"), value_set=plan.active_text_ids))
        return int(max_token_counts(config.model, config.text, active).max(initial=1))
    if reference_length := reference_tokens(config.model):
        counts = [len(dataset.source_roles) for dataset in config.datasets if not dataset.disabled]
        counts += [len(listed(prompt.image)) for prompt in config.validation.prompts]
        return min(max_length, max(counts, default=1) * reference_length + CAPTION_TOKENS)
    return max_length


def _side_multiple(model: Model) -> int:
    spec = model.family_spec
    sparse = spec.sparse is not None and model.flavour_spec.sparse
    published = spec.sparse.side_multiple if spec.sparse and sparse else spec.side_multiple
    try:
        return bucket_side_multiple(model) if is_local(model, spec.components[0]) else published
    except WeightsError:
        return published


def _possible_buckets(model: Model, datasets: Sequence[Dataset]) -> Iterator[str]:
    spec, multiple = model.family_spec, _side_multiple(model)
    for dataset in datasets:
        if dataset.disabled:
            continue
        frames = largest_valid_frames(dataset.video.num_frames, spec.temporal_stride)
        frames = frames if dataset.dataset_type == "video" else 1
        if dataset.buckets == "family":
            sizes = [size for size in model.flavour_spec.sizes if not any(side % multiple for side in size)]
        else:
            make = partial(resolution_buckets, step=dataset.bucket_step, max_aspect=dataset.max_aspect)
            edges = dataset.resolutions(spec.resolution)
            sizes = [size for edge in edges for size in make(edge, dataset.resolution_type, multiple)]
        yield from (
            str(Bucket(width, height, frames, _references(model.condition, dataset))) for width, height in sizes
        )


def _references(condition: Condition | None, dataset: Dataset) -> tuple[tuple[int, int], ...]:
    """Sizes of an item's references, as many as the dataset's items may have: squares of the largest area."""
    if condition is None or condition.size is None:
        return ()
    count = len(dataset.source_roles)
    size = condition.size_of(count == 1)
    side = math.isqrt(size.area) // size.multiple * size.multiple
    return ((side, side),) * count


#: Number of tensors per text token that are alive in a block at once: tensors with the width of the hidden states
#: (input, residual, norm, query, keys and values, attention's output), and with the inner width of the feed-forward.
HIDDEN_TENSORS, INNER_TENSORS = 8, 3
#: Share of an autoencoder's activations that remains with `latents.chunk_frames`: two of four.
CHUNKED_SHARE = 0.5

CACHED_IMAGES = 64  # number of last images whose features encode-text keeps


def estimate_text(base: Model, text: Text, shapes: Shapes, length: int) -> EncoderMemory:
    """Predict encode-text: the language model, additional text models, and a pass with texts of which the longest has
    `length` tokens that are stored; before it a pass of the vision model if prompts have images. base: the model that
    is trained."""
    template = base.template
    dtype = torch.bfloat16 if text.quantization == "bf16" else getattr(torch, text.precision or base.precision)
    types = base.family_spec.model_classes
    model = _untrained(types["text_encoder"], shapes["text_encoder"], dtype)
    if not template.with_image and hasattr(model, "visual"):
        del model.visual
    if hasattr(model, "decoder"):  # transformers' T5 model has a decoder, which pipelines do not use
        del model.decoder
    layers = model.encoder.block if hasattr(model, "encoder") else getattr(model, "language_model", model).layers
    extra_models = [
        _untrained(types[part], shape, dtype)
        for part, shape in shapes.items()
        if part.startswith("text_encoder") and part != "text_encoder"
    ]
    weights = _text_weights(model, layers, text) + sum(sum_bytes(extra.parameters()) for extra in extra_models)
    settings = getattr(model.config, "text_config", model.config)
    longest = (template.crop or 0) + length
    tokens = max(text.batch_tokens, longest)
    inner = settings.d_ff if hasattr(settings, "d_ff") else settings.intermediate_size
    eager = (text.attention or base.family_spec.text_attention) == "eager"
    heads = settings.num_attention_heads if eager else 0  # their scores are stored, in float32
    activations = _pass_bytes(tokens, settings.hidden_size, inner, dtype) + tokens * longest * _scores(heads, dtype)
    if not template.with_image:
        return EncoderMemory(weights, activations)
    vision, image_tokens = model.config.vision_config, reference_tokens(base) or length
    patches, heads = image_tokens * vision.spatial_merge_size**2, vision.num_heads if eager else 0
    vision_bytes = _pass_bytes(patches, vision.hidden_size, vision.intermediate_size, dtype)
    vision_bytes += patches**2 * _scores(heads, dtype)
    numbers = patches * vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    vision_bytes += numbers * (torch.float32.itemsize + dtype.itemsize)  # for the image, whose values start in float32
    cache_bytes = CACHED_IMAGES * image_tokens * vision.out_hidden_size * dtype.itemsize
    return EncoderMemory(weights, max(activations, vision_bytes) + cache_bytes)


def _pass_bytes(tokens: int, width: int, inner: int, dtype: torch.dtype) -> int:
    """Bytes of the activations of a block with these widths, which are small compared with the weights."""
    return tokens * (HIDDEN_TENSORS * width + INNER_TENSORS * inner) * dtype.itemsize


def _scores(heads: int, dtype: torch.dtype) -> int:
    """Bytes of the attention scores of a query and a key."""
    return heads * (2 * dtype.itemsize + 4)


def _untrained(kind: str, shape: Mapping[str, Any], dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModel

    settings = {key: value for key, value in shape.items() if key not in ("model_type", "architectures")}
    with on_meta():
        return AutoModel.from_config(AutoConfig.for_model(kind, **settings)).to(dtype)


def _text_weights(model: Any, layers: Sequence[torch.nn.Module], text: Text) -> int:
    total = sum_bytes(model.parameters())
    if text.quantization in QUANTIZERS:
        float32_names = (model._keep_in_fp32_modules or ()) if text.quantization == "nf4-bnb" else ()
        linear = [
            part
            for layer in layers
            for name, part in layer.named_modules()
            if isinstance(part, torch.nn.Linear) and name.rpartition(".")[2] not in float32_names
        ]
        return total + sum(packed_bytes(part, text.quantization) - part.weight.nbytes for part in linear)
    if text.offload == "blocks":  # each module in turn: the largest is a block or the embedding
        blocks = [sum_bytes(layer.parameters()) for layer in layers]
        return max(*blocks, *_sizes_outside(model, layers))
    return total


def _sizes_outside(model: Any, layers: Sequence[torch.nn.Module]) -> Iterable[int]:
    block_parts = {id(part) for layer in layers for part in layer.modules()}
    parts = (part for part in model.modules() if id(part) not in block_parts)
    return (sum_bytes(part.parameters(recurse=False)) for part in parts)


def estimate_latents(model: Model, latents: Latents, shapes: Shapes, bucket: str) -> EncoderMemory:
    """Predict encode-latents: the autoencoder, and a batch of the bucket."""
    import diffusers

    family, size = model.family_spec, Bucket.parse(bucket)
    dtype = getattr(torch, latents.precision or model.precision)
    with on_meta():
        vae = getattr(diffusers, family.model_classes["vae"]).from_config(dict(shapes["vae"])).eval()
        torch.nn.Module.to(vae, dtype)  # the class's own `to` warns of a conversion
    pixels = size.width * size.height * size.frames
    count = max(1, latents.batch_pixels // pixels)
    side = family.tile[0] if latents.tiling else max(size.width, size.height)
    height, width = min(size.height, side), min(size.width, side)
    passes = 1 if latents.slicing else count
    frames = (size.frames,) if family.video or "z_dim" in vae.config else ()  # an image family may have a video VAE
    weights, meter = sum_bytes(vae.parameters()), MemoryMeter()
    with META, torch.no_grad(), ExitStack() as stack:
        stack.enter_context(meter)
        stack.enter_context(KernelMode(None))
        vae.encode(torch.empty(passes, 3, *frames, height, width, dtype=dtype))
    activations = meter.peak * (CHUNKED_SHARE if latents.chunk_frames and family.frame_chunks else 1.0)
    return EncoderMemory(weights, int(activations) + count * 3 * pixels * dtype.itemsize)


def text_changes(text: Text) -> list[tuple[str, dict[str, Any]]]:
    """Options with which encode-text needs less memory, in the order in which they are tried. The first options do not
    change the result."""
    return [
        ("text.batch_tokens 1024", {"text": {"batch_tokens": min(1024, text.batch_tokens)}}),
        ("text.offload blocks", {"text": {"offload": "blocks"}}),
        ("text.quantization int8-quanto", {"text": {"offload": "none", "quantization": "int8-quanto"}}),
        ("text.quantization nf4-bnb", {"text": {"offload": "none", "quantization": "nf4-bnb"}}),
    ]


def latent_changes(model: Model, latents: Latents) -> list[tuple[str, dict[str, Any]]]:
    """Options with which encode-latents needs less memory. Tiling changes the latents and comes last."""
    changes: list[tuple[str, dict[str, Any]]] = [("latents.slicing true", {"latents": {"slicing": True}})]
    if model.family_spec.frame_chunks and not latents.chunk_frames:
        changes.append(("latents.chunk_frames 4", {"latents": {"chunk_frames": 4}}))
    return [*changes, ("latents.tiling true", {"latents": {"tiling": True}})]
