"""Checks by its small files that a checkpoint fits the configured family, flavour and task, and that its parts fit each
other, before any of them is loaded. Imports no torch."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from cache.models import weights
from cache.models.places import is_local, read_part_config
from cache.models.weights import SingleModel
from cache.store.json_checks import printable
from cache.store.store import Store
from schemas.catalog import FAMILIES
from schemas.checkpoint import Place, WeightFile
from schemas.config.encoding import PART_OPTIONS, Model
from schemas.config.pipeline import Config
from schemas.errors import USAGE
from schemas.family import TEXT_PARTS, Family, Flavour

PREVIEW_KEY = "validation.preview_autoencoder"
PREVIEW_ADVICE = (
    f"set {PREVIEW_KEY} to the folder or repository of a tiny autoencoder in diffusers' form, such as "
    "madebyollin/taef1, or remove it"
)
MODEL_HINT = "correct model.path, or model.family and model.flavour"
SCHEDULER_CONFIG = "scheduler_config.json"
#: Keys of a text encoder's config for its width and for its number of layers: in most models, in T5.
WIDTH_KEYS, LAYER_KEYS = ("hidden_size", "d_model"), ("num_hidden_layers", "num_layers")


class CheckpointMismatch(weights.WeightsError):
    """The checkpoint's family or task differs from the configured one."""

    exit_code = USAGE


def find_json(model: Model, part: str, file: str = "config.json", ask_hub: bool = False) -> dict[str, Any] | None:
    """A small file of a checkpoint; None if it does not exist. ask_hub: fetch a file of a repository; otherwise only a
    file that was fetched before is read, because a hub that can't be reached delays the program."""
    place = model.place(part)
    if isinstance(place, WeightFile):
        return read_part_config(model, part) if file == "config.json" else None
    if (folder := weights.local_folder(place.source)) is not None:
        path = folder / part / file
        return weights.read_object(path) if path.is_file() else None
    read = weights.read_hub_object if ask_hub else weights.read_cached_object
    with suppress(weights.WeightsError):
        return read(*place, f"{part}/{file}".lstrip("/"))
    return None


def find_index(model: Model, ask_hub: bool = False) -> dict[str, Any] | None:
    """The index of a checkpoint's pipeline; None if it does not exist. ask_hub: see `find_json`."""
    found = (find_json(model, "", name, ask_hub) for name in weights.INDEXES)
    return next((index for index in found if index is not None), None)


def check_task(model: Model) -> None:
    """Raise CheckpointMismatch if a local directory or a known repository is of another pipeline in the catalog.
    Unknown pipelines pass: `check_parts` checks their components."""
    folder = weights.local_folder(model.source)
    if folder is None:
        pipelines = {family.pipelines.get(flavour.task) for family, flavour in find_published(model.source)}
        _check_pipeline(model, {name for name in pipelines if name})
    elif path := weights.find_index(folder):
        check_index(model, weights.read_object(path))


def _check_pipeline(model: Model, pipelines: set[str]) -> None:
    """Raise CheckpointMismatch if these classes are pipelines of the catalog, and none is the configured one."""
    pipeline, family = model.family_spec.pipelines.get(model.task), model.family_spec
    fitting = {*family.pipelines.values()} if family.one_checkpoint else {pipeline}
    made_for = [
        f"{family.name} {task}"
        for family in FAMILIES.values()
        for task, name in family.pipelines.items()
        if name in pipelines
    ]
    if not fitting & pipelines and made_for:
        raise CheckpointMismatch(
            f"{model.source} is a checkpoint for {', '.join(made_for)} ({', '.join(sorted(pipelines))}), and the "
            f"configuration is for {model.family} {model.task}" + (f" ({pipeline})" if pipeline else ""),
            MODEL_HINT,
        )


