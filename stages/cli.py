"""`latentpress <program> …`: imports and runs the named program alone.

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
    "new": "a short configuration for a folder of media, from a few answers; begin here",
    "discover": "find media, captions and companions; name files by content",
    "features": "near-duplicates and measures of pictures and clips, to filter by",
    "caption": "captions for items that have none, by a vision-language model",
    "masks": "masks for items that have none, by a segmentation model",
    "bucket": "divide media into buckets; plan samples, texts and work units",
    "preview": "encoded samples beside their originals, or (--plan) the plan, as a page",
    "encode-text": "captions, null prompts and validation prompts -> embeddings",
    "encode-latents": "images and clips -> latents",
    "encode-vision": "images and clips -> DINOv2 features, where vision.model is set",
    "index": "join plan and shards into the training set",
    "train": "shards -> adapter or model, checkpoints, validation latents",
    "decode": "validation latents -> pictures and videos",
    "score": "scores of decoded samples by step (CLIP score); the best step by each",
    "report": "one HTML page of a run, or of several side by side",
    "notify": "messages to webhooks: started, validation, checkpoint, finished, failed",
    "push": "the adapter or model, with a model card, to the Hugging Face Hub",
    "export-adapter": "an adapter for ComfyUI or diffusers, or merged into a model",
    "run": "discover to report in order, skipping what is done; push where hub.repo is set",
    "rehearse": "the whole pipeline once with tiny random weights, to find what would stop it",
    "queue": "runs one after the other: add, remove, reorder, and work them off",
    "export": "a copy of a training set with its shards, or WebDataset tars of it",
    "import-config": "another trainer's configuration -> pipeline.yaml, with what became of each key",
    "status": "per stage: done, remaining, set aside, bytes",
    "ui": "a web page: start, stop and watch the stages, plan, pictures, report, logs",
    "doctor": "what this machine has and lacks: devices, libraries, decoders, disks, stores",
    "verify": "check every shard and table; with --repair make damaged ones again",
    "gc": "what nothing uses any longer, with sizes; removed with --yes",
}


def format_usage() -> str:
    width = max(map(len, PROGRAMS))
    lines = "\n".join(f"  {name.ljust(width)}  {what}" for name, what in PROGRAMS.items())
    return f"""\
usage: latentpress PROGRAM [options]

From folders of images and videos to a trained adapter, by cached stages.

{lines}

latentpress PROGRAM --help shows its options; pipeline.yaml is read unless --config names another."""


#: Programs that are asked often, and have no use for pandas, which pyarrow imports where it is installed.
WITHOUT_PANDAS = ("status", "queue")


def main() -> None:
    remove_working_directory()
    explain_missing_libraries()
    begin_silently()
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print_for_reader(format_usage(), sys.stdout)
        sys.exit(0 if arguments else 2)
    name, rest = arguments[0], arguments[1:]
    if name == "--version":
        from importlib.metadata import version

        print(f"latentpress {version('latentpress')}")
        return
    if name not in PROGRAMS:
        alike = get_close_matches(name, PROGRAMS, 1)
        meant = f" (did you mean {alike[0]!r}?)" if alike else ""
        choices = fill(", ".join(PROGRAMS), WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        print(f"error: {name!r} is no program{meant}; choose from:\n{choices}", file=sys.stderr)
        sys.exit(2)
    named = bool(rest) and rest[0].endswith((".yaml", ".yml")) and not rest[0].startswith("-")
    if named and name != "import-config":  # which takes the files of other trainers
        words = " ".join(map(shlex.quote, ["latentpress", name, "--config", *rest]))
        print(f"error: {rest[0]} is given without --config; write: {words}", file=sys.stderr)
        sys.exit(2)
    from schemas.cli.command_lines import check_words

    check_words(name, rest)
    show_starting(name)
    if name in TRAINER_PROGRAMS:
        os.execv(sys.executable, [sys.executable, "-P", "-m", program_module(name), *rest])
    from schemas.cli.starting import garbage_collection_paused, leave_out_pandas

    with garbage_collection_paused():
        if name in WITHOUT_PANDAS:
            leave_out_pandas()
        app = importlib.import_module(program_module(name)).app
    hide_line()
    app(args=rest, prog_name=f"latentpress {name}")


if __name__ == "__main__":
    main()
