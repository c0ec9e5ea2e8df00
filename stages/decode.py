"""decode: validation latents -> PNG and MP4 through the autoencoder, and a contact sheet of the whole run.

Reads <output>/<run>/validation/<step>/<name>.safetensors, writes <output>/<run>/samples/<step>/<name>.png|mp4 and
<output>/<run>/samples/contact-sheet.png, and adds the pictures to the trackers of `train.trackers`. A latent is decoded
again only if it is newer than its picture. Of training samples whose captions the prompts are it writes the original
and the decoded latents (stages/pages/training_samples.py).
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from cache.files import check_folder, explained, replacing
from cache.training_run import spread
from schemas.cli.console import Console, Options, Report, make_app
from schemas.cli.progress import activity
from schemas.config.pipeline import Config
from schemas.config.validation_samples import validation_samples
from schemas.errors import LatentpressError
from schemas.import_time import garbage_collection_paused
from stages.pages import training_samples
from stages.trackers import open_trackers

SHEET_ROWS, SHEET_COLUMNS = 64, 16  # of a contact sheet, which has some 70 million pixels then
OUTPUT_SUFFIXES = {False: ".png", True: ".mp4"}


def run(config: Config, options: Options, console: Console) -> Report:
    folder = Path(config.output) / config.train.run
    check_folder(folder)
    report = Report(program="decode", dry_run=options.dry_run)
    files = sorted((folder / "validation").glob("*/*.safetensors"))
    own = options.partition.select(files)
    todo = []
    for file in own:
        picture = output_path(folder, config, file)
        # A picture that is older than the latent is of an earlier training of the same name.
        if not picture.exists() or picture.stat().st_mtime_ns < file.stat().st_mtime_ns:
            todo.append(file)
    report.skipped = len(own) - len(todo)
    if options.dry_run:
        report.remaining = len(todo)
        return report
    if not files:
        console.log(f"no validation latents under {folder / 'validation'}: nothing to decode")
        return report
    if todo:
        with garbage_collection_paused():
            with activity("loading torch and what decodes", at_once=True):
                import torch

                from stages.encoding import model_loading
                from stages.encoding.vae import base

            device = model_loading.select_device(options.resources(config, "decode"))
            autoencoder = base.load_autoencoder(config, device)
        rates = [dataset.video.frame_rate for dataset in config.datasets if dataset.dataset_type == "video"]
        fps = config.validation.fps or next(iter(rates), 24.0)
        with (
            console.progress(len(todo), "decode", "samples") as progress,
            open_trackers(folder, config.train.trackers, console) as trackers,
        ):
            for file in todo:
                latent_CTHW, metadata = read_latent(file)
                if (family := metadata["family"]) != config.model.family:
                    row = {"item": file.name, "path": str(file), "reason": "other-family", "message": family}
                    report.failed.append(row)
                    continue
                frames_THWC = autoencoder.decode(torch.from_numpy(latent_CTHW)[None])[0]
                picture = output_path(folder, config, file)
                with explained(str(picture)):
                    write_output(picture, np.asarray(frames_THWC), fps)
                step = int(file.parent.name.removeprefix("step-"))
                trackers.add_picture(file.stem, step, np.asarray(frames_THWC), picture, fps)
                report.done += 1
                progress.advance(1)
        suffix = OUTPUT_SUFFIXES[config.model.family_spec.video]
        training_samples.write_training_samples(
            config,
            folder,
            autoencoder,
            options.resources(config, "decode"),
            lambda path, frames_THWC: write_output(path.with_suffix(suffix), frames_THWC, fps),
            console,
        )
    sheet = folder / "samples" / "contact-sheet.png"
    if todo or not sheet.exists():
        with explained(str(sheet)):
            write_contact_sheet(config, folder, files, sheet)
    report.details = {"samples": str(folder / "samples"), "contact_sheet": str(sheet)}
    return report


def output_path(folder: Path, config: Config, file: Path) -> Path:
    """The path of a latent's picture or video."""
    return folder / "samples" / file.parent.name / (file.stem + OUTPUT_SUFFIXES[config.model.family_spec.video])


