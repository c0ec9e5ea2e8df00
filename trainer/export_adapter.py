"""export-adapter: an adapter as a file in another format, or added to the weights of a model.

The adapter is the result of the configuration's run, or any file that `trainer/adapters/header.py` describes: a LoRA,
DoRA or LoKr. Only the adapter is loaded and, to merge, one file of weights at a time.
"""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from cache.models.places import is_local, locate
from cache.models.weights import INDEXES, fetch_components, find_index, list_parts, local_folder, read_object
from cache.store.files import StoreError, find_shortage, is_temporary, replacing
from cache.store.json_checks import printable
from schemas.cli.console import USAGE, Console, Options, Report, make_app
from schemas.cli.report import for_each_expert
from schemas.config.pipeline import Config
from schemas.config.training import FILE_NAMES, FileFormat
from schemas.errors import LatentpressError
from schemas.family import Family
from trainer.adapters.header import (
    AdapterError,
    AdapterFile,
    check_family,
    check_fits,
    from_comfyui,
    read_adapter,
    resolve_names,
)


class ExportError(LatentpressError):
    """Raised for options that can't be combined, or a path that can't be written."""

    exit_code = USAGE


def parse_format(text: str) -> str:
    if text not in get_args(FileFormat):
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(get_args(FileFormat))}")
    return text


@for_each_expert(single_run_options={"source": "--from", "to": "--to"})
def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="PATH", help="File, or folder of an adapter, checkpoint or run.  [default: train.run]"
        ),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format", parser=parse_format, metavar="NAME", help="diffusers, comfyui or lycoris.  [default: comfyui]"
        ),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Add the adapter to the model's weights, in a new folder --to.")
    ] = False,
    whole: Annotated[
        bool, typer.Option("--whole", help="With --merge: write a whole checkpoint instead of the transformer only.")
    ] = False,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="PATH", help="File or folder; with --merge, a new folder.  [default: as --from]"),
    ] = None,
    scale: Annotated[
        float, typer.Option("--scale", metavar="FACTOR", min=-100, max=100, help="Factor of the adapter's strength.")
    ] = 1.0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
) -> Report:
    check_options(options, form, merge, whole, to, scale, overwrite)
    if source is None and not config.result_folder.is_dir():
        raise ExportError(
            f"{config.run_folder} has no result yet",
            "Run `latentpress train`, or name an adapter: latentpress export-adapter --from PATH",
        )
    # For a full-rank run the run folder, so that the error describes its content.
    run_result = config.run_folder if config.train.adapter.type == "full" else config.result_folder
    adapter = read_adapter(source or run_result)
    check_family(adapter, config.model.family)
    if (flavour := adapter.notes.get("flavour", "")) not in ("", config.model.flavour_spec.name):
        console.warn(f"{adapter.path} was trained on flavour {flavour}, not on {config.model.flavour_spec.name}")
    if (expert := adapter.notes.get("expert")) not in (None, config.train.experts):
        raise AdapterError(
            f"{adapter.path} was trained for the expert {printable(expert)}, and train.experts is "
            f"{config.train.experts}",
            f"Add --set train.experts={expert}, or name another file.",
        )
    report = Report("export-adapter", dry_run=options.dry_run, what="modules", details=describe(adapter, scale))
    if merge:
        assert to is not None
        paths = merge_adapter(config, adapter, to, whole, scale, report, console)
    else:
        paths = convert_adapter(config, adapter, cast(FileFormat, form or "comfyui"), to, scale, report, overwrite)
    count = len(adapter.layers)
    report.done, report.remaining = (0, count) if options.dry_run else (count, 0)
    report.details["written" if not options.dry_run else "would_write"] = [str(path) for path in paths]
    if not options.dry_run:
        report.details["written_bytes"] = sum(
            path.stat().st_size for target in paths for path in ([target] if target.is_file() else target.rglob("*"))
        )
    return report


def check_options(
    options: Options, form: str | None, merge: bool, whole: bool, to: Path | None, scale: float, overwrite: bool
) -> None:
    """Raise ExportError for options that can't be combined."""
    if merge and form:
        raise ExportError("--merge writes a model and has no --format", "Remove one of the two options.")
    if merge and to is None:
        raise ExportError("--merge needs a new folder", "Name it: latentpress export-adapter --merge --to FOLDER")
    if merge and overwrite:
        raise ExportError("--merge writes a new folder and has no --overwrite", "Remove --overwrite.")
    if whole and not merge:
        raise ExportError("--whole is only valid with --merge", "Add --merge, or remove --whole.")
    if scale == 0:
        raise ExportError("--scale 0 would remove the adapter", "Choose another factor: 1 is the trained strength.")


