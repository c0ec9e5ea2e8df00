"""`latentpress <program> …`: imports and runs only the named program.

The trainer, which this package may not import, replaces this process.
"""

import importlib
import os
import shlex
import sys
from difflib import get_close_matches
from textwrap import fill

from schemas import remove_working_directory
from schemas.cli.starting import (
    TRAINER_PROGRAMS,
    begin_silently,
    explain_missing_libraries,
    hide_line,
    print_for_reader,
    program_module,
    show_starting,
)

WIDTH = 100
PROGRAMS = {
    "new": "write a short configuration for a folder of media from a few answers; start here",
    "discover": "find media, captions and companions; identify files by content",
    "features": "measure pictures and clips and find near-duplicates, for filters",
    "caption": "write captions for items without a caption, with a vision-language model",
    "masks": "make masks for items without a mask, with a segmentation model",
    "bucket": "divide media into buckets; plan samples, texts and work units",
    "preview": "make a page that compares encoded samples with originals, or shows the plan",
    "encode-text": "encode captions, null prompts and validation prompts",
    "encode-latents": "encode images and clips to latents",
    "encode-vision": "encode images and clips to DINOv2 features, if vision.model is set",
    "index": "join the plan and the shards into a training set",
    "train": "train an adapter or model; write checkpoints and validation latents",
    "decode": "decode validation latents to pictures and videos",
    "score": "score decoded samples (CLIP score) and report the best step",
    "report": "make one HTML page of a run, or of several runs",
    "notify": "send messages to webhooks: started, validation, checkpoint, finished, failed",
    "push": "upload the adapter or model, with a model card, to the Hugging Face Hub",
    "export-adapter": "convert an adapter for ComfyUI or diffusers, or merge it into a model",
    "run": "run all stages from discover to report, and push if hub.repo is set",
    "rehearse": "run the whole pipeline once with tiny random weights, to find problems early",
    "queue": "run several configurations one after the other",
    "export": "copy a training set with its shards, or write it as WebDataset tars",
    "import-config": "convert another trainer's configuration to pipeline.yaml",
    "status": "show the finished, remaining and rejected items and the size of each stage",
    "ui": "serve a web page: start, stop and watch stages; plan, pictures, report, logs",
    "doctor": "check this machine: devices, libraries, decoders, disks, stores",
    "verify": "check all shards and tables; with --repair replace damaged files",
    "gc": "list unused files with sizes; with --yes remove them",
}


def format_usage() -> str:
    width = max(map(len, PROGRAMS))
    lines = "\n".join(f"  {name.ljust(width)}  {description}" for name, description in PROGRAMS.items())
    return f"""\
usage: latentpress PROGRAM [options]

Train an adapter on folders of images and videos, with cached preprocessing stages.

{lines}

latentpress PROGRAM --help shows the options of a program. The default of --config is pipeline.yaml."""


#: Programs that are run often and do not need pandas, which pyarrow imports if it is installed.
WITHOUT_PANDAS = ("status", "queue")


def main() -> None:
    remove_working_directory()
    explain_missing_libraries()
    begin_silently()
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print_for_reader(format_usage(), sys.stdout)
        sys.exit(0 if arguments else 2)
    name, words = arguments[0], arguments[1:]
    if name == "--version":
        from importlib.metadata import version

        print(f"latentpress {version('latentpress')}")
        return
    if name not in PROGRAMS:
        matches = get_close_matches(name, PROGRAMS, 1)
        hint = f" (did you mean {matches[0]!r}?)" if matches else ""
        choices = fill(", ".join(PROGRAMS), WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        print(f"error: unknown command {name!r}{hint}; choose from:\n{choices}", file=sys.stderr)
        sys.exit(2)
    begins_with_file = bool(words) and words[0].endswith((".yaml", ".yml")) and not words[0].startswith("-")
    if begins_with_file and name != "import-config":  # its arguments are files of other trainers
        command = " ".join(map(shlex.quote, ["latentpress", name, "--config", *words]))
        print(f"error: {words[0]} is given without --config; write: {command}", file=sys.stderr)
        sys.exit(2)
    from schemas.cli.command_lines import check_words

    check_words(name, words)
    show_starting(name)
    if name in TRAINER_PROGRAMS:
        os.execv(sys.executable, [sys.executable, "-P", "-m", program_module(name), *words])
    from schemas.cli.starting import garbage_collection_paused, leave_out_pandas

    with garbage_collection_paused():
        if name in WITHOUT_PANDAS:
            leave_out_pandas()
        app = importlib.import_module(program_module(name)).app
    hide_line()
    app(args=words, prog_name=f"latentpress {name}")


if __name__ == "__main__":
    main()
