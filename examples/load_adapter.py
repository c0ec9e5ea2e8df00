"""Load a trained adapter or model in its diffusers pipeline and show that it changes the output.

    python -m examples.load_adapter demo/t2i demo/sana

Each argument is a project folder with a pipeline.yaml and a finished run. The pipeline is made without text
encoders; the trained transformer's output is compared with the base model's for the same input.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from schemas.config import Config
from schemas.loading import load

NAMES = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
PIPELINES = {
    ("kandinsky5-image", "t2i"): "Kandinsky5T2IPipeline",
    ("kandinsky5-image", "i2i"): "Kandinsky5I2IPipeline",
    ("kandinsky5-video", "t2v"): "Kandinsky5T2VPipeline",
    ("kandinsky5-video", "i2v"): "Kandinsky5I2VPipeline",
    ("sana", "t2i"): "SanaPipeline",
}


def main() -> None:
    torch.manual_seed(0)
    for folder in map(Path, sys.argv[1:]):
        config = load(folder / "pipeline.yaml")
        difference = compare(config)
        print(f"  {folder.name}: loaded in {pipeline_name(config)}; mean |change of the output| = {difference:.4f}")
        if not difference > 0:
            sys.exit(f"{folder}: what was trained does not change the output")


def pipeline_name(config: Config) -> str:
    return PIPELINES[config.model.family, config.model.task]


@torch.no_grad()
def compare(config: Config) -> float:
    """Mean absolute difference of the transformer's output before and after loading what was trained."""
    import diffusers

    diffusers.utils.logging.disable_progress_bar()
    cls = getattr(diffusers, pipeline_name(config))
    without = dict.fromkeys(name for name in NAMES if config.model.family != "sana" or not name.endswith("_2"))
    pipeline = cls.from_pretrained(config.model.source, use_safetensors=True, **without)
    run = Path(config.output) / config.train.run
    inputs = example_inputs(pipeline.transformer)
    before = output(pipeline.transformer, inputs)
    if config.train.adapter.type == "full":
        trained = type(pipeline.transformer).from_pretrained(run / "model" / "transformer", use_safetensors=True)
    else:
        pipeline.load_lora_weights(run / "adapter")
        trained = pipeline.transformer
    return (output(trained, inputs) - before).abs().mean().item()


def example_inputs(transformer: Any) -> dict:
    """Random inputs of the transformer's own widths."""
    config = transformer.config
    if "caption_channels" in config:
        return {
            "hidden_states": torch.randn(1, config.in_channels, 8, 8),
            "encoder_hidden_states": torch.randn(1, 12, config.caption_channels),
            "timestep": torch.tensor([500.0]),
        }
    channels = 2 * config.in_visual_dim + 1 if config.visual_cond else config.in_visual_dim
    return {
        "hidden_states": torch.randn(1, 1, 8, 8, channels),
        "encoder_hidden_states": torch.randn(1, 12, config.in_text_dim),
        "pooled_projections": torch.randn(1, config.in_text_dim2),
        "timestep": torch.tensor([500.0]),
        "visual_rope_pos": [torch.arange(1), torch.arange(4), torch.arange(4)],
        "text_rope_pos": torch.arange(12),
    }


def output(transformer: Any, inputs: dict) -> torch.Tensor:
    return transformer(**inputs, return_dict=True).sample


if __name__ == "__main__":
    main()