def describe(adapter: AdapterFile, scale: float) -> dict[str, Any]:
    return {
        "adapter": str(adapter.path),
        "kind": adapter.kind,
        "format": adapter.format,
        "modules": len(adapter.layers),
        "rank": adapter.ranks,
        "alpha": adapter.alphas,
        "scale": scale,
        "adapter_bytes": adapter.path.stat().st_size,
    }


def check_format(adapter: AdapterFile, form: FileFormat) -> None:
    """Raise ExportError for a format that can't store this kind of adapter."""
    if adapter.kind == "DoRA" and form != "diffusers":
        raise ExportError(
            f"{adapter.path} is a DoRA, and {form}'s format can't store its magnitudes",
            "Merge it into the model: latentpress export-adapter --merge --to FOLDER",
        )
    if adapter.kind == "LoRA" and form == "lycoris":
        raise ExportError(
            f"{adapter.path} is a LoRA, and the format lycoris is for a LoKr only", "Use --format comfyui."
        )


def fit_to_model(adapter: AdapterFile, folder: Path, part: str) -> AdapterFile:
    """Returns the adapter with the model's module paths. Raises AdapterError if the adapter is for another model. part:
    sub-folder of the adapted transformer."""
    from trainer.adapters.files import read_weight_shapes

    named = {name.partition(".")[2]: shape for name, shape in read_weight_shapes(folder, part).items()}
    shapes = {f"transformer.{name}": shape for name, shape in named.items()}
    adapter = resolve_names(adapter, shapes, str(folder))
    check_fits(adapter, shapes, str(folder))
    return adapter


def check_parts(spec: Family, adapter: AdapterFile) -> None:
    """Raise AdapterError if the file adapts a component other than "transformer", the name that diffusers' loader
    reads."""
    components = spec.components
    if lacking := [part for part in adapter.components if part not in components]:
        raise AdapterError(
            f"{adapter.path} adapts {' and '.join(lacking)}; {spec.name} only has {' and '.join(components)}",
            "It was made for another model: set model.family to its family, or name another file.",
        )
    if other_parts := [part for part in adapter.components if part != "transformer"]:
        raise AdapterError(
            f"{adapter.path} has keys of {' and '.join(other_parts)}, which diffusers' pipelines ignore",
            'Write them to a separate file, with keys that begin with "transformer.": each expert has its own file.',
        )


def check_outside_models(source: str, path: Path) -> None:
    """Raise ExportError if `path` is in a model's folder: a new file would replace the model's weights or be loaded
    with them."""
    parent, checkpoint = path.parent.resolve(), local_folder(source)
    folders = [
        folder
        for folder in (parent, *parent.parents)
        if find_index(folder) or (checkpoint and folder == checkpoint.resolve())
    ]
    if (parent / "config.json").is_file() and any(parent.glob("*.safetensors")):
        folders.append(parent)
    if folders:
        raise ExportError(f"{path} is in a model's folder, {folders[0]}", "Choose another path: --to PATH")


def name_target(config: Config, adapter: AdapterFile, form: FileFormat, to: Path | None) -> Path:
    """The file to write. to: a file, a folder, or None for the folder of the run, or of an adapter of no run.

    A file for ComfyUI has a name that a person recognizes among others: the name of the run's result, with the name of
    the checkpoint, or the name of the adapter's own file."""
    if to is not None and to.suffix == ".safetensors":
        return to
    source, run = adapter.path.parent, config.run_folder
    is_of_run = source.resolve().is_relative_to(run.resolve())
    folder = to or (run if is_of_run and form == "comfyui" else source)
    if form != "comfyui":
        return folder / FILE_NAMES[form]
    if not is_of_run:
        return folder / f"{adapter.path.stem}-comfyui.safetensors"
    step = f"-{source.name}" if source.parent.name == "checkpoints" else ""
    return folder / f"{config.result_name}{step}.safetensors"


