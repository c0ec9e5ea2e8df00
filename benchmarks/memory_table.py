"""Memory that training needs, predicted for the published shapes on any machine, and the settings that fit each card.

python -m benchmarks.memory_table             print the tables of docs/memory.md
python -m benchmarks.memory_table --write     write them into docs/memory.md; takes twenty minutes
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.common import make_parser
from schemas.catalog import FAMILIES
from schemas.config.pipeline import Config
from stages.rehearsing.tiny_shapes import KINDS, SHAPES
from trainer.memory.estimate import MemoryEstimate, estimate_memory

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "memory.md"
MARKS = re.compile("(<!-- benchmarks.memory_table -->\n).*(<!-- end -->\n)", re.DOTALL)
CARDS_GB = (12, 16, 24, 48, 80)
#: memory of a card for the CUDA context, workspaces of kernels, and fragments
RESERVED_GIB = 1.0

TRUE, PRO = SHAPES["true"], SHAPES["pro"]
IMAGE, NABLA = TRUE["image"], KINDS["kandinsky5-video-t2v-nabla"].transformer


@dataclass(frozen=True)
class Case:
    """shape: configuration of the transformer. tokens: number of tokens of a long caption."""

    family: str
    flavour: str
    shape: dict[str, Any]
    bucket: str
    tokens: int = 512


def sana(flavour: str, bucket: str, **shape: Any) -> Case:
    return Case("sana", flavour, TRUE["sana"] | shape, bucket, 300)


def video(flavour: str, shape: dict[str, Any], bucket: str) -> Case:
    """A case of Kandinsky 5 Video, with sparse attention if the flavour uses it."""
    sparse = NABLA if FAMILIES["kandinsky5-video"].flavours[flavour].sparse else {}
    return Case("kandinsky5-video", flavour, shape["video"] | sparse, bucket)


def published(family: str, flavour: str, bucket: str) -> Case:
    shape = FAMILIES[family].published_shape("transformer", FAMILIES[family].flavours[flavour])
    return Case(family, flavour, shape, bucket)


SMALL_SANA = {
    "num_layers": 28, "num_attention_heads": 36, "num_cross_attention_heads": 16, "cross_attention_head_dim": 72,
    "cross_attention_dim": 1152,
}  # fmt: skip
CASES = {
    "Sana 600M, 512x512": sana("sana-600m-512px", "512x512", **SMALL_SANA, sample_size=16),
    "Sana 600M, 1024x1024": sana("sana-600m-1024px", "1024x1024", **SMALL_SANA),
    "Sana 1.6B, 1024x1024": sana("sana-1.6b-1024px", "1024x1024"),
    "Sana 1.6B 2K, 2048x2048": sana("sana-1600m-2kpx-bf16", "2048x2048", sample_size=64),
    "Sana 1.5 4.8B, 1024x1024": sana(
        "sana1.5-4.8b-1024px", "1024x1024", num_layers=60, qk_norm="rms_norm_across_heads"
    ),
    "Image Lite t2i, 1024x1024": Case("kandinsky5-image", "t2i-lite-sft", IMAGE | {"visual_cond": False}, "1024x1024"),
    "Image Lite i2i, 1024x1024": Case(
        "kandinsky5-image", "i2i-lite-sft", IMAGE | {"visual_cond": True}, "1024x1024", 1024
    ),
    "Video Lite t2v 5 s, 768x512, 61 frames": video("t2v-lite-sft-5s", TRUE, "768x512@61"),
    "Video Lite t2v 5 s, 768x512, 121 frames": video("t2v-lite-sft-5s", TRUE, "768x512@121"),
    "Video Lite t2v 10 s, 768x512, 241 frames": video("t2v-lite-sft-10s", TRUE, "768x512@241"),
    "Video Lite i2v 5 s, 768x512, 121 frames": video("i2v-lite-5s", TRUE, "768x512@121"),
    "Video Pro t2v 5 s, 768x512, 61 frames": video("t2v-pro-sft-5s-hd", PRO, "768x512@61"),
    "Video Pro t2v 5 s, 768x512, 121 frames": video("t2v-pro-sft-5s-hd", PRO, "768x512@121"),
    "Video Pro t2v 5 s HD, 1280x768, 121 frames": video("t2v-pro-sft-5s-hd", PRO, "1280x768@121"),
    "Video Pro t2v 10 s HD, 1280x768, 241 frames": video("t2v-pro-sft-10s-hd", PRO, "1280x768@241"),
    "Video Pro i2v 5 s, 1280x768, 121 frames": video("i2v-pro-sft-5s", PRO, "1280x768@121"),
    "Z-Image, 1024x1024": Case("z-image", "z-image", TRUE["z_image"], "1024x1024"),
    "Qwen-Image, 1024x1024": Case("qwen-image", "qwen-image", TRUE["qwen_image"], "1024x1024"),
    "Qwen-Image, 1328x1328": Case("qwen-image", "qwen-image", TRUE["qwen_image"], "1328x1328"),
    "Qwen-Image-Edit-2511, 1024x1024, one reference": Case(
        "qwen-image-edit-plus",
        "qwen-image-edit-2511",
        TRUE["qwen_image"] | {"zero_cond_t": True},
        "1024x1024+1024x1024",
        768,
    ),
    "Krea 2, 1024x1024": published("krea2", "krea-2-raw", "1024x1024"),
    "Qwen-Image-2.1, 1024x1024": published("qwen-image-2.1", "qwen-image-2.1", "1024x1024"),
    "FLUX.2 klein 4B, 1024x1024": published("flux2-klein", "klein-base-4b", "1024x1024"),
    "FLUX.2 klein 9B, 1024x1024": published("flux2-klein", "klein-base-9b", "1024x1024"),
    "FLUX.2 klein 4B i2i, 1024x1024, one reference": published(
        "flux2-klein", "klein-base-4b-i2i", "1024x1024+1024x1024"
    ),
    "FLUX.2 klein 9B i2i, 1024x1024, one reference": published(
        "flux2-klein", "klein-base-9b-i2i", "1024x1024+1024x1024"
    ),
    "FLUX.3 Image, 1024x1024": published("flux3", "klein-base", "1024x1024"),
    "FLUX.3 Image i2i, 1024x1024, one reference": published("flux3", "klein-base-i2i", "1024x1024+1024x1024"),
    "Wan 2.1 1.3B, 832x480, 33 frames": published("wan2.1", "t2v-1.3b", "832x480@33"),
    "Wan 2.1 1.3B, 832x480, 81 frames": published("wan2.1", "t2v-1.3b", "832x480@81"),
    "Wan 2.1 14B, 832x480, 33 frames": published("wan2.1", "t2v-14b", "832x480@33"),
    "Wan 2.1 14B, 832x480, 81 frames": published("wan2.1", "t2v-14b", "832x480@81"),
    "Wan 2.2 A14B t2v, 832x480, 81 frames, one expert": published("wan2.2-a14b", "t2v-a14b", "832x480@81"),
    "Wan 2.2 A14B i2v, 832x480, 81 frames, one expert": published("wan2.2-a14b", "i2v-a14b", "832x480@81"),
    "Wan 2.2 5B t2v, 1280x704, 121 frames": published("wan2.2-5b", "t2v-5b", "1280x704@121"),
    "Wan 2.2 5B i2v, 1280x704, 121 frames": published("wan2.2-5b", "i2v-5b", "1280x704@121"),
}
LORA = {"adapter": {"type": "lora", "rank": 32}}
FULL = {"adapter": {"type": "full"}}
PURE = {**FULL, "weight_precision": "bfloat16", "optimizer": {"name": "optimi-adamw"}}
INT8, NF4 = {"base_precision": "int8-torchao"}, {"base_precision": "nf4-bnb"}
BLOCKS, BLOCKS_AND_ACTIVATIONS = {"offload": {"blocks": True}}, {"offload": {"blocks": True, "activations": True}}
ACTIVATIONS = {"offload": {"activations": True}}
#: Kind of training -> name -> settings, from the fastest to the settings that need the least memory.
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "LoRA": {
        "no checkpointing": {**LORA, "gradient_checkpointing": False},
        "interval 2": {**LORA, "gradient_checkpointing_interval": 2},
        "defaults": LORA,
        "int8": {**LORA, **INT8},
        "nf4": {**LORA, **NF4},
        "block offload": {**LORA, **BLOCKS},
        "nf4, activation offload": {**LORA, **NF4, **ACTIVATIONS},
        "block and activation offload": {**LORA, **BLOCKS_AND_ACTIVATIONS},
    },
    "full rank": {
        "defaults": FULL,
        "8-bit AdamW": {**FULL, "optimizer": {"name": "bnb-adamw8bit"}},
        "bfloat16, Kahan": PURE,
        "bfloat16, Kahan, Lion": {**PURE, "optimizer": {"name": "optimi-lion"}},
        "the same, activation offload": {**PURE, "optimizer": {"name": "optimi-lion"}, **ACTIVATIONS},
    },
}


def make_config(case: Case, train: dict[str, Any]) -> Config:
    dataset: dict[str, Any] = {"id": "none", "instance_data_dir": "none"}
    if FAMILIES[case.family].video:
        dataset["dataset_type"] = "video"
    if FAMILIES[case.family].flavours[case.flavour].task == "i2i":
        dataset["conditioning_data"] = "none"
    model = {"family": case.family, "flavour": case.flavour, "precision": "bfloat16"}
    if FAMILIES[case.family].flavours[case.flavour].experts:
        train = {"experts": "high", **train}
    sections = {"root": "none", "output": "none", "model": model, "datasets": [dataset]}
    return Config.model_validate({**sections, "train": {"device": "cuda", **train}})


@cache
def estimate(name: str, kind: str, settings: str) -> MemoryEstimate:
    case = CASES[name]
    return estimate_memory(make_config(case, SETTINGS[kind][settings]), case.shape, [case.bucket], case.tokens)


def fits(memory: MemoryEstimate, card_gb: int) -> bool:
    return memory.device / 2**30 + RESERVED_GIB <= card_gb * 1e9 / 2**30


def candidates(name: str, kind: str) -> list[str]:
    """Settings in order of speed, without settings that need more memory than settings that fit no card."""
    settings, largest = [*SETTINGS[kind]], CARDS_GB[-1]
    if kind == "full rank" and not fits(estimate(name, kind, settings[-1]), largest):
        return []
    for needs_less in ("defaults", "interval 2"):
        if needs_less in settings and not fits(estimate(name, kind, needs_less), largest):
            return settings[settings.index(needs_less) + 1 :]
    return settings


def format_cards(name: str, kind: str) -> str | None:
    """Returns a line of the table of cards, or None if no settings fit any card in full rank.

    A cell has the first settings that fit the card, and their GiB on the device. A line for a LoRA ends with the GiB on
    the host and in a checkpoint with the defaults.
    """
    cells: dict[int, str] = {}
    for settings in candidates(name, kind):
        for card in CARDS_GB:
            if card not in cells and fits(memory := estimate(name, kind, settings), card):
                cells[card] = f"{settings} ({memory.device / 2**30:.1f})"
        if len(cells) == len(CARDS_GB):
            break
    line = [name, *(cells.get(card, "-") for card in CARDS_GB)]
    if kind == "LoRA":
        memory = estimate(name, kind, "defaults")
        line += [f"{part / 2**30:.1f}" for part in (memory.host, memory.checkpoint)]
    elif not cells:
        return None
    return join(line)


def join(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def format_table(heads: Iterable[str], lines: Iterable[str]) -> Iterator[str]:
    heads = [*heads]
    yield join(heads)
    yield "|---" * len(heads) + "|"
    yield from lines
    yield ""


def format_tables() -> Iterator[str]:
    for kind in SETTINGS:
        heads = [f"{kind}: transformer, bucket", *(f"{card} GB" for card in CARDS_GB)]
        heads += ["host", "checkpoint"] if kind == "LoRA" else []
        yield from format_table(heads, filter(None, (format_cards(name, kind) for name in CASES)))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--write", action="store_true", help="write the tables into docs/memory.md")
    arguments, lines = parser.parse_args(), list[str]()
    for line in format_tables():
        print(line, flush=True)
        lines.append(f"{line}\n")
    if arguments.write:
        DOCUMENT.write_text(MARKS.sub(lambda match: f"{match[1]}{''.join(lines)}{match[2]}", DOCUMENT.read_text()))


if __name__ == "__main__":
    main()
