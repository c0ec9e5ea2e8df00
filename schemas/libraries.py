"""Optional libraries: their purpose, the command that installs them, and the options that need them."""

from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from typing import NamedTuple

from schemas.cli.starting import install_command
from schemas.config.datasets import Dataset
from schemas.config.pipeline import Config
from schemas.config.section import listed
from schemas.config.training import DISTRIBUTIONS, find_optimizer
from schemas.errors import LatentpressError

QUANTIZATION_LIBRARIES = {
    "int8-quanto": "optimum.quanto",
    "int8-torchao": "torchao",
    "fp8-torchao": "torchao",
    "nf4-bnb": "bitsandbytes",
}
#: Values of attention options -> the package with the kernels.
ATTENTION_LIBRARIES = {
    "flash_attention_2": "flash_attn",
    "flash": "flash_attn",
    "sage": "sageattention",
}


class Library(NamedTuple):
    """module: import name. distribution: package name for pip. purpose: use of the library in latentpress. extra: the
    extra of latentpress that includes the library; "" if pip installs it by name. imported: whether importing it can
    fail although it is installed, because it may not match torch or the driver."""

    module: str
    distribution: str
    purpose: str
    extra: str = ""
    imported: bool = False

    @property
    def command(self) -> str:
        return install_command(self.extra) if self.extra else f"pip install {self.distribution}"


LIBRARIES = (
    Library("torch", "torch", "encoding and training", "train", imported=True),
    Library("diffusers", "diffusers", "encoding and training", "train", imported=True),
    Library("transformers", "transformers", "text encoders", "encode", imported=True),
    Library("accelerate", "accelerate", "training", "train", imported=True),
    Library("peft", "peft", "LoRA", "train", imported=True),
    Library("av", "av", "reading and writing video", "media", imported=True),
    Library("PIL", "Pillow", "reading and writing images", "media"),
    Library("pillow_heif", "pillow-heif", "HEIC images", "heif"),
    Library("decord", "decord", "latents.decoder: decord", "decord", imported=True),
    Library("scenedetect", "scenedetect-headless", "video.scenes", "scenes"),
    Library("cv2", "opencv-python-headless", "crop_style: face, near-duplicates", "faces"),
    Library("faiss", "faiss-cpu", "near-duplicates, outliers, clusters", "features", imported=True),
    Library("bitsandbytes", "bitsandbytes", "nf4-bnb, 8-bit optimizers", "quant", imported=True),
    Library("optimum.quanto", "optimum-quanto", "int8-quanto", "quant", imported=True),
    Library("torchao", "torchao", "int8-torchao, fp8-torchao", "quant", imported=True),
    Library("flash_attn", "flash-attn", "attention flash, flash_attention_2", imported=True),
    Library("sageattention", "sageattention", "attention sage", imported=True),
    Library("prodigyopt", "prodigyopt", "optimizer prodigy", "optimizers"),
    Library("schedulefree", "schedulefree", "optimizer adamw-schedulefree", "optimizers"),
    Library("optimi", "torch-optimi", "optimizers optimi-*", "optimizers"),
    Library("obstore", "obstore", "s3:// and gs:// addresses", "s3"),
    Library("aiohttp", "aiohttp", "http:// addresses", "http"),
    Library("datasets", "datasets", "datasets of the Hugging Face Hub", "huggingface"),
    Library("braceexpand", "braceexpand", "tars named as {00000..00041}.tar", "webdataset"),
    Library("ray", "ray", "stages.engine: ray", "ray"),
    Library("starlette", "starlette", "ui", "ui"),
    Library("tensorboard", "tensorboard", "train.trackers: tensorboard", "train"),
    Library("wandb", "wandb", "train.trackers: wandb", "wandb"),
    Library("apprise", "apprise", "notify", "notify"),
)


def is_installed(module: str) -> bool:
    """Whether a module is found. Neither the module nor its package is imported."""
    return _find(module) is not None


def _find(module: str) -> ModuleSpec | None:
    parent = module.rpartition(".")[0]
    if not parent:
        return find_spec(module)
    package = _find(parent)
    return PathFinder.find_spec(module, package.submodule_search_locations) if package is not None else None