def convert_adapter(
    config: Config,
    adapter: AdapterFile,
    form: FileFormat,
    to: Path | None,
    scale: float,
    report: Report,
    overwrite: bool,
) -> list[Path]:
    """Write the adapter in a format; returns the files. The checkpoint's shapes are checked if the checkpoint is on
    this machine."""
    from trainer.adapters.files import adapter_contents, load_layers, write_file
    from trainer.run.run_state import explain_failures

    check_format(adapter, form)
    check_parts(config.model.family_spec, adapter)
    part, names = config.part, config.model.family_spec.comfyui_names
    folder = local_folder(locate(config.model, [part]).source) if is_local(config.model, part) else None
    if folder is not None and (folder / part).is_dir():
        adapter = fit_to_model(adapter, folder, part)
    elif adapter.format == "lycoris":
        raise ExportError(
            f"{adapter.path} has module paths with underscores, which need the {part} of {config.model.source} on this "
            "machine",
            "Set model.path to the checkpoint's folder, or name diffusers' or ComfyUI's file of the same adapter.",
        )
    else:
        adapter = replace(adapter, layers={from_comfyui(name, names): layer for name, layer in adapter.layers.items()})
    path = name_target(config, adapter, form, to)
    report.details["to_format"] = form
    contents = adapter_contents(load_layers(adapter, scale), form, adapter.notes, names)
    if path.exists() and path.samefile(adapter.path):
        raise ExportError(f"{path} is the adapter itself", "Choose another path: --to PATH")
    check_outside_models(config.model.source, path)
    if os.path.lexists(path) and not overwrite:
        raise ExportError(f"{path} already exists", "Choose another path: --to PATH; or replace the file: --overwrite")
    if report.dry_run:
        return [path]
    with explain_failures(path.parent):
        return [write_file(*contents, path)]


def merge_adapter(
    config: Config, adapter: AdapterFile, to: Path, whole: bool, scale: float, report: Report, console: Console
) -> list[Path]:
    """Write the checkpoint's transformer with the adapter added, or all of the checkpoint; returns the folder."""
    from trainer.adapters.files import copy_rest, load_layers, merge_component, weight_files
    from trainer.run.run_state import explain_failures

    check_parts(config.model.family_spec, adapter)
    model, part = config.model, config.part
    if to.is_symlink() or not to.name:
        problem = "a link" if to.name else "the working directory"
        raise ExportError(f"{to} is {problem}, which a folder can't replace", "Name a new folder: --to FOLDER")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ExportError(f"{to} is not empty", "Name a new folder; nothing in it would be kept.")
    check_outside_models(config.model.source, to)
    report.details |= {"model": model.source, "whole_checkpoint": whole}
    if report.dry_run and not is_local(model, part):
        console.warn(f"{model.source} is not on this machine, so the adapter is only checked when it is merged")
        return [to]
    folder, index = fetch_components(*locate(model, [part]), [part]), None
    if whole:
        base = fetch_components(model.source, model.revision, ())
        if (index := find_index(base)) is None:
            raise ExportError(f"{base} has no {' or '.join(INDEXES)}", "Replace the checkpoint with a whole copy.")
        parts = list_parts(read_object(index))
        folder = fetch_components(*locate(model, parts), parts)
    adapter = fit_to_model(adapter, folder, part)
    layers = {name.removeprefix("transformer."): layer for name, layer in load_layers(adapter, scale).items()}
    files = weight_files(folder / part)
    if not report.dry_run:
        for leftover in to.parent.glob(f".{to.name}.*"):  # leftovers of a killed process
            if is_temporary(leftover.name):
                shutil.rmtree(leftover, ignore_errors=True)
    needed = sum(path.stat().st_size for path in (folder.rglob("*") if whole else files))
    if shortage := find_shortage(to, needed):
        raise StoreError(str(to), shortage, "free space there, or choose another path with --to")
    if report.dry_run:
        return [to]
    with explain_failures(to), replacing(to) as out, console.progress(len(files), "merge", "files") as progress:
        out.mkdir()
        merge_component(folder / part, out / part if whole else out, layers, progress.advance)
        if index is not None:
            copy_rest(index, folder, out, [part])
    return [to]


app = make_app(
    "export-adapter",
    "Convert an adapter to another format, or merge it into a model.",
    run,
    examples=["--format comfyui", "--merge --to merged", "--from other.safetensors --format diffusers --to output"],
    unused=("workers",),
)

if __name__ == "__main__":
    app(prog_name="latentpress export-adapter")
