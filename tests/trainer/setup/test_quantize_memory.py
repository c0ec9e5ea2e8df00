"""The memory of the host while a base is loaded and quantized."""

import ctypes
import json
import threading
from pathlib import Path

import pytest
import torch

from stages.rehearsing.tiny_models import make_model
from tests.forms import long
from tests.processes import in_child
from tests.trainer.pipelines import KINDS
from tests.trainer.runs import moved
from tests.trainer.setup.test_quantize import NAMES
from trainer.memory.estimate import LIBRARIES, estimate_memory
from trainer.setup.adapters import make_trainable
from trainer.setup.load import load_transformer
from trainer.setup.quantize import QUANTIZERS, quantize_base

WIDEST = 4 * 1024 * 4096  # bytes of the largest matrix in float32


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> tuple[Path, int]:
    """A checkpoint's folder with a float32 transformer, and the number of its weights."""
    folder = tmp_path_factory.mktemp("large")
    options = {"model_dim": 1024, "ff_dim": 4096, "num_visual_blocks": 4, "visual_cond": False}
    model = make_model("image", overrides=options)
    model.save_pretrained(folder / "transformer")
    return folder, sum(parameter.numel() for parameter in model.parameters())


SHORT = ("int8-torchao",)


@pytest.mark.long
@pytest.mark.parametrize("name", [name if name in SHORT else long(name) for name in ("full rank", "bf16", *NAMES)])
def test_the_host_never_holds_two_copies(make_config, large, name):
    """Memory of the process while a float32 checkpoint is loaded, quantized and its weights are set up."""
    folder, weights = large
    full = name == "full rank"
    settings = {"adapter": {"type": "full"}} if full else {"base_precision": name, "precision": "bfloat16"}
    config = make_config("t2i", **settings)
    config = moved(config, folder)
    shape = json.loads((folder / "transformer" / "config.json").read_text())
    size, family = weights * (4 if full else 2), KINDS["kandinsky5-image-t2i"][0]
    on_gpu = config.model_copy(update={"train": config.train.model_copy(update={"device": "cuda"})})
    assert estimate_memory(on_gpu, shape, ["64x64"], 8).host >= LIBRARIES + size

    def load() -> None:
        if config.train.quantized:
            QUANTIZERS[name](torch.nn.Linear(64, 64, dtype=torch.bfloat16))  # imports its library
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # otherwise freed memory would be used again, and not be counted
        with PeakMemory() as memory:
            model, _ = load_transformer(config, family, torch.device("cpu"))
            if config.train.quantized:
                quantize_base(model, family, name, "cpu", torch.device("cpu"))
            make_trainable(model, family, "t2i", config.train.adapter)
            if full:
                for weight in model.parameters():
                    weight.data.add_(0)  # until they are written, they are pages of the file
        print(f"{name}: model {size / 1e6:.0f} MB, peak {memory.peak / 1e6:.0f} MB")
        # Less than all of it if the heap had free memory that was not returned.
        assert 0.5 * size < memory.peak < 1.1 * size + 6 * WIDEST, "one copy, and one matrix in float32"

    assert in_child(load) == 0


class PeakMemory:
    """The largest growth of this process' anonymous memory, in bytes, sampled every 2 ms."""

    def __enter__(self):
        self.start, self.highest, self.stop = self.now(), 0, threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        while not self.stop.wait(0.002):
            self.highest = max(self.highest, self.now())

    def __exit__(self, *_) -> None:
        self.stop.set()
        self.thread.join()
        self.peak = max(self.highest, self.now()) - self.start

    @staticmethod
    def now() -> int:
        [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
        return int(line.split()[1]) * 1024
