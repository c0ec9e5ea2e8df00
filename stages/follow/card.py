"""A model card: the trained model, how to load it, prompts with pictures, settings, data counts, scores.

The card does not contain paths, captions other than the validation prompts, or information about the environment.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from cache.runs.scores import read_curves
from cache.runs.training_run import METRICS_FILE, read_metrics, step_of
from cache.runs.validations import best_evaluation, loss_name
from cache.sets.table_checks import SetRecord
from cache.store.files import replacing
from cache.store.store import Store
from schemas.config.encoding import Model
from schemas.config.pipeline import Config
from schemas.config.training import Hub
from schemas.errors import LatentpressError
from schemas.family import Task
from schemas.geometry import Bucket
from schemas.text_format import escape_unprintable
from stages.pages.pictures import SmallPicture, read_pictures

CARD, PICTURES, TEMPLATE = "README.md", "images", Path(__file__).with_name("card.md.jinja")
MAX_PICTURES = 12
LIMITS = (1024, 600_000, 8_000_000)  # longest side in pixels, bytes of a picture, bytes of a clip
PIPELINE_TAGS: dict[Task, str] = {
    "t2i": "text-to-image",
    "i2i": "image-to-image",
    "t2v": "text-to-video",
    "i2v": "image-to-video",
}
KINDS = {"lora": "LoRA", "lokr": "LoKr", "full": "fine-tuned transformer"}
#: Labels of a picture's settings.
LABELS = {
    "bucket": "size",
    "seed": "seed",
    "steps": "steps",
    "guidance": "guidance",
    "guidance_low": "guidance below the boundary",
}
COUNT_LABELS = {"samples": "training samples", "eval": "held-out samples", "texts": "texts"}
#: Options in the table of settings. None of them can contain a path.
SETTINGS = (
    *("train.batch_size", "train.accumulate", "train.seed", "train.caption_dropout"),
    *("train.optimizer.name", "train.optimizer.lr", "train.optimizer.schedule", "train.optimizer.warmup"),
    *("train.optimizer.weight_decay", "train.adapter.rank", "train.adapter.alpha", "train.adapter.rslora"),
    *("train.adapter.dora", "train.base_precision", "train.timesteps.sampling", "train.loss.type"),
    *("train.loss.weighting", "model.precision"),
)


def write_card(config: Config, hub: Hub, repo: str, step: int, run: Path, folder: Path) -> list[Path]:
    """Write the card and the pictures of the last validation into `folder`, replacing older files, and return the
    files. config: configuration of the run. step: training step of the result. run: folder of the run."""
    steps = [number for path in (run / "validation").glob("step-*") if (number := step_of(path)) is not None]
    newest = read_pictures(config, run, max(steps), *LIMITS) if steps else iter(())
    pictures = list(islice(newest, MAX_PICTURES))
    with replacing(folder) as temporary:
        (temporary / PICTURES).mkdir(parents=True)
        for picture in pictures:
            (temporary / picture_name(picture)).write_bytes(picture.picture.data)
        (temporary / CARD).write_text(make_card(config, hub, repo, step, pictures, run), encoding="utf-8")
    return [folder / CARD, *(folder / picture_name(picture) for picture in pictures)]


def _read_counts(root: str, set_id: str) -> list[str]:
    """The counts of the set that the run was trained on, as texts; empty if the set can't be read on this machine."""
    if "/" in set_id:
        return []
    try:
        counts = Store(root).read_record(f"sets/{set_id}/set.json", SetRecord).counts
    except (LatentpressError, OSError):
        return []
    return [f"{count} {label}" for key, label in COUNT_LABELS.items() if (count := getattr(counts, key))]


def picture_name(picture: SmallPicture) -> str:
    return f"{PICTURES}/{picture.name}.{'mp4' if picture.picture.is_clip else 'jpg'}"


