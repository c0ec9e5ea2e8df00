"""A model card: what was trained, how to load it, prompts with pictures, settings, data counts, scores.

It holds no path, no caption but the validation prompts, and nothing of the environment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from cache.runs.scores import ScoreCurve, read_curves
from cache.runs.training_run import METRICS_FILE, read_metrics, step_of
from cache.runs.validations import best_evaluation, describe_latents, find_picture, loss_name
from cache.store.files import replacing
from cache.store.store import Store
from schemas.config.pipeline import Config
from schemas.config.sharing import Hub
from schemas.errors import LatentpressError
from schemas.family import Task
from schemas.geometry import Bucket
from schemas.text_format import escape_unprintable
from stages.follow.upload import check_inside
from stages.pages.pictures import PictureLimits, SmallPicture, read_pictures

CARD, PICTURES = "README.md", "images"
WEIGHTS = "pytorch_lora_weights.safetensors"  # diffusers' name of an adapter's file
MOST_PICTURES = 12
LIMITS = PictureLimits(1024, 600_000, 8_000_000)
PIPELINE_TAGS: dict[Task, str] = {
    "t2i": "text-to-image",
    "i2i": "image-to-image",
    "t2v": "text-to-video",
    "i2v": "image-to-video",
}
KINDS = {"lora": "LoRA", "lokr": "LoKr", "full": "fine-tuned transformer"}
#: Options of the table of settings; none of them can hold a path.
SHOWN = (
    *("train.batch_size", "train.accumulate", "train.seed", "train.caption_dropout"),
    *("train.optimizer.name", "train.optimizer.lr", "train.optimizer.schedule", "train.optimizer.warmup"),
    *("train.optimizer.weight_decay", "train.adapter.rank", "train.adapter.alpha", "train.adapter.rslora"),
    *("train.adapter.dora", "train.base_precision", "train.timesteps.sampling", "train.loss.type"),
    *("train.loss.weighting", "model.precision"),
)


@dataclass(frozen=True)
class Facts:
    """The facts of a run for its card. step: of the result. pictures: of its last validation. counts: of the training
    set."""

    step: int
    pictures: tuple[SmallPicture, ...]
    counts: Mapping[str, int]
    metrics: Sequence[Mapping[str, Any]]
    scores: Sequence[ScoreCurve]


def gather_facts(config: Config, folder: Path, step: int) -> Facts:
    """Raises HubError where a picture is a link to a place outside of the run's folder."""
    steps = [made for path in (folder / "validation").glob("step-*") if (made := step_of(path)) is not None]
    for latent, _ in describe_latents(config, folder, max(steps)) if steps else ():
        if picture := find_picture(latent):
            check_inside(picture, folder)
    newest = read_pictures(config, folder, max(steps), LIMITS) if steps else iter(())
    pictures = tuple(islice(newest, MOST_PICTURES))
    return Facts(step, pictures, _read_counts(config), read_metrics(folder / METRICS_FILE), read_curves(folder))


def _read_counts(config: Config) -> dict[str, int]:
    """Read the counts of the set that the run was trained on; none where it can't be read from here."""
    if "/" in config.train.set:
        return {}
    try:
        counts = Store(config.root).read_json(f"sets/{config.train.set}/set.json").get("counts", {})
    except (LatentpressError, OSError):
        return {}
    return {name: count for name, count in counts.items() if type(count) is int}


def write_card(config: Config, hub: Hub, repo: str, facts: Facts, folder: Path) -> list[Path]:
    """Write the card and its pictures into `folder`, in place of older ones; returns the files."""
    with replacing(folder) as temporary:
        (temporary / PICTURES).mkdir(parents=True)
        for picture in facts.pictures:
            (temporary / picture_name(picture)).write_bytes(picture.clip or picture.data)
        (temporary / CARD).write_text(make_card(config, hub, repo, facts), encoding="utf-8")
    return [folder / CARD, *(folder / picture_name(picture) for picture in facts.pictures)]


def picture_name(picture: SmallPicture) -> str:
    return f"{PICTURES}/{picture.name}.{'jpg' if picture.clip is None else 'mp4'}"