def check_index(model: Model, index: Mapping[str, Any]) -> None:
    """Raise CheckpointMismatch if model_index.json is of another pipeline, has a transformer that the family does not
    have, or has settings with which the pipeline would compute different images."""
    _check_pipeline(model, {str(index.get("_class_name"))})
    components = model.family_spec.components
    surplus = [name for name in weights.list_parts(index) if name.startswith("transformer") and name not in components]
    if surplus:
        raise CheckpointMismatch(
            f"{model.source} has {printable(' and '.join(surplus))}, but {model.family} has only "
            f"{' and '.join(components)}",
            MODEL_HINT,
        )
    experts, boundary = [*model.flavour_spec.experts.values()], index.get("boundary_ratio")
    if experts and boundary is not None and boundary != experts[0].lowest:
        raise CheckpointMismatch(
            f"{model.source}: model_index.json has boundary_ratio {printable(boundary)} (the noise level between its "
            f"transformers), but {model.flavour_spec.name} has {experts[0].lowest:g}",
            MODEL_HINT,
        )
    for key, setting in model.family_spec.pipeline_settings.items():
        if (stated := index.get(key, False)) != setting:
            stated_setting = (
                f"{key}: {printable(json.dumps(stated))}" if key in index else f"no {key}, which means false"
            )
            raise CheckpointMismatch(
                f"{model.source}: model_index.json has {stated_setting}, but the pipeline of {model.family} needs "
                f"{json.dumps(setting)}",
                f"take model_index.json from {model.flavour_spec.repo}, or {MODEL_HINT}",
            )


def find_published(repo: str) -> list[tuple[Family, Flavour]]:
    """Return the families and flavours in the catalog that use a repository."""
    return [
        (family, flavour)
        for family in FAMILIES.values()
        for flavour in family.flavours.values()
        if flavour.repo == repo
    ]


def check_distilled(model: Model, warn: Callable[[str], object], is_guided: bool = False) -> None:
    """Raise CheckpointMismatch if the checkpoint is distilled, but training has neither a guided target nor
    `model.assistant`, or if it is not distilled but `model.assistant` is set.

    warn: function that is called if neither can be determined, and for a guided target of a checkpoint that is not
    distilled. is_guided: whether `train.guidance` has a scale above 1."""
    place = model.place(model.family_spec.components[0])
    published = [model.flavour_spec]  # of a file, the flavour is configured
    if isinstance(place, Place):
        published = [flavour for _, flavour in find_published(place.source)]
    rows = {row.name: row for row in (model.flavour_spec, *published) if row.distilled_from or row.has_guidance}
    mark = model.family_spec.distilled_mark
    config = (find_json(model, mark.part) if mark.part else find_index(model)) if mark else None
    marked = None if config is None or mark is None else bool(config.get(mark.key, False))
    few_steps = [flavour.name for flavour in model.family_spec.flavours.values() if flavour.distilled_from]
    if rows or marked:
        is_reversible = mark is None or mark.is_reversible
        if is_reversible and (is_guided or model.assistant is not None):
            return
        raise _refuse_distilled(model, next(iter(rows.values()), None), is_reversible)
    if published or marked is False:
        if model.assistant is not None:
            raise CheckpointMismatch(
                f"model.assistant: {model.source} is not distilled, but an assistant is for a distilled checkpoint",
                "remove model.assistant, or set model.path or model.flavour to the distilled checkpoint",
            )
        if is_guided:
            warn(
                f"train.guidance: {model.source} is not distilled; the guided target trains it to be sampled without "
                "guidance"
            )
    elif model.assistant is not None:
        warn(
            f"model.assistant: {model.source} does not state whether it is distilled; an assistant is for distilled "
            "checkpoints"
        )
    elif few_steps and not is_guided:
        warn(
            f"model.path: {model.source} does not state whether it is {' or '.join(few_steps)}, which is distilled to "
            "few steps; training would undo the distillation"
        )


