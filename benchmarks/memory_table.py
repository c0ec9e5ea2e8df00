"""What fits which card: the memory that training needs, predicted for the published shapes on any machine.

python -m benchmarks.memory_table             the table of docs/memory.md, on standard output
python -m benchmarks.memory_table --write     into docs/memory.md
"""

import re
from pathlib import Path
from typing import Any

from benchmarks.common import make_parser
from examples.tiny_shapes import SHAPES
from schemas.config.pipeline import Config
from trainer.memory_estimate import MemoryEstimate, estimate_memory

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "memory.md"
MARKS = re.compile("(<!-- benchmarks.memory_table -->\n).*(<!-- end -->\n)", re.DOTALL)
CARDS_GB = (12, 16, 24, 48, 80)
#: of a card, for the CUDA context, kernels' own memory and fragments
RESERVED_GIB = 1.0

TRUE, PRO = SHAPES["true"], SHAPES["pro"]
#: name -> (family, flavour, transformer's configuration, bucket, tokens of a long caption)
MODELS: dict[str, tuple[str, str, dict[str, Any], str, int]] = {
    "Sana 1.6B": ("sana", "sana-1.6b-1024px", TRUE["sana"], "1024x1024", 300),
    "Image Lite": ("kandinsky5-image", "t2i-lite-sft", TRUE["image"] | {"visual_cond": False}, "1024x1024", 512),
    "Video Lite, 61 frames": ("kandinsky5-video", "t2v-lite-sft-5s", TRUE["video"], "768x512@61", 512),
    "Video Lite, 121 frames": ("kandinsky5-video", "t2v-lite-sft-5s", TRUE["video"], "768x512@121", 512),
    "Video Pro, 61 frames": ("kandinsky5-video", "t2v-pro-sft-5s-hd", PRO["video"], "768x512@61", 512),
}
LORA = {"type": "lora", "rank": 32}
#: from the fastest to the one that needs least
SETTINGS: dict[str, dict[str, Any]] = {
    "LoRA, no checkpointing": {"adapter": LORA, "gradient_checkpointing": False},
    "LoRA, interval 2": {"adapter": LORA, "gradient_checkpointing_interval": 2},
    "LoRA": {"adapter": LORA},
    "LoRA, block offload": {"adapter": LORA, "offload": {"blocks": True}},
    "LoRA, block and activation offload": {"adapter": LORA, "offload": {"blocks": True, "activations": True}},
    "full rank": {"adapter": {"type": "full"}},
}


def estimate(model: str, settings: str) -> MemoryEstimate:
    family, flavour, shape, bucket, tokens = MODELS[model]
    dataset = {"id": "none", "instance_data_dir": "none"} | ({"dataset_type": "video"} if "video" in family else {})
    sections = {"model": {"family": family, "flavour": flavour, "precision": "bfloat16"}, "datasets": [dataset]}
    config = Config.model_validate({"root": "none", "output": "none", "train": SETTINGS[settings], **sections})
    return estimate_memory(config, shape, [bucket], tokens)


def format_row(model: str, settings: str) -> str:
    """One line of the table: GiB of each part, and the smallest card."""
    found = estimate(model, settings)
    parts = (found.device, found.weights, found.gradients + found.optimizer, found.activations, found.host)
    need = found.device / 2**30 + RESERVED_GIB
    fits = next((f"{card} GB" for card in CARDS_GB if need <= card * 1e9 / 2**30), "none of these")
    return " | ".join(["", model, settings, *(f"{part / 2**30:.1f}" for part in parts), fits, ""]).strip()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--write", action="store_true", help="into docs/memory.md")
    arguments = parser.parse_args()
    heads = ["", "transformer, bucket", "settings", "device", "weights", "gradients, states", "activations", "host"]
    lines = [" | ".join([*heads, "smallest card", ""]).strip(), "|---" * 8 + "|"]
    lines += [format_row(model, settings) for model in MODELS for settings in SETTINGS]
    table = "".join(f"{line}\n" for line in lines)
    print(table)
    if arguments.write:
        DOCUMENT.write_text(MARKS.sub(lambda found: f"{found[1]}{table}{found[2]}", DOCUMENT.read_text()))


if __name__ == "__main__":
    main()