def make_card(config: Config, hub: Hub, repo: str, facts: Facts) -> str:
    from huggingface_hub import ModelCard, ModelCardData

    adapter, task = config.train.adapter.type, config.model.task
    tags = ["diffusers", "latentpress", "diffusers-training", *([adapter] if adapter != "full" else []), *hub.tags]
    shown = [(_one_line(picture.prompt), picture_name(picture)) for picture in facts.pictures]
    widget = [{"text": prompt, "output": {"url": name}} for prompt, name in shown]
    data = ModelCardData(
        base_model=base_model(config),
        base_model_relation="finetune" if adapter == "full" else "adapter",
        library_name="diffusers",
        license=hub.license,
        pipeline_tag=PIPELINE_TAGS[task],
        tags=[*tags, *(["template:diffusion-lora"] if adapter != "full" else [])],
        widget=widget or None,
    )
    parts = [_title(config, repo, facts), _pictures(facts), _loading(config, repo, facts), _training(config, facts)]
    parts.append(_license(hub, base_model(config)))
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(filter(None, parts)) + "\n"))


def base_model(config: Config) -> str:
    """The hub's name of the checkpoint; of a local copy that of its flavour."""
    source = config.model.source
    is_repo = source.count("/") == 1 and not source.startswith((".", "~")) and not Path(source).exists()
    return source if is_repo else config.model.flavour_spec.repo


def _title(config: Config, repo: str, facts: Facts) -> str:
    model, kind = config.model, KINDS[config.train.adapter.type]
    spec = f"[{base_model(config)}](https://huggingface.co/{base_model(config)})"
    which = ""
    if config.expert is not None:
        lowest, highest = config.expert.range
        which = f", of its `{config.part}` (the {config.train.experts} noise levels, {lowest:g} to {highest:g})"
    return f"# {repo.partition('/')[2]}\n\nA {kind} of {spec} ({model.task}){which}, trained for {facts.step} steps."


def _pictures(facts: Facts) -> str:
    if not facts.pictures:
        return ""
    rows = []
    for picture in facts.pictures:
        name, prompt = picture_name(picture), _cell(picture.prompt)
        shown = f"![]({name})" if picture.clip is None else f'<video src="{name}" controls loop muted></video>'
        negative = picture.about.get("negative_prompt")
        prompt += f"<br>*negative prompt:* {_cell(str(negative))}" if negative else ""
        keys = {"bucket": "size", "seed": "seed", "steps": "steps", "guidance": "guidance"}
        keys |= {"guidance_low": "guidance below the boundary"}
        values = [f"{label} {_cell(str(picture.about[key]))}" for key, label in keys.items() if key in picture.about]
        rows.append(f"| {prompt} | {', '.join(values)} | {shown} |")
    head = "<Gallery />\n\n## Validation prompts\n\n| prompt | settings | result |\n|---|---|---|\n"
    return head + "\n".join(rows)


def _loading(config: Config, repo: str, facts: Facts) -> str:
    model, adapter = config.model, config.train.adapter
    if adapter.type != "full" and "diffusers" not in adapter.formats:
        return "## Use\n\nLoad `comfyui_lora.safetensors` in ComfyUI."
    pipeline, base = model.family_spec.pipelines.get(model.task), base_model(config)
    if pipeline is None:
        return f"## Use\n\nLoad it with the pipeline of [{base}](https://huggingface.co/{base}): diffusers has none."
    part, transformer = config.part, model.family_spec.model_classes[config.part]
    names = [pipeline, transformer] if adapter.type == "full" else [pipeline]
    utilities = ["export_to_video"] if model.family_spec.video else []
    utilities += ["load_image"] if model.condition is not None else []
    lines = ["import torch", f"from diffusers import {', '.join(names)}"]
    lines += [f"from diffusers.utils import {', '.join(utilities)}"] if utilities else []
    options, trained = f"dtype=torch.{model.precision}", ""
    pinned = f', revision="{model.revision}"' if model.revision and base == model.source else ""
    lines.append("")
    if adapter.type == "full":
        lines.append(f'{part} = {transformer}.from_pretrained("{repo}", subfolder="{part}", {options})')
        trained = f"{part}={part}, "
    lines.append(f'pipe = {pipeline}.from_pretrained("{base}", {trained}{options}{pinned})')
    if adapter.type == "lora":
        second = ", load_into_transformer_2=True" if part == "transformer_2" else ""
        lines.append(f'pipe.load_lora_weights("{repo}"{second})')
    elif adapter.type == "lokr":
        lines.append(f'pipe.{part}.load_lora_adapter("{repo}", prefix="transformer", weight_name="{WEIGHTS}")')
    code = "\n".join([*lines, 'pipe.to("cuda")', *_call(config, facts)])
    return f"## Use\n\n```sh\npip install {' '.join(_packages(config))}\n```\n\n```python\n{code}\n```"