def _refuse_distilled(model: Model, row: Flavour | None, is_reversible: bool) -> CheckpointMismatch:
    """The error about a distilled checkpoint. row: its row in the catalog; None if only its files state that it is
    distilled. is_reversible: whether a guided target or an assistant can preserve the distillation."""
    spec, steps = model.family_spec, []
    base = spec.flavours[row.distilled_from if row and row.distilled_from else model.flavour_spec.name]
    if row is None or row.distilled_from:
        steps = [f"train {base.name} ({base.repo}) instead: correct model.flavour or model.path"]
    if is_reversible:
        assistant = (row or model.flavour_spec).assistant
        steps += [
            f"set model.assistant to default ({assistant.repo})"
            if assistant
            else "set model.assistant to an adapter that reverses the distillation",
            "set train.guidance, which preserves guidance, but not few steps"
            if row is None or row.distilled_from
            else "set train.guidance, which preserves guidance",
        ]
    subject = row.name if row else f"according to {spec.distilled_mark}, it"
    state = "has guidance distilled into it" if row and not row.distilled_from else "is distilled to few steps"
    return CheckpointMismatch(f"{model.source}: {subject} {state}, which training would undo", "; or ".join(steps))


def check_transformer(model: Model) -> None:
    """Raise CheckpointMismatch if a transformer's config.json is for another family or task."""
    for part in model.family_spec.components:
        config = read_part_config(model, part)
        check_component(model, part, config)
        _check_attention(model, config)


def check_component(model: Model, part: str, config: Mapping[str, Any] | None = None) -> None:
    """Raise CheckpointMismatch if a component is another kind of model than the family's, a transformer is for another
    task, or an autoencoder gives latents that the transformer can't read. config: its config.json, read if None."""
    if config is None:
        config = read_part_config(model, part)
    family, class_name = model.family_spec, config.get("_class_name") or config.get("model_type")
    if class_name != family.model_classes[part]:
        problem = f"{part} is a {printable(str(class_name))}, but {model.family} has a {family.model_classes[part]}"
        raise CheckpointMismatch(f"{model.source}: {problem}", MODEL_HINT)
    for key, expected in (family.transformer_config[model.task] if part in family.components else {}).items():
        stated = config.get(key, False if isinstance(expected, bool) else expected)
        if stated != expected:
            raise CheckpointMismatch(
                f"{model.source}: {part}/config.json has {key} = {printable(stated)}, but {model.family} "
                f"{model.task} needs {expected}: the checkpoint is for another model or task",
                MODEL_HINT,
            )
    for key, expected in (family.autoencoder_config if part == "vae" else {}).items():
        value = config.get(key, expected)
        stated = len(value) if isinstance(value, list) else value
        if stated != expected:
            number = printable(stated)
            setting = f"{number} entries of {key}" if isinstance(value, list) else f"{key} = {number}"
            raise CheckpointMismatch(
                f"{model.source}: vae/config.json has {setting}, but the transformer of {model.family} reads latents "
                f"of an autoencoder with {expected}",
                f"take vae/ from the repository of the transformer ({model.flavour_spec.repo}), or correct "
                "model.path, model.family and model.flavour",
            )


def preview_model(source: str) -> SingleModel:
    """`validation.preview_autoencoder`."""
    return SingleModel(source, None, PREVIEW_KEY, PREVIEW_ADVICE)


def check_preview_autoencoder(model: Model, source: str) -> None:
    """Raise CheckpointMismatch if a tiny autoencoder can't read the family's latents."""
    family = model.family_spec
    config = weights.read_object(preview_model(source).config_file())
    stated = {"_class_name": config.get("_class_name"), "latent_channels": config.get("latent_channels")}
    for key, expected in (("_class_name", family.preview_autoencoder), ("latent_channels", family.latent_channels)):
        if stated[key] != expected:
            raise CheckpointMismatch(
                f"{PREVIEW_KEY}: config.json of {source} has {key} = {printable(stated[key])}, but the latents of "
                f"{model.family} need {expected}",
                PREVIEW_ADVICE,
            )
    blocks, factor = config.get("num_decoder_blocks"), config.get("upsampling_scaling_factor", 2)
    if not isinstance(blocks, list) or factor ** (len(blocks) - 1) != family.spatial_stride:
        raise CheckpointMismatch(
            f"{PREVIEW_KEY}: {source} does not enlarge latents {family.spatial_stride} times, but the autoencoder of "
            f"{model.family} does",
            PREVIEW_ADVICE,
        )