def find_library(module: str) -> Library:
    """The row of a module; for a module of an optimizer's dotted path, a new row with the package's name."""
    package = module.partition(".")[0]
    row = next((library for library in LIBRARIES if library.module in (module, package)), None)
    return row or Library(package, DISTRIBUTIONS.get(package, package), "an optimizer")


def needed_libraries(config: Config) -> Iterator[tuple[str, str]]:
    """(module, the option or the programs that need it), for all stages and training."""
    for module in ("torch", "diffusers", "transformers"):
        yield module, "encode-text, encode-latents, train"
    for module in ("accelerate", "peft"):
        yield module, "train"
    for module in ("av", "PIL"):
        yield module, "discover, encode-latents, decode"
    quantizations = {"text.quantization": config.text.quantization, "train.base_precision": config.train.base_precision}
    for option, value in quantizations.items():
        if value in QUANTIZATION_LIBRARIES:
            yield QUANTIZATION_LIBRARIES[value], f"{option} {value}"
    attention = {
        "text.attention": config.text.attention,
        "train.attention": config.train.attention,
        "validation.attention": config.validation.attention,
    }
    for option, name in attention.items():
        if name in ATTENTION_LIBRARIES:
            yield ATTENTION_LIBRARIES[name], f"{option} {name}"
    optimizer = config.train.optimizer.name
    if (package := find_optimizer(optimizer).path.partition(".")[0]) != "torch":
        yield package, f"train.optimizer.name {optimizer}"
    for tracker in config.train.trackers:
        yield tracker, f"train.trackers {tracker}"
    if config.stages.engine == "ray":
        yield "ray", "stages.engine ray"
    if config.latents.decoder == "decord":
        yield "decord", "latents.decoder decord"
    if config.notify.webhooks:
        yield "apprise", "notify.webhooks"
    for dataset in config.datasets:
        if dataset.disabled:
            continue
        if dataset.resolved_source == "huggingface":
            yield "datasets", f"datasets.{dataset.id}.source huggingface"
        if dataset.resolved_source == "webdataset" and "{" in dataset.instance_data_dir:
            yield "braceexpand", f"datasets.{dataset.id}.instance_data_dir {{...}}"
        if dataset.video.scenes:
            yield "scenedetect", f"datasets.{dataset.id}.video.scenes"
        if dataset.crop_style == "face":
            yield "cv2", f"datasets.{dataset.id}.crop_style face"
    if config.features is not None and config.features.duplicates:
        yield "cv2", "features.duplicates"
        yield "faiss", "features.duplicates"
    if config.features is not None and config.features.source is not None:
        yield "faiss", "features.model"
    for option, url in needed_stores(config.root, config.datasets):
        for scheme, module in (("s3", "obstore"), ("gs", "obstore"), ("gcs", "obstore"), ("http", "aiohttp")):
            if url.startswith((f"{scheme}://", f"{scheme}a://", f"{scheme}s://")):
                yield module, f"{option} {scheme}://"


def missing_libraries(config: Config) -> dict[Library, str]:
    """Libraries that the configuration needs and that are not installed -> the option that needs the library."""
    libraries: dict[Library, str] = {}
    for module, option in needed_libraries(config):
        if not is_installed(module):
            libraries.setdefault(find_library(module), option)
    return libraries


def require_libraries(config: Config, training: bool) -> None:
    """Raise LatentpressError if a needed library is missing, before stages that take hours. training: whether
    libraries that only options of `train` and `validation` need are checked, too."""
    libraries = missing_libraries(config)
    if not training:
        sections = ("train", "validation")
        libraries = {library: option for library, option in libraries.items() if not option.startswith(sections)}
    if libraries:
        names = "; ".join(f"{library.distribution} ({option})" for library, option in libraries.items())
        commands = dict.fromkeys(library.command for library in libraries)
        step = f"Run {', '.join(commands)}, or change the options that need these libraries."
        raise LatentpressError(f"not installed: {names}", step)


def needed_stores(root: str, datasets: Iterable[Dataset]) -> Iterator[tuple[str, str]]:
    """(option, URL) of each location that is read or written over the network."""
    if "://" in root:
        yield "root", root
    for dataset in datasets:
        for key in ("instance_data_dir", "conditioning_data", "mask_data"):
            for url in listed(getattr(dataset, key)):
                if "://" in url and not dataset.disabled:
                    yield f"datasets.{dataset.id}.{key}", url
