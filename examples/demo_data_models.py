"""The models of `demo_data`, which are trained on its photographs: a tiny Qwen2.5-VL describes them, and a tiny
SegFormer finds the subject of each. Its target masks are computed by GrabCut (Rother, Kolmogorov, Blake 2004) from a
box around the subject."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from examples.demo_data import DESCRIBED_PIXELS, PROMPT, SUBJECT, Box
from schemas.config.encoding import PIXEL_MULTIPLE, PRESETS

PARTS = 8  # parts of a photograph, as training examples
BATCH, STEPS, RATE = 16, 150, 3e-3
SEGMENTED_PIXELS = 128  # pixels of each side


def _train(model: Any, examples: Sequence[Any], collate: Callable[[list[Any]], dict[str, Any]], folder: Path) -> None:
    """Train a model with the loss of its class, and save it. The model is too small for more than one thread."""
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=RATE, weight_decay=0, eps=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, STEPS)
    for _ in range(STEPS):
        batch = [examples[row] for row in torch.randperm(len(examples))[:BATCH].tolist()]
        model(**collate(batch)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval().save_pretrained(folder)


def _parts(*pictures: Image.Image) -> Iterator[list[Image.Image]]:
    """Yield the same parts of pictures of one size. Every second part is mirrored; the first two are the whole
    pictures."""
    generator, size = np.random.default_rng(0), np.array(pictures[0].size)
    for number in range(PARTS):
        part_size = np.rint(size * (1 if number < 2 else generator.uniform(0.8, 1))).astype(int)
        corner = generator.integers(size - part_size + 1)
        parts = [picture.crop((*corner.tolist(), *(corner + part_size).tolist())) for picture in pictures]
        yield [ImageOps.mirror(part) for part in parts] if number % 2 else parts


def train_describer(captions: dict[Path, str], checkpoint: Path) -> None:
    """Train the checkpoint's text encoder in place to describe these photographs and parts of them."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    from stages.encoding.captions.describer import ItemFrames, QwenInputs
    from stages.planning.items import fit_sizes

    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint / "text_encoder")
    inputs, examples = QwenInputs(model, checkpoint / "tokenizer", checkpoint / "tokenizer"), []
    for path, caption in captions.items():
        answer = torch.tensor(inputs.tokenizer(f"{caption}<|im_end|>").input_ids)
        for (part,) in _parts(Image.open(path)):
            width, height = (np.array([side]) for side in part.size)
            across, down = fit_sizes(width, height, DESCRIBED_PIXELS**2, PIXEL_MULTIPLE)
            picture = ItemFrames((np.asarray(part.resize((int(across[0]), int(down[0])), Image.Resampling.LANCZOS)),))
            item = inputs.prepare(picture, [PRESETS[PROMPT]], 0)
            question = item.texts[0]["input_ids"]
            marks = (question == inputs.tokenizer.convert_tokens_to_ids("<|image_pad|>")).int()
            texts = {
                "input_ids": torch.cat([question, answer]),
                "labels": torch.cat([torch.full_like(question, -100), answer]),
                "mm_token_type_ids": torch.cat([marks, torch.zeros_like(answer, dtype=torch.int)]),
            }
            examples.append(item.vision | texts)
    _train(model, examples, _collate_texts, checkpoint / "text_encoder")


def _collate_texts(examples: list[dict[str, Any]]) -> dict[str, Any]:
    """Make a batch, with texts padded at their ends."""
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    by_text = {"input_ids": 0, "labels": -100, "mm_token_type_ids": 0}
    batch = {name: pad([one[name] for one in examples], padding_value=value) for name, value in by_text.items()}
    batch["attention_mask"] = pad([torch.ones_like(one["input_ids"]) for one in examples])
    return batch | {name: torch.cat([one[name] for one in examples]) for name in ("pixel_values", "image_grid_thw")}


def train_segmenter(subjects: dict[Path, Box], folder: Path) -> None:
    """Train a SegFormer to find the subject of these photographs and parts of them. subjects: photograph -> box
    around the subject: left, top, right, bottom as shares of width and height."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation
    from transformers.models.segformer.image_processing_pil_segformer import SegformerImageProcessorPil

    torch.manual_seed(0)
    config = SegformerConfig(
        num_encoder_blocks=3, depths=[1, 1, 1], sr_ratios=[4, 2, 1], hidden_sizes=[32, 48, 64], patch_sizes=[7, 3, 3],
        strides=[4, 2, 2], num_attention_heads=[1, 2, 2], mlp_ratios=[2, 2, 2], decoder_hidden_size=64,
        id2label={0: "background", 1: SUBJECT},
    )  # fmt: skip
    processor, examples = SegformerImageProcessorPil(size={"height": SEGMENTED_PIXELS, "width": SEGMENTED_PIXELS}), []
    for path, box in subjects.items():
        photo = Image.open(path)
        photo.thumbnail((224, 224))
        for part, mask in _parts(photo, _cut_out(photo, box)):
            pixels = processor(part, return_tensors="pt")["pixel_values"][0]
            examples.append(
                (pixels, torch.from_numpy(np.asarray(mask.resize((SEGMENTED_PIXELS, SEGMENTED_PIXELS))) > 127).long())
            )
    processor.save_pretrained(folder)
    model = SegformerForSemanticSegmentation(config)
    _train(
        model,
        examples,
        lambda rows: dict(zip(("pixel_values", "labels"), map(torch.stack, zip(*rows, strict=True)), strict=True)),
        folder,
    )


def _cut_out(photo: Image.Image, box: Box) -> Image.Image:
    """The subject's mask, white on black."""
    import cv2

    x0, y0, x1, y1 = (round(share * side) for share, side in zip(box, photo.size * 2, strict=True))
    mask, state = np.zeros(photo.size[::-1], np.uint8), (np.zeros((1, 65)), np.zeros((1, 65)))
    cv2.setRNGSeed(0)
    rectangle = (x0, y0, x1 - x0 - 1, y1 - y0 - 1)
    cv2.grabCut(np.asarray(photo)[..., ::-1].copy(), mask, rectangle, *state, 5, cv2.GC_INIT_WITH_RECT)
    return Image.fromarray((mask & 1) * 255)
