"""Checks by its small files that a checkpoint fits the configured family, flavour and task, and that its parts fit each
other, before any of them is loaded. Imports no torch."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from cache.models import weights
from cache.models.weights import SingleModel
from cache.store.json_checks import printable
from cache.store.store import Store
from schemas.catalog import FAMILIES
from schemas.config.encoding import Model
from schemas.config.pipeline import Config
from schemas.errors import USAGE
from schemas.family import TEXT_PARTS, Family, Flavour

PREVIEW_KEY = "validation.preview_autoencoder"
PREVIEW_ADVICE = (
    f"set {PREVIEW_KEY} to the folder or repository of a tiny autoencoder in diffusers' form, such as "
    "madebyollin/taef1, or remove it"
)
MODEL_HINT = "correct model.path, or model.family and model.flavour"
DISTILLED_MARK = "is_distilled"  # key of model_index.json
SCHEDULER_CONFIG = "scheduler_config.json"
#: Keys of a text encoder's config for its width and for its number of layers: of most models, of T5.
WIDTH_KEYS, LAYER_KEYS = ("hidden_size", "d_model"), ("num_hidden_layers", "num_layers")


class CheckpointMismatch(weights.WeightsError):
    """The checkpoint's family or task differs from the configured one."""

    exit_code = USAGE


def find_json(model: Model, part: str, file: str = "config.json", ask_hub: bool = False) -> dict[str, Any] | None:
    """A small file of a checkpoint; None if it does not exist. ask_hub: fetch a file of a repository; otherwise only a
    file that was fetched before is read, since a hub that can't be reached is waited for."""
    folder = weights.local_folder(model.source)
    if folder is not None:
        path = folder / part / file
        return weights.read_object(path) if path.is_file() else None
    read = weights.read_hub_object if ask_hub else weights.read_cached_object
    with suppress(weights.WeightsError):
        return read(model.source, model.revision, f"{part}/{file}".lstrip("/"))
    return None


def check_task(model: Model) -> None:
    """Raise CheckpointMismatch if a local directory or a known repository is of another pipeline in the catalog.
    Unknown pipelines pass: `check_parts` checks their components."""
    folder = weights.local_folder(model.source)
    if folder is None:
        pipelines = {family.pipelines.get(flavour.task) for family, flavour in find_published(model.source)}
        _check_pipeline(model, {name for name in pipelines if name})
    elif (folder / weights.MODEL_INDEX).is_file():
        check_index(model, weights.read_object(folder / weights.MODEL_INDEX))


def _check_pipeline(model: Model, pipelines: set[str]) -> None:
    """Raise CheckpointMismatch if these classes are pipelines of the catalog, and none is the configured one."""
    wanted, family = model.family_spec.pipelines.get(model.task), model.family_spec
    fitting = {*family.pipelines.values()} if family.one_checkpoint else {wanted}
    made_for = [
        f"{family.name} {task}"
        for family in FAMILIES.values()
        for task, name in family.pipelines.items()
        if name in pipelines
    ]
    if not fitting & pipelines and made_for:
        raise CheckpointMismatch(
            f"{model.source} is a checkpoint for {', '.join(made_for)} ({', '.join(sorted(pipelines))}), and the "
            f"configuration says {model.family} {model.task}" + (f" ({wanted})" if wanted else ""),
            MODEL_HINT,
        )