def make_card(config: Config, hub: Hub, repo: str, step: int, pictures: Sequence[SmallPicture], run: Path) -> str:
    """Make the text of the card from the template card.md.jinja."""
    from huggingface_hub import ModelCard, ModelCardData

    model, adapter = config.model, config.train.adapter.type
    tags = ["diffusers", "latentpress", "diffusers-training", *([adapter] if adapter != "full" else []), *hub.tags]
    widget = [{"text": _one_line(picture.prompt), "output": {"url": picture_name(picture)}} for picture in pictures]
    data = ModelCardData(
        base_model=base_model(model),
        base_model_relation="finetune" if adapter == "full" else "adapter",
        library_name="diffusers",
        license=hub.license,
        pipeline_tag=PIPELINE_TAGS[model.task],
        tags=[*tags, *(["template:diffusion-lora"] if adapter != "full" else [])],
        widget=widget or None,
    )
    metadata = pictures[0].about if pictures else {}
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        adapter=adapter,
        arguments=_pipeline_arguments(model, metadata),
        cell=_cell,
        comfyui_file=config.comfyui_file.name if config.comfyui_file else None,
        counts=_read_counts(config.root, config.train.set),
        expert=config.expert,
        family=model.family_spec,
        fps=round(config.clip_rate),
        guidance=metadata.get("guidance"),
        kind=KINDS[adapter],
        labels=LABELS,
        measured=list(_measurements(run)),
        model=model,
        name_of=picture_name,
        part=config.part,
        pictures=pictures,
        repo=repo,
        settings={"finished steps": step, **_settings(config)},
        size=Bucket.parse(str(metadata["bucket"])) if metadata.get("bucket") else None,
        step=step,
        train=config.train,
    )
    return str(card)


def base_model(model: Model) -> str:
    """The name of the checkpoint's repository on the Hub; for a local copy, the repository of its flavour."""
    source = model.source
    is_repo = source.count("/") == 1 and not source.startswith((".", "~")) and not Path(source).exists()
    return source if is_repo else model.flavour_spec.repo


def _pipeline_arguments(model: Model, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the pipeline call that makes the first prompt's picture or clip, as Python source."""
    family, condition = model.family_spec, model.condition
    arguments: dict[str, Any] = {}
    if condition is not None:
        arguments["image"] = f'load_image("{"reference" if condition.kind == "references" else "source"}.png")'
    arguments["prompt"] = repr(str(metadata.get("prompt") or "a prompt"))
    if metadata.get("negative_prompt"):
        arguments["negative_prompt"] = repr(metadata["negative_prompt"])
    if metadata.get("bucket"):
        size = Bucket.parse(str(metadata["bucket"]))
        arguments |= {"width": size.width, "height": size.height} | (
            {"num_frames": size.frames} if family.video else {}
        )
        arguments |= {"use_resolution_binning": False} if family.own_sizes == "use_resolution_binning" else {}
    guidance = family.guidance_argument
    names = {"steps": "num_inference_steps", "guidance": guidance, "guidance_low": f"{guidance}_2"}
    if family.modular:  # guided by its guider
        del names["guidance"]
    if "adapter" in metadata:  # the result has neither that adapter nor its few steps
        names = {}
    return arguments | {name: metadata[key] for key, name in names.items() if key in metadata}


def _settings(config: Config) -> dict[str, Any]:
    rows = {}
    for key in SETTINGS:
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name)
        if value is not None and not (config.train.adapter.type == "full" and key.startswith("train.adapter.")):
            rows[key] = str(value).lower() if isinstance(value, bool) else value
    methods = ", ".join(config.train.used_methods)
    return rows | ({"methods": methods} if methods else {})


def _measurements(folder: Path) -> Iterator[tuple[str, tuple[float, int], tuple[float, int, str] | None]]:
    """Yield the measures of a run, eval loss and scores: (name, (last value, step), (best value, step, "lowest" or
    "best") or None)."""
    metrics = read_metrics(folder / METRICS_FILE)
    if eval_lines := [line for line in metrics if isinstance(line.get("eval_loss"), float)]:
        last, best_eval = eval_lines[-1], best_evaluation(metrics)
        lowest = (best_eval.eval_loss, best_eval.step, "lowest") if best_eval else None
        yield loss_name(metrics).capitalize(), (last["eval_loss"], last["step"]), lowest
    for curve in read_curves(folder):
        point, best = curve.points[-1], curve.best()
        yield _cell(curve.name), (point.value, point.step), (best.value, best.step, "best") if best else None


def _one_line(text: str) -> str:
    return escape_unprintable(" ".join(text.split()))


def _cell(value: Any) -> str:
    """Escape a value for a cell of a Markdown table, so that it is shown unchanged."""
    text = _one_line(str(value)).replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{character}" if character in "\\`*_[]|~$!#" else character for character in text)
