"""The data that a training begins with: `make demo FLAVOUR=data`.

Photographs without captions, some of them several times: smaller, mirrored, cropped, compressed. `latentpress caption`
describes them, with a tiny Qwen2.5-VL that was trained on these photographs for half a minute, once. `latentpress
features` finds the near-duplicates, and `bucket` says what to write to leave them out. Nothing is encoded or trained.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from examples.demo_media import package_folder, write_png
from examples.tiny_models import build

KIND = "kandinsky5-image-t2i"  # whose text encoder is a Qwen2.5-VL
NAME = "data"
ROOT = Path(__file__).resolve().parent.parent
RESOLUTION = 112  # pixels: 16 tokens a picture
STEPS = 150
PARTS = 8  # of a photograph, in training
PROMPT = "plain"
# file in skimage/data -> what the model learns to write
PHOTOGRAPHS = {
    "astronaut.png": "A smiling astronaut in an orange suit before a flag and a model of the shuttle.",
    "camera.png": "A man in a dark coat looks through a camera on a tripod, black and white photograph.",
    "chelsea.png": "A small cat with green eyes looks at the camera.",
    "coffee.png": "A cup of coffee on a saucer with a silver spoon on a wooden table.",
    "coins.png": "Rows of old coins on a dark background, black and white photograph.",
    "hubble_deep_field.jpg": "Small bright galaxies in the dark sky.",
    "motorcycle_left.png": "A red motorcycle stands in a garage before a wall.",
    "rocket.jpg": "A rocket on the launch pad at night in bright light.",
}
CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "smaller": lambda photo: photo.resize((photo.width // 2, photo.height // 2), Image.Resampling.LANCZOS),
    "mirrored": ImageOps.mirror,
    "cropped": lambda photo: photo.crop((0, photo.height // 8, photo.width * 7 // 8, photo.height)),
}


def write_photographs(out: Path) -> None:
    """Each photograph, and of every other one its changed copies. Can be repeated."""
    folder = package_folder("skimage", "data")
    for number, name in enumerate(PHOTOGRAPHS):
        with Image.open(folder / name) as opened:
            photo = opened.convert("RGB")
        write_png((out / name).with_suffix(".png"), photo)
        for what, change in CHANGES.items() if number % 2 == 0 else ():
            write_png(out / f"{Path(name).stem}-{what}.png", change(photo))


def train_describer(photographs: Path, checkpoint: Path, steps: int = STEPS) -> None:
    """Train the checkpoint's text encoder, in place, to describe these photographs and parts of them."""
    import torch
    from transformers import Qwen2_5_VLForConditionalGeneration

    from stages.encoding.captions.inputs import QwenInputs

    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint / "text_encoder").train()
    examples = list(_examples(photographs, QwenInputs(model, checkpoint / "tokenizer", checkpoint / "tokenizer")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0, eps=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
    for _ in range(steps):
        batch = [examples[row] for row in torch.randperm(len(examples))[:16].tolist()]
        loss = model(**_collate(batch)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval().save_pretrained(checkpoint / "text_encoder")


def _examples(photographs: Path, inputs: Any) -> Iterator[dict[str, Any]]:
    """Of each photograph the whole and some parts, mirrored ones too, as the model reads them, with its caption."""
    import numpy as np
    import torch

    from schemas.config.captioning import PIXEL_MULTIPLE, PRESETS
    from stages.encoding.captions.inputs import Shown
    from stages.planning.items import fit_sizes

    generator = np.random.default_rng(0)
    for name, caption in PHOTOGRAPHS.items():
        answer = torch.tensor(inputs.tokenizer(f"{caption}<|im_end|>").input_ids)
        with Image.open((photographs / name).with_suffix(".png")) as photo:
            photo.load()
        for number in range(PARTS):
            share = 1 if number < 2 else generator.uniform(0.8, 1)
            width, height = round(share * photo.width), round(share * photo.height)
            left, top = (int(generator.integers(spare + 1)) for spare in (photo.width - width, photo.height - height))
            part = photo.crop((left, top, left + width, top + height))
            across, down = fit_sizes(np.array([width]), np.array([height]), RESOLUTION**2, PIXEL_MULTIPLE)
            part = part.resize((int(across[0]), int(down[0])), Image.Resampling.LANCZOS)
            part = ImageOps.mirror(part) if number % 2 else part
            item = inputs.prepare(Shown((np.asarray(part),)), [PRESETS[PROMPT]], 0)
            question = item.texts[0]["input_ids"]
            yield item.vision | {
                "input_ids": torch.cat([question, answer]),
                "labels": torch.cat([torch.full_like(question, -100), answer]),
                "mm_token_type_ids": torch.cat([item.texts[0]["mm_token_type_ids"], torch.zeros_like(answer)]),
            }


def _collate(examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One batch, its texts padded at their ends."""
    import torch

    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    by_text = {"input_ids": 0, "labels": -100, "mm_token_type_ids": 0}
    batch = {name: pad([one[name] for one in examples], padding_value=value) for name, value in by_text.items()}
    batch["attention_mask"] = pad([torch.ones_like(one["input_ids"]) for one in examples])
    return batch | {name: torch.cat([one[name] for one in examples]) for name in ("pixel_values", "image_grid_thw")}


def run_stages(out: Path) -> None:
    """Run the stages on out/data/photographs, up to the page out/data/plan.html. SystemExit where one of them fails."""
    folder = out / NAME
    write_photographs(folder / "photographs")
    model, trained = folder / "model", folder / "model" / "trained"
    if not trained.exists():
        print(f"==> {NAME}: training a tiny Qwen2.5-VL to describe these photographs, once", flush=True)
        shutil.rmtree(model, ignore_errors=True)
        build(KIND, model)
        train_describer(folder / "photographs", model)
        trained.touch()
    path = folder / "pipeline.yaml"
    path.write_text(json.dumps(pipeline_settings(folder), indent=2))
    for words in ("discover", "caption", "features", "bucket", f"preview --plan --samples 30 --out {folder}/plan.html"):
        print(f"==> {NAME}: latentpress {words.partition(' --out')[0]}", flush=True)
        command = [sys.executable, "-P", "-m", "latentpress", *words.split(), "--config", str(path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
        assert process.stdout is not None
        for line in process.stdout:
            print(f"[{NAME}] {line}", end="", flush=True)
        if process.wait():
            sys.exit(f"{NAME}: latentpress {words} ended with {process.returncode}")


def pipeline_settings(folder: Path) -> dict[str, Any]:
    return {
        "root": "work",
        "output": "output",
        "model": {"family": "kandinsky5-image", "path": str(folder / "model"), "precision": "float32"},
        "datasets": [{"id": "photographs", "instance_data_dir": str(folder / "photographs"), "resolution": 96}],
        "caption": {"prompts": [PROMPT], "resolution": RESOLUTION, "max_tokens": 60},
        "features": {"model": None},
        "stages": {"caption": {"threads": 1}, "max_reject_fraction": 1.0},
    }