def _packages(config: Config) -> list[str]:
    """Return the packages that the code needs beside torch."""
    family, packages = config.model.family_spec, ["diffusers", "transformers", "accelerate"]
    packages += ["peft"] if config.train.adapter.type != "full" else []
    return packages + [*family.pipeline_packages] + (["imageio", "imageio-ffmpeg"] if family.video else [])


def _call(config: Config, facts: Facts) -> list[str]:
    """Lines that make the first prompt's picture or clip."""
    about, family = facts.pictures[0].about if facts.pictures else {}, config.model.family_spec
    video, before = family.video, list[str]()
    condition = config.model.condition
    name = "reference" if condition is not None and condition.kind == "references" else "source"
    words = [f'image=load_image("{name}.png")'] if condition is not None else []
    words.append(f"prompt={str(about.get('prompt') or 'a prompt')!r}")
    words += [f"negative_prompt={about['negative_prompt']!r}"] if about.get("negative_prompt") else []
    if about.get("bucket"):
        size = Bucket.parse(str(about["bucket"]))
        words += [f"width={size.width}", f"height={size.height}"] + ([f"num_frames={size.frames}"] if video else [])
        words += ["use_resolution_binning=False"] if family.own_sizes == "use_resolution_binning" else []
        if family.own_sizes == "resolutions":
            before.append(f"pipe.resolutions = [({size.width}, {size.height})]")
    words += [f"num_inference_steps={about['steps']}"] if "steps" in about else []
    words += [f"{family.guidance_argument}={about['guidance']}"] if "guidance" in about else []
    words += [f"{family.guidance_argument}_2={about['guidance_low']}"] if "guidance_low" in about else []
    lines = [*before, "result = pipe(", *(f"    {word}," for word in words), ")[0][0]"]
    if not video:
        return [*lines, 'result.save("out.png")']
    return [*lines, f'export_to_video(result, "out.mp4", fps={round(config.clip_rate)})']


def _training(config: Config, facts: Facts) -> str:
    rows = [("steps done", facts.step), *_settings(config)]
    methods = ", ".join(config.train.methods.used)
    rows += [("methods", methods)] if methods else []
    lines = [
        "## Training",
        "",
        "| setting | value |",
        "|---|---|",
        *(f"| {key} | {_cell(str(value))} |" for key, value in rows),
    ]
    if facts.counts:
        words = {"samples": "samples trained on", "eval": "held out", "texts": "texts"}
        counts = [f"{facts.counts[key]} {words[key]}" for key in words if facts.counts.get(key)]
        lines += ["", f"Data: {', '.join(counts)}. The data are not part of this repository."]
    evaluated = [line for line in facts.metrics if isinstance(line.get("eval_loss"), float)]
    if evaluated:
        final, lowest = evaluated[-1], best_evaluation(facts.metrics)
        lines += ["", f"{loss_name(facts.metrics).capitalize()}: {final['eval_loss']:.4g} at step {final['step']}"]
        differs = lowest is not None and lowest.step != final["step"]
        lines[-1] += f"; lowest {lowest.eval_loss:.4g} at step {lowest.step}." if lowest and differs else "."
    for curve in facts.scores:
        last, best = curve.points[-1], curve.best()
        lines += ["", f"{_cell(curve.name)}: {last.value:.4g} at step {last.step}"]
        lines[-1] += f"; best {best.value:.4g} at step {best.step}." if best and best.step != last.step else "."
    return "\n".join(lines)


def _settings(config: Config) -> list[tuple[str, Any]]:
    rows = []
    for key in SHOWN:
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name)
        if value is not None and not (config.train.adapter.type == "full" and key.startswith("train.adapter.")):
            rows.append((key, str(value).lower() if isinstance(value, bool) else value))
    return rows


def _license(hub: Hub, base: str) -> str:
    if hub.license is None:
        return f"## License\n\nNone was chosen. That of {base} applies to what is derived from it."
    return f"## License\n\n{hub.license}. That of {base} applies besides."


def _one_line(text: str) -> str:
    return escape_unprintable(" ".join(text.split()))


def _cell(text: str) -> str:
    """Text in a table of Markdown, shown as it is."""
    text = _one_line(text).replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{character}" if character in "\\`*_[]|~$!#" else character for character in text)