def check_index(model: Model, index: Mapping[str, Any]) -> None:
    """Raise CheckpointMismatch if model_index.json is of another pipeline, has a transformer that the family does not
    have, as each predicts a part of the noise levels, or has settings with which the pipeline would compute
    otherwise."""
    _check_pipeline(model, {str(index.get("_class_name"))})
    known = model.family_spec.components
    present = [name for name, entry in index.items() if isinstance(entry, list) and entry[:1] != [None]]
    others = [name for name in present if name.startswith("transformer") and name not in known]
    if others:
        raise CheckpointMismatch(
            f"{model.source} has {printable(' and '.join(others))}, and {model.family} has only {' and '.join(known)}",
            MODEL_HINT,
        )
    experts, boundary = [*model.flavour_spec.experts.values()], index.get("boundary_ratio")
    if experts and boundary is not None and boundary != experts[0].lowest:
        raise CheckpointMismatch(
            f"{model.source}: model_index.json has boundary_ratio {printable(boundary)}, where one transformer takes "
            f"over from the other, and {model.flavour_spec.name} has {experts[0].lowest:g}",
            MODEL_HINT,
        )
    for key, setting in model.family_spec.pipeline_settings.items():
        if (stated := index.get(key, False)) != setting:
            shown = f"{key}: {printable(json.dumps(stated))}" if key in index else f"no {key}, which means false"
            raise CheckpointMismatch(
                f"{model.source}: model_index.json has {shown}, and the pipeline of {model.family} needs "
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


def check_distilled(model: Model, warn: Callable[[str], object]) -> None:
    """Raise CheckpointMismatch if the checkpoint is distilled to few steps but `model.assistant` is not set, or if it
    is not distilled but `model.assistant` is set. warn: function that is called if neither can be determined."""
    published = [flavour for _, flavour in find_published(model.source)]
    distilled = {row.name: row.distilled_from for row in (model.flavour_spec, *published) if row.distilled_from}
    index = find_json(model, "", weights.MODEL_INDEX) if model.family_spec.distilled_mark else None
    marked = None if index is None else bool(index.get(DISTILLED_MARK, False))
    few_steps = [flavour.name for flavour in model.family_spec.flavours.values() if flavour.distilled_from]
    if distilled or marked:
        if model.assistant is not None:
            return
        name, original = next(iter(distilled.items()), ("", model.flavour_spec.name))
        base = model.family_spec.flavours[original]
        what = name or f"by {DISTILLED_MARK} in its model_index.json it"
        raise CheckpointMismatch(
            f"{model.source}: {what} was distilled to few steps, which training would undo",
            f"train {base.name} ({base.repo}) instead: correct model.flavour or model.path; or name an adapter that "
            "takes the distillation back in model.assistant",
        )
    if published or marked is False:
        if model.assistant is not None:
            raise CheckpointMismatch(
                f"model.assistant: {model.source} is not distilled, and an assistant is for a distilled checkpoint",
                "remove model.assistant, or name the distilled checkpoint in model.path or model.flavour",
            )
    elif model.assistant is not None:
        warn(f"model.assistant: nothing in {model.source} tells whether it is distilled, which an assistant is for")
    elif few_steps:
        warn(
            f"model.path: nothing in {model.source} tells whether it is {' or '.join(few_steps)}, distilled to few "
            "steps, which training would undo"
        )


def check_transformer(model: Model) -> None:
    """Raise CheckpointMismatch if a transformer's config.json is for another family or task."""
    for part in model.family_spec.components:
        config = weights.read_component_config(model.source, model.revision, part)
        check_component(model, part, config)
        _check_attention(model, config)


def check_component(model: Model, part: str, config: Mapping[str, Any] | None = None) -> None:
    """Raise CheckpointMismatch if a component is another kind of model than the family's, a transformer is for another
    task, or an autoencoder gives latents that the transformer can't read. config: its config.json, read if None."""
    if config is None:
        config = weights.read_component_config(model.source, model.revision, part)
    family, class_name = model.family_spec, config.get("_class_name") or config.get("model_type")
    if class_name != family.model_classes[part]:
        what = f"{part} is a {printable(str(class_name))}, and {model.family} has a {family.model_classes[part]}"
        raise CheckpointMismatch(f"{model.source}: {what}", MODEL_HINT)
    for key, wanted in (family.transformer_config[model.task] if part in family.components else {}).items():
        stated = config.get(key, False if isinstance(wanted, bool) else wanted)
        if stated != wanted:
            raise CheckpointMismatch(
                f"{model.source}: {part}/config.json has {key} = {printable(stated)}, and {model.family} "
                f"{model.task} needs {wanted}: the checkpoint is made for something else",
                MODEL_HINT,
            )
    for key, wanted in (family.autoencoder_config if part == "vae" else {}).items():
        value = config.get(key, wanted)
        stated = len(value) if isinstance(value, list) else value
        if stated != wanted:
            shown = printable(stated)
            what = f"{shown} entries of {key}" if isinstance(value, list) else f"{key} = {shown}"
            raise CheckpointMismatch(
                f"{model.source}: vae/config.json has {what}, and the transformer of {model.family} reads latents of "
                f"an autoencoder with {wanted}: nothing that it encodes could be trained on",
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
    for key, wanted in (("_class_name", family.preview_autoencoder), ("latent_channels", family.latent_channels)):
        if stated[key] != wanted:
            raise CheckpointMismatch(
                f"{PREVIEW_KEY}: config.json of {source} has {key} = {printable(stated[key])}, and the latents of "
                f"{model.family} need {wanted}",
                PREVIEW_ADVICE,
            )
    blocks, factor = config.get("num_decoder_blocks"), config.get("upsampling_scaling_factor", 2)
    if not isinstance(blocks, list) or factor ** (len(blocks) - 1) != family.spatial_stride:
        raise CheckpointMismatch(
            f"{PREVIEW_KEY}: {source} does not enlarge latents {family.spatial_stride} times, as the autoencoder of "
            f"{model.family} does",
            PREVIEW_ADVICE,
        )


def bucket_side_multiple(model: Model) -> int:
    """The number of pixels that both sides of a bucket must be multiples of; sparse attention needs a larger one.

    For a published repository it comes from the catalog, so that planning needs no network and is the same on every
    machine; for any other checkpoint from its own config. Raises CheckpointMismatch for another family or task.
    """
    check_task(model)
    sparse, part = model.family_spec.sparse, model.family_spec.components[0]
    if sparse is None:
        return model.family_spec.side_multiple
    if weights.local_folder(model.source) is None and (known := find_published(model.source)):
        is_sparse = known[0][1].sparse
    else:
        is_sparse = sparse.is_used_by(weights.read_component_config(model.source, model.revision, part))
    return sparse.side_multiple if is_sparse else model.family_spec.side_multiple


def _check_attention(model: Model, transformer_config: dict[str, Any]) -> None:
    """Raise CheckpointMismatch if a published repository requires sparse attention but the catalog, and so the plan,
    does not. Buckets planned for sparse attention suit full attention."""
    sparse = model.family_spec.sparse
    if sparse is None or not sparse.is_used_by(transformer_config):
        return
    if (multiple := bucket_side_multiple(model)) != sparse.side_multiple:
        raise CheckpointMismatch(
            f"{model.source}: transformer/config.json asks for {sparse.name} attention, which needs sides in multiples "
            f"of {sparse.side_multiple} pixels; buckets were planned in multiples of {multiple}, as published until "
            "now",
            "download the checkpoint and set model.path to its folder, so that bucket reads its own config",
        )


def pin_revision(model: Model, memo: Store) -> Model:
    """The model with its revision's current commit, so that processes started later load the same weights."""
    if weights.local_folder(model.source) is not None or (
        model.revision and weights.COMMIT_PATTERN.fullmatch(model.revision)
    ):
        return model
    commit = weights.current_commit(model.source, model.revision, memo)
    pinned = model.changed(revision=commit)
    if model.family_spec.sparse is not None and find_published(model.source):
        try:
            config = weights.read_component_config(model.source, commit, model.family_spec.components[0])
        except weights.WeightsError:  # offline, and only other components are here: the trainer checks
            return pinned
        _check_attention(pinned, config)
    return pinned


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
        index = find_json(model, "", weights.MODEL_INDEX, ask_hub)
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
    """(key, value) of the first of `keys` in the config of a text model, or of the text model inside of another; the
    value 0 if there is none."""
    inner = config.get("text_config")
    config = inner if isinstance(inner, dict) else config
    return next(((key, config[key]) for key in keys if isinstance(config.get(key), int)), (keys[0], 0))


def _check_text_widths(model: Model, part: str, configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise CheckpointMismatch if a transformer reads texts of another width than its text encoders make."""
    for tensor, read in model.family_spec.text_widths.items():
        encoder, wanted = TEXT_PARTS[tensor], configs[part].get(read)
        key, width = _size_of_text_model(configs.get(encoder, {}), WIDTH_KEYS)
        taken = len(model.template.layers) if tensor == "embeds" else 1
        if not width or not isinstance(wanted, int) or width * taken == wanted:
            continue
        joined = f", of {taken} layers {taken * width}" if taken > 1 else ""
        raise CheckpointMismatch(
            f"{model.source}: {encoder}/config.json has {key} = {width}{joined}, and {part}/config.json has {read} = "
            f"{wanted}: the transformer can't read the texts of this text encoder",
            f"take {encoder}/ and its tokenizer from the repository that {part}/ is from, such as "
            f"{model.flavour_spec.repo}, or {MODEL_HINT}",
        )


def _check_text_layers(model: Model, config: Mapping[str, Any]) -> None:
    """Raise CheckpointMismatch if a text encoder has fewer layers than the template takes hidden states of."""
    needed = max(layer if layer >= 0 else -layer - 1 for layer in model.template.layers)
    key, layers = _size_of_text_model(config, LAYER_KEYS)
    if 0 < layers < needed:
        raise CheckpointMismatch(
            f"{model.source}: text_encoder/config.json has {key} = {layers}, and the template {model.template.name} "
            f"takes the hidden states {', '.join(map(str, model.template.layers))}: it needs {needed} layers or more",
            f"take text_encoder/ from the repository of the transformer, such as {model.flavour_spec.repo}, or "
            f"{MODEL_HINT}",
        )


def _check_tokenizer(model: Model, part: str, ask_hub: bool) -> None:
    """Raise CheckpointMismatch if a tokenizer is of the class of another family. Unknown classes pass, since a
    tokenizer may be saved under a general one."""
    wanted = model.family_spec.tokenizers[part]
    settings = find_json(model, part, "tokenizer_config.json", ask_hub) or {}
    stated = str(settings.get("tokenizer_class")).removesuffix("Fast")
    if stated != wanted and any(stated in family.tokenizers.values() for family in FAMILIES.values()):
        raise CheckpointMismatch(
            f"{model.source}: {part} is a {stated}, and {model.family} has a {wanted}",
            f"take {part}/ from the repository that its text encoder is from, or {MODEL_HINT}",
        )


def check_scheduler(model: Model, ask_hub: bool) -> None:
    """Raise CheckpointMismatch if the scheduler, with which validation prompts are denoised, is not one of flow
    matching."""
    settings = find_json(model, "scheduler", SCHEDULER_CONFIG, ask_hub)
    if settings is None:
        return
    name = str(settings.get("_class_name"))
    by_settings = settings.get("use_flow_sigmas") is True and settings.get("prediction_type") == "flow_prediction"
    if not by_settings and not name.startswith("FlowMatch"):
        raise CheckpointMismatch(
            f"{model.source}: scheduler/{SCHEDULER_CONFIG} is of {printable(name)}, and {model.family} is denoised by "
            "flow matching: a FlowMatch...Scheduler, or one with use_flow_sigmas: true and prediction_type: "
            "flow_prediction",
            f"take scheduler/ from the checkpoint's own repository, such as {model.flavour_spec.repo}, or remove "
            "validation.prompts",
        )