def bucket_side_multiple(model: Model) -> int:
    """The number of pixels that both sides of a bucket must be multiples of; sparse attention needs a larger one.

    For a published repository, the number comes from the catalog, so that planning needs no network and is the same
    on every machine; for any other checkpoint, from its own config. Raises CheckpointMismatch for another family or
    task.
    """
    check_task(model)
    sparse, part = model.family_spec.sparse, model.family_spec.components[0]
    if sparse is None:
        return model.family_spec.side_multiple
    place = model.place(part)
    if isinstance(place, WeightFile):
        is_sparse = model.flavour_spec.sparse
    elif not is_local(model, part) and (published := find_published(place.source)):
        is_sparse = published[0][1].sparse
    else:
        is_sparse = sparse.is_used_by(read_part_config(model, part))
    return sparse.side_multiple if is_sparse else model.family_spec.side_multiple


def _check_attention(model: Model, transformer_config: dict[str, Any]) -> None:
    """Raise CheckpointMismatch if a published repository requires sparse attention but the catalog, and so the plan,
    does not. Buckets planned for sparse attention suit full attention."""
    sparse = model.family_spec.sparse
    if sparse is None or not sparse.is_used_by(transformer_config):
        return
    if (multiple := bucket_side_multiple(model)) != sparse.side_multiple:
        raise CheckpointMismatch(
            f"{model.source}: transformer/config.json has {sparse.name} attention, which needs sides in multiples "
            f"of {sparse.side_multiple} pixels; buckets were planned in multiples of {multiple}, as in the "
            "catalog",
            "download the checkpoint and set model.path to its folder, so that bucket reads its own config",
        )


def pin_revision(model: Model, memo: Store) -> Model:
    """The model with the current commits of its repositories, so that processes started later load the same weights."""
    pinned, own = model, [option for option in PART_OPTIONS if getattr(model, option)]
    try:
        pinned = model.changed(revision=_pin(Place(model.source, model.revision), memo).revision)
    except weights.HubError:
        if not own:  # otherwise the stage may not need this repository
            raise
    for option in own:
        if isinstance(place := model.place(option), Place):
            source, commit = _pin(place, memo)
            pinned = pinned.changed(**{option: f"{source}@{commit}" if commit else source})
    part = model.family_spec.components[0]
    place = model.place(part)
    if model.family_spec.sparse is not None and isinstance(place, Place) and find_published(place.source):
        try:
            config = read_part_config(pinned, part)
        except weights.WeightsError:  # offline, and the transformer is not in the local cache: the trainer checks
            return pinned
        _check_attention(pinned, config)
    return pinned


def _pin(place: Place, memo: Store) -> Place:
    """The place at the current commit of its revision; folders are unchanged."""
    if weights.local_folder(place.source) is not None:
        return place
    if place.revision and weights.COMMIT_PATTERN.fullmatch(place.revision):
        return place
    return Place(place.source, weights.current_commit(place.source, place.revision, memo))


# -- parts that fit each other -----------------------------------------------------------------------------------------


def check_parts(config: Config, ask_hub: bool) -> None:
    """Raise CheckpointMismatch if the parts of a checkpoint do not fit its family or each other, by the small files
    in its folder or, if ask_hub, in its repository. Absent parts are not checked."""
    model, family = config.model, config.model.family_spec
    check_task(model)
    local = weights.local_folder(model.source) is not None
    if not local and not ask_hub:
        return
    if not local:
        index = find_index(model, ask_hub)
        if index is None:
            return
        check_index(model, index)
    configs = {part: find_json(model, part, ask_hub=ask_hub) or {} for part in family.model_classes}
    for part, settings in configs.items():
        if settings:
            check_component(model, part, settings)
    for part in family.components:
        _check_text_widths(model, part, configs)
    _check_text_layers(model, configs["text_encoder"])
    for part in family.tokenizers:
        _check_tokenizer(model, part, ask_hub)
    if config.validation.prompts:
        check_scheduler(model, ask_hub)


