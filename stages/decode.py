"""decode: validation latents -> PNG and MP4 through the autoencoder, and a contact sheet of the whole run.

Reads <output>/<run>/validation/<step>/<name>.safetensors, writes <output>/<run>/samples/<step>/<name>.png|mp4 and
<output>/<run>/samples/contact-sheet.png, and adds the pictures to the trackers of `train.trackers`. An existing picture
is replaced only if it was made from another latent (`cache.runs.validations`), or if it is a preview. If a prompt is
the caption of a training sample, the sample's original and its decoded latents are also written
(stages/pages/training_samples.py).
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from cache.models.compatibility import check_preview_autoencoder
from cache.models.weights import hash_file
from cache.runs.training_run import METRICS_FILE, is_running, read_last_metrics, step_of
from cache.runs.validations import Mark, is_current, read_mark
from cache.store.files import check_folder, check_writable, explained
from schemas.activities import activity
from schemas.cli.console import Console, Options, Report, make_app
from schemas.cli.report import for_each_expert
from schemas.cli.starting import garbage_collection_paused
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError, UsageError
from schemas.interruption import StopHandler
from stages.engines.stage_processes import StageProcesses, remove_unfinished
from stages.follow.trackers import open_trackers
from stages.follow.watchers import Watch, is_watcher
from stages.pages.pictures import output_suffix, write_output
from stages.pages.training_samples import write_training_samples


@for_each_expert()
def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    watch: Annotated[bool, typer.Option("--watch", help="Decode new validation latents until training ends.")] = False,
    preview: Annotated[
        bool, typer.Option("--preview", help="Decode with validation.preview_autoencoder; mark pictures as previews.")
    ] = False,
) -> Report:
    if preview and not config.validation.preview_autoencoder:
        step = "set validation.preview_autoencoder to a folder or repository, or do not use --preview"
        raise UsageError("--preview needs validation.preview_autoencoder, a tiny autoencoder, which is not set", step)
    if config.validation.preview_autoencoder and (preview or watch):
        check_preview_autoencoder(config.model, config.validation.preview_autoencoder)
    folder = config.run_folder
    check_folder(folder)
    report = Report(program="decode", dry_run=options.dry_run)
    if watch and not options.dry_run:
        report.done, is_stopped = decode_while_training(config, options, console, folder)
        if is_stopped:  # `run` starts `latentpress decode` next, which decodes the remaining latents
            return report
    files = sorted((folder / "validation").glob("*/*.safetensors"))
    part = options.partition.select(files)
    todo = find_undecoded(config, folder, part, preview)
    report.skipped = max(0, len(part) - len(todo) - report.done)
    if options.dry_run:
        report.remaining = len(todo)
        return report
    remove_unfinished(folder)
    if not files:
        console.log(f"no validation latents under {folder / 'validation'}: nothing to decode")
        return report
    decoded_before, handler = report.done, StopHandler()
    load = cache(lambda: _load_autoencoder(config, options, folder, preview))
    with handler.stop_on_signals():
        if todo:
            check_writable(folder)
            _decode_files(config, console, folder, todo, load, preview, report, handler)
        if not preview and not handler.reason:
            with explained(str(folder)):
                write_training_samples(config, folder, load, options.resources(config, "decode").workers, console)
    report.remaining = len(todo) - len(report.failed) - (report.done - decoded_before)
    if handler.reason:
        report.details["stopped"] = f"by {handler.reason}; decoded pictures are kept"
        return report
    from stages.pages.sheets import update_sheet

    sheet = update_sheet(config, folder)
    report.details = {"samples": str(folder / "samples"), "contact_sheet": str(sheet)}
    return report


def find_undecoded(config: Config, folder: Path, files: Sequence[Path], preview: bool) -> list[Path]:
    """Return the latent files without a current picture. preview: whether a preview counts as a current picture."""
    todo = []
    for file in files:
        picture = output_path(folder, config, file)
        if not is_current(picture, file) or (not preview and read_mark(picture).is_preview):
            todo.append(file)
    return todo


def decode_while_training(config: Config, options: Options, console: Console, folder: Path) -> tuple[int, bool]:
    """Decode new latents until no trainer is running. Returns (number of decoded latents, whether SIGTERM or Ctrl-C
    ended the wait).

    Each poll with new latents starts a process, which frees all its memory when it ends. If it fails, for example
    because the trainer leaves too little memory on the device, the remaining latents are decoded after training. Device
    "auto" is the CPU here, because the trainer may use every card.
    """
    device = options.resources(config, "decode").device
    options = replace(options, device="cpu" if device == "auto" else device)
    preview = config.validation.preview_autoencoder is not None
    processes = StageProcesses({"decode": ["--preview"] if preview else []})
    watch = Watch([folder], on_stop=processes.stop)
    decoded_count, failed_hashes, has_failed = 0, dict[str, str](), False  # failed_hashes: file -> its hash
    for last in watch:
        if last or has_failed:
            continue
        files = options.partition.select(sorted((folder / "validation").glob("*/*.safetensors")))
        todo = [
            file
            for file in find_undecoded(config, folder, files, preview)
            if failed_hashes.get(str(file)) != hash_file(file, None)
        ]
        if options.device != "cpu":
            todo = _trained_after(folder, todo)
        if not todo:
            continue
        contents = {str(file): hash_file(file, None) for file in todo}
        watch.hide_wait()  # `decode` shows its own progress
        _, document = processes.run("decode", options)
        if "error" in document and not watch.is_stopped:
            has_failed = True
            reason = document["error"].get("message", "the process ended without a report")
            console.warn(f"decoding during training failed: {reason}; remaining latents are decoded after training")
            continue
        decoded_count += document.get("done", 0)
        for row in document.get("failed", ()):
            console.warn(f"{row['path']} is not decoded: {row['message']}")
            failed_hashes[row["path"]] = contents.get(row["path"], "")
    return decoded_count, watch.is_stopped


def _trained_after(folder: Path, files: Sequence[Path]) -> list[Path]:
    """Return the latents of validations that a training step has followed, because the trainer has then allocated all
    the memory that it needs on the card."""
    metrics = read_last_metrics(folder / METRICS_FILE)
    trained = max((line["step"] for line in metrics if "loss" in line), default=0)
    return [file for file in files if (step_of(file.parent) or 0) < trained]


def _decode_files(
    config: Config,
    console: Console,
    folder: Path,
    todo: Sequence[Path],
    load: Callable[[], Any],
    preview: bool,
    report: Report,
    stop_handler: StopHandler,
) -> None:
    """Decode the files of `todo`; add counts and failures to the report."""
    autoencoder, device = load()
    import torch

    from stages.encoding import model_loading

    fps = config.clip_rate
    with (
        console.progress(len(todo), "decode", "samples") as progress,
        open_trackers(folder, config.train.trackers, console) as trackers,
    ):
        for file in todo:
            stop_handler.check()
            mark = Mark(hash_file(file, None), preview)
            if (latent_CTHW := _read_valid(file, config, report)) is None:
                continue
            with model_loading.memory_errors(f"decoding {file.name} on {device}"):
                frames_THWC = np.asarray(autoencoder.decode(torch.from_numpy(latent_CTHW)[None])[0])
            picture = output_path(folder, config, file)
            with explained(str(picture)):
                write_output(picture, frames_THWC, fps, mark)
            tag = f"{'preview' if preview else 'validation'}/{file.stem}"
            trackers.add_picture(tag, step_of(file.parent) or 0, frames_THWC, picture, fps)
            report.done += 1
            progress.advance(1)


def _load_autoencoder(config: Config, options: Options, folder: Path, preview: bool) -> Any:
    """Returns (autoencoder, device)."""
    with garbage_collection_paused():
        with activity("loading torch and the autoencoder's code", at_once=True):
            from stages.encoding import model_loading
            from stages.encoding.vae import base

        device = model_loading.select_device(options.resources(config, "decode"))
        if device.type != "cpu" and _may_be_shared(folder):
            model_loading.limit_memory(device)
        if preview and (source := config.validation.preview_autoencoder):
            return base.load_tiny_autoencoder(config.model, config.latents, source, device), device
        return base.load_autoencoder(config.model, config.latents, device), device


def _may_be_shared(folder: Path) -> bool:
    """Whether another program of this run may use the card: a trainer, or the encoding stages of a limited cache."""
    return is_watcher() or is_running(folder) is not False


def _read_valid(file: Path, config: Config, report: Report) -> np.ndarray | None:
    """Returns the latent, or None if it cannot be decoded; the reason is then added to the report."""
    try:
        latent_CTHW, metadata = read_latent(file)
    except LatentpressError as error:
        problem = "damaged", f"{error.message}; {error.next_step}"
    else:
        family, channels = metadata.get("family"), config.model.family_spec.latent_channels
        if family == config.model.family and latent_CTHW.ndim == 4 and len(latent_CTHW) == channels:
            return latent_CTHW
        problem = "other-family", str(family)
        if family == config.model.family:
            problem = (
                "other-shape",
                f"shape {latent_CTHW.shape}, but {family} has ({channels} channels, frames, rows, columns)",
            )
    report.failed.append({"item": file.name, "path": str(file), "reason": problem[0], "message": problem[1]})
    return None


def output_path(folder: Path, config: Config, file: Path) -> Path:
    """The path of a latent's picture or video."""
    return folder / "samples" / file.parent.name / (file.stem + output_suffix(config))


def read_latent(file: Path) -> tuple[np.ndarray, dict[str, Any]]:
    """Returns (latent_CTHW float32, the trainer's metadata). Raises LatentpressError."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as content:
            return content.get_tensor("latent").astype(np.float32), json.loads(content.metadata()["latentpress"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        advice = "delete the file, and run `latentpress train` again"
        raise LatentpressError(f"{file} cannot be read: {error}", advice) from error


app = make_app("decode", "Turn validation latents into pictures and videos.", run, examples=["--watch"], divided=True)

if __name__ == "__main__":
    app()
