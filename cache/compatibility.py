"""Whether a checkpoint is made for the configured family, flavour and task, by its small files. Imports no torch."""

from typing import Any

from cache.json_checks import printable
from cache.store import Store
from cache.weights import (
    COMMIT_PATTERN,
    MODEL_INDEX,
    WeightsError,
    current_commit,
    local_folder,
    read_component_config,
    read_object,
)
from schemas.catalogue import FAMILIES
from schemas.config.encoding import Model
from schemas.errors import USAGE
from schemas.family import Family, Flavour

MODEL_HINT = "correct model.path, or model.family and model.flavour"


class CheckpointMismatch(WeightsError):
    """A checkpoint of another family or task than the configuration says."""

    exit_code = USAGE


def check_task(model: Model) -> None:
    """OtherCheckpoint where a local directory says, or a repository is known, to be another of the catalogue's
    pipelines.

    Pipelines that the catalogue does not know pass: their parts are looked at one by one (`check_component`,
    `check_transformer`).
    """
    folder = local_folder(model.source)
    if folder is None:
        found = {family.pipelines[flavour.task] for family, flavour in find_published(model.source)}
    elif (folder / MODEL_INDEX).is_file():
        found = {str(read_object(folder / MODEL_INDEX).get("_class_name"))}
    else:
        return
    wanted = model.family_spec.pipelines[model.task]
    made_for = [
        f"{family.name} {task}"
        for family in FAMILIES.values()
        for task, name in family.pipelines.items()
        if name in found
    ]
    if wanted not in found and made_for:
        raise CheckpointMismatch(
            f"{model.source} is a checkpoint for {', '.join(made_for)} ({', '.join(sorted(found))}), and the "
            f"configuration says {model.family} {model.task} ({wanted})",
            MODEL_HINT,
        )


def find_published(repo: str) -> list[tuple[Family, Flavour]]:
    """What the catalogue has of a repository."""
    return [(family, one) for family in FAMILIES.values() for one in family.flavours.values() if one.repo == repo]


def check_transformer(model: Model) -> None:
    """OtherCheckpoint where a transformer's own config says that it is another family's, or made for another task.

    Of a repository that small file is fetched.
    """
    for part in model.family_spec.components:
        check_component(model, part)
        config = read_component_config(model.source, model.revision, part)
        _check_attention(model, config)
        _require_task_of(model, part, config)


def _require_task_of(model: Model, part: str, config: dict[str, Any]) -> None:
    for key, wanted in model.family_spec.transformer_config[model.task].items():
        found = config.get(key, False if isinstance(wanted, bool) else wanted)
        if found != wanted:
            raise CheckpointMismatch(
                f"{model.source}: {part}/config.json has {key} = {printable(found)}, and {model.family} {model.task} "
                f"needs {wanted}: the checkpoint is made for something else",
                MODEL_HINT,
            )


def check_autoencoder(model: Model) -> None:
    """OtherCheckpoint where the autoencoder gives latents that the family's transformer can't read."""
    check_component(model, "vae")
    config = read_component_config(model.source, model.revision, "vae")
    for key, wanted in model.family_spec.autoencoder_config.items():
        found = config.get(key, wanted)
        found = len(found) if isinstance(found, list) else found
        if found != wanted:
            what = (
                f"{printable(found)} entries of {key}"
                if isinstance(config[key], list)
                else f"{key} = {printable(found)}"
            )
            raise CheckpointMismatch(
                f"{model.source}: vae/config.json has {what}, and the transformer of {model.family} reads latents of "
                f"an autoencoder with {wanted}: nothing that it encodes could be trained on",
                f"take vae/ from the repository that the transformer is from ({model.flavour_spec.repo}), or correct "
                "model.path, model.family and model.flavour",
            )


def check_component(model: Model, part: str) -> None:
    """OtherCheckpoint where the part holds another kind of model than the family's."""
    config = read_component_config(model.source, model.revision, part)
    found, wanted = config.get("_class_name") or config.get("model_type"), model.family_spec.model_classes[part]
    if found != wanted:
        raise CheckpointMismatch(
            f"{model.source}: {part} is a {found}, and {model.family} has a {wanted} there",
            MODEL_HINT,
        )


def bucket_side_multiple(model: Model) -> int:
    """What both sides of a bucket must be multiples of, in pixels: more where the checkpoint's attention is sparse.

    Of a published repository the catalogue says so: planning needs no network and is the same on every machine. Any
    other checkpoint's own config is asked. Raises CheckpointMismatch where it is for another family or task.
    """
    check_task(model)
    sparse, part = model.family_spec.sparse, model.family_spec.components[0]
    if sparse is None:
        return model.family_spec.side_multiple
    known = find_published(model.source) if local_folder(model.source) is None else []
    asked = known[0][1].sparse if known else sparse.asked(read_component_config(model.source, model.revision, part))
    return sparse.side_multiple if asked else model.family_spec.side_multiple


def _check_attention(model: Model, transformer_config: dict[str, Any]) -> None:
    """OtherCheckpoint where a published repository asks for sparse attention and the catalogue, and so the plan, knows
    of none.

    The other way round nothing is wrong: what is planned for sparse attention suits full attention.
    """
    multiple, sparse = bucket_side_multiple(model), model.family_spec.sparse
    if sparse is not None and sparse.asked(transformer_config) and multiple != sparse.side_multiple:
        raise CheckpointMismatch(
            f"{model.source}: transformer/config.json asks for {sparse.name} attention, which needs sides in multiples "
            f"of {sparse.side_multiple} pixels; buckets were planned in multiples of {multiple}, as published until "
            "now",
            "download the checkpoint and set model.path to its folder, so that bucket asks its own config",
        )


def pin_revision(model: Model, memo: Store) -> Model:
    """The model with the commit that its revision stands for now, so that whatever starts later loads the same weights.
    memo: see `current_commit`."""
    if local_folder(model.source) is not None or (model.revision and COMMIT_PATTERN.fullmatch(model.revision)):
        return model
    commit = current_commit(model.source, model.revision, memo)
    found = model.model_copy(update={"revision": commit})
    if model.family_spec.sparse is not None and find_published(model.source):
        try:
            config = read_component_config(model.source, commit, model.family_spec.components[0])
        except WeightsError:  # offline, and only other parts are here: the trainer compares
            return found
        _check_attention(found, config)
    return found
