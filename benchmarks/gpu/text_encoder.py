"""Qwen2.5-VL-7B: benchmarks/text.py with true shapes."""

import shutil
import tempfile
from pathlib import Path

from benchmarks import text
from benchmarks.gpu.parts import PartOptions
from stages.rehearsing import tiny_models

IN_MEMORY, BYTES = "/dev/shm", 24 << 30  # bytes of the checkpoint, which the pipeline and the encoders load


def run(options: PartOptions) -> None:
    if Path(IN_MEMORY).is_dir() and shutil.disk_usage(IN_MEMORY).free > 2 * BYTES:  # faster than a disk
        tempfile.tempdir = IN_MEMORY
    with tempfile.TemporaryDirectory() as folder:
        size = ["--captions", "64", "--true-size"]
        if options.tiny:
            model = tiny_models.build("kandinsky5-video-t2v", Path(folder), only=text.COMPONENTS)
            size = ["--captions", "4", "--longest", "20", "--budget", "64", "--model", str(model)]
        text.main(["--device", options.device, "--device-usage", "--repeat", "1", *size])