def read_latent(file: Path) -> tuple[np.ndarray, dict[str, Any]]:
    """(latent_CTHW float32, the trainer's metadata)."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as content:
            return content.get_tensor("latent").astype(np.float32), json.loads(content.metadata()["latentpress"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        advice = "delete it, and run `latentpress train` again"
        raise LatentpressError(f"{file} can't be read: {error}", advice) from error


def write_output(path: Path, frames_THWC: np.ndarray, fps: float) -> None:
    """Write uint8 frames as PNG (the first one) or MP4, by the path's suffix, atomically."""
    with replacing(path) as temporary:
        if path.suffix == ".png":
            from PIL import Image

            Image.fromarray(frames_THWC[0]).save(temporary, format="PNG")
        else:
            write_video(temporary, frames_THWC, fps)


def write_video(path: Path, frames_THWC: np.ndarray, fps: float) -> None:
    """H.264 in MP4, nearly lossless except for the halved chroma; sides must be even, as every bucket's are.

    Stream and container name the colour space: without it players guess by the size.
    """
    from fractions import Fraction

    import av
    from av.video.reformatter import VideoReformatter

    from stages.media import colour

    height, width = frames_THWC.shape[1:3]
    tags, converter = colour.output_tags(width, height), VideoReformatter()
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001), options={"crf": "14"})
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        context = stream.codec_context
        context.colorspace, context.color_primaries, context.color_trc, context.color_range = tags
        for frame in frames_THWC:
            container.mux(stream.encode(colour.to_yuv420p(converter, frame, tags)))
        container.mux(stream.encode())


def write_contact_sheet(config: Config, folder: Path, files: list[Path], path: Path) -> None:
    """A table of pictures: a row for each validation sample, in the order of the configuration, a column for each step;
    at most SHEET_ROWS and SHEET_COLUMNS, these spread evenly. Videos show their middle frame."""
    from PIL import Image, ImageDraw

    steps = spread(sorted({file.parent.name for file in files}), SHEET_COLUMNS)
    samples = validation_samples(config.validation, config.model.family_spec)
    order = {sample.name: number for number, sample in enumerate(samples)}
    names = sorted({file.stem for file in files}, key=lambda name: (order.get(name, len(order)), name))[:SHEET_ROWS]
    pictures = {}
    for file in files:
        if file.stem not in names or file.parent.name not in steps:
            continue
        picture = output_path(folder, config, file)
        if not picture.exists():
            continue
        if picture.suffix == ".png":
            image = Image.open(picture).convert("RGB")
        else:
            from stages.media.video import probe_video, read_frames

            middle = probe_video(picture).duration / 2
            image = Image.fromarray(next(iter(read_frames(picture, [middle]))))
        image.thumbnail((256, 256), Image.Resampling.LANCZOS)
        pictures[file] = image
    cell, label = max([160, *(side for image in pictures.values() for side in image.size)]), 20
    sheet = Image.new("RGB", (len(steps) * cell, len(names) * (cell + label)), "white")
    draw = ImageDraw.Draw(sheet)
    for row, name in enumerate(names):
        for column, step in enumerate(steps):
            x, y = column * cell, row * (cell + label)
            draw.text((x + 4, y + 4), f"{name}  {step}", fill="black")
            file = folder / "validation" / step / f"{name}.safetensors"
            if file in pictures:
                image = pictures[file]
                sheet.paste(image, (x + (cell - image.width) // 2, y + label + (cell - image.height) // 2))
    with replacing(path) as temporary:
        sheet.save(temporary, format="PNG")


app = make_app("decode", "Turn validation latents into pictures and videos.", run, extra="encode")

if __name__ == "__main__":
    app()