def _size_of_text_model(config: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[str, int]:
    """(key, value) of the first of `keys` in the config of a text model, or of the text model nested in another
    model; the value is 0 if the config has none of the keys."""
    inner = config.get("text_config")
    config = inner if isinstance(inner, dict) else config
    return next(((key, config[key]) for key in keys if isinstance(config.get(key), int)), (keys[0], 0))


def _check_text_widths(model: Model, part: str, configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise CheckpointMismatch if a transformer reads texts of another width than its text encoders return."""
    family = model.family_spec
    for tensor, expected in family.read_text_widths(configs[part]).items():
        encoder, read = TEXT_PARTS[tensor], " * ".join(family.text_widths[tensor])
        key, width = _size_of_text_model(configs.get(encoder, {}), WIDTH_KEYS)
        layers = len(model.template.layers) if tensor == "embeds" else 1
        if not width or width * layers == expected:
            continue
        joined = f", {layers * width} for {layers} layers" if layers > 1 else ""
        raise CheckpointMismatch(
            f"{model.source}: {encoder}/config.json has {key} = {width}{joined}, but {part}/config.json has {read} = "
            f"{expected}: the transformer can't read the texts of this text encoder",
            f"take {encoder}/ and its tokenizer from the repository that {part}/ is from, such as "
            f"{model.flavour_spec.repo}, or {MODEL_HINT}",
        )


def _check_text_layers(model: Model, config: Mapping[str, Any]) -> None:
    """Raise CheckpointMismatch if a text encoder has fewer layers than the template reads."""
    needed = max(layer if layer >= 0 else -layer - 1 for layer in model.template.layers)
    key, layers = _size_of_text_model(config, LAYER_KEYS)
    if 0 < layers < needed:
        raise CheckpointMismatch(
            f"{model.source}: text_encoder/config.json has {key} = {layers}, but the template {model.template.name} "
            f"reads the hidden states {', '.join(map(str, model.template.layers))}: it needs {needed} layers or more",
            f"take text_encoder/ from the repository of the transformer, such as {model.flavour_spec.repo}, or "
            f"{MODEL_HINT}",
        )


def _check_tokenizer(model: Model, part: str, ask_hub: bool) -> None:
    """Raise CheckpointMismatch if a tokenizer has the class of another family. Unknown classes pass, because a
    tokenizer may be saved with a general class."""
    expected = model.family_spec.tokenizers[part]
    settings = find_json(model, part, "tokenizer_config.json", ask_hub) or {}
    stated = str(settings.get("tokenizer_class")).removesuffix("Fast")
    if stated != expected and any(stated in family.tokenizers.values() for family in FAMILIES.values()):
        raise CheckpointMismatch(
            f"{model.source}: {part} is a {stated}, but {model.family} has a {expected}",
            f"take {part}/ from the repository that its text encoder is from, or {MODEL_HINT}",
        )


def check_scheduler(model: Model, ask_hub: bool) -> None:
    """Raise CheckpointMismatch if the scheduler, which denoises validation prompts, is not a flow-matching
    scheduler."""
    settings = find_json(model, "scheduler", SCHEDULER_CONFIG, ask_hub)
    if settings is None:
        return
    name = str(settings.get("_class_name"))
    by_settings = settings.get("use_flow_sigmas") is True and settings.get("prediction_type") == "flow_prediction"
    if not by_settings and not name.startswith("FlowMatch"):
        raise CheckpointMismatch(
            f"{model.source}: scheduler/{SCHEDULER_CONFIG} is for {printable(name)}, but {model.family} needs "
            "flow matching: a FlowMatch...Scheduler, or a scheduler with use_flow_sigmas: true and prediction_type: "
            "flow_prediction",
            f"take scheduler/ from the checkpoint's own repository, such as {model.flavour_spec.repo}, or remove "
            "validation.prompts",
        )
