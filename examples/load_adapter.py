"""Loads trained weights in their diffusers pipeline, and shows that they change the output, or makes a picture or clip.

    python examples/load_adapter.py photos.yaml
    python examples/load_adapter.py photos.yaml --prompt "A tabby cat looks into the camera." --out cat.png

Each argument is the configuration of a finished run. Without --prompt, the pipeline is loaded without text encoders,
and the outputs of the trained transformer and of the base model are compared for the same input. The processor of the
Kandinsky 5 pipelines has a part for videos that requires torchvision, but is not used by a pipeline. If torchvision is
not installed, `missing_components` makes the processor without this part.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from schemas.cli.starting import silence_libraries
from schemas.config.loading import load_config
from schemas.config.pipeline import Config
from schemas.config.section import listed
from schemas.errors import LatentpressError
from schemas.geometry import Bucket


def main(argv: Sequence[str] | None = None) -> None:
    silence_libraries()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+", type=Path, metavar="CONFIG", help="pipeline.yaml of a finished run")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override of an option, like in `latentpress`"
    )
    parser.add_argument("--prompt", help="prompt of the picture or clip to make")
    parser.add_argument("--image", type=Path, nargs="+", help="source picture(s) (i2i) or first frame (i2v)")
    parser.add_argument("--out", type=Path, help="file to write: .png or .jpg, for a clip .webp or .gif")
    parser.add_argument("--size", help="default: validation.size, else the default of the pipeline")
    parser.add_argument("--steps", type=int, help="default: validation.steps, else the default of the flavour")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    if (arguments.prompt is None) != (arguments.out is None):
        parser.error("--prompt and --out must be used together")
    try:
        configs = [run for path in arguments.configs for run in load_config(path, arguments.set).expert_runs]
    except LatentpressError as error:
        sys.exit(f"error: {error}")
    for config in configs:
        if not config.model.family_spec.pipelines:
            sys.exit(f"error: diffusers does not have a pipeline for {config.model.family}")
        if not config.result_folder.is_dir():
            sys.exit(f"error: {config.result_folder} does not exist; run latentpress train first")
        if arguments.prompt is None:
            check_output_changes(config)
        else:
            generate(config, arguments)


def pipeline_name(config: Config) -> str:
    return config.model.family_spec.pipelines[config.model.task]


def missing_components(config: Config) -> dict[str, Any]:
    """Components that from_pretrained can't make on this machine, to pass to it: the processor of Qwen2-VL, which
    Kandinsky 5 has instead of a tokenizer."""
    if "torchvision" not in config.model.family_spec.pipeline_packages or find_spec("torchvision") is not None:
        return {}
    from transformers import AutoTokenizer

    if config.model.family_spec.modular:
        return {
            "tokenizer": ChatTokenizer(AutoTokenizer.from_pretrained(config.model.source, subfolder="text_encoder"))
        }
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor

    folder = "processor" if "processor" in config.model.family_spec.text_components else "tokenizer"
    if "tokenizer" not in config.model.family_spec.text_components:
        return {folder: make_processor(config)}

    class WithoutVideos(Qwen2VLProcessor):
        def __init__(self) -> None:
            options: dict[str, Any] = {"revision": config.model.revision}
            self.tokenizer = AutoTokenizer.from_pretrained(config.model.source, subfolder="tokenizer", **options)
            self.image_processor = Qwen2VLImageProcessorPil.from_pretrained(
                config.model.source, subfolder=folder, **options
            )
            self.video_processor = self.chat_template = None
            self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
            self.image_token_id = self.tokenizer.convert_tokens_to_ids(self.image_token)
            self.video_token_id = self.tokenizer.convert_tokens_to_ids(self.video_token)

    return {folder: WithoutVideos()}


def make_processor(config: Config) -> Any:
    """Qwen3-VL's processor without its video part, which needs torchvision."""
    from transformers import AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    class WithoutVideos(Qwen3VLProcessor):
        def __init__(self) -> None:
            options: dict[str, Any] = {"subfolder": "processor", "revision": config.model.revision}
            self.tokenizer = AutoTokenizer.from_pretrained(config.model.source, **options)
            self.image_processor = Qwen2VLImageProcessorPil.from_pretrained(config.model.source, **options)
            self.video_processor, self.chat_template = None, self.tokenizer.chat_template
            self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
            names = "image_pad", "video_pad", "vision_start", "vision_end"
            ids = self.tokenizer.convert_tokens_to_ids([f"<|{name}|>" for name in names])
            self.image_token_id, self.video_token_id, self.vision_start_token_id, self.vision_end_token_id = ids

    return WithoutVideos()


class ChatTokenizer:
    """The parts of Qwen3-VL's processor that a pipeline uses for prompts without images."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.apply_chat_template = tokenizer, tokenizer.apply_chat_template


def base_pipeline(config: Config, **components: Any) -> Any:
    """The pipeline of the checkpoint. components: components that replace the checkpoint's; None leaves one
    out."""
    import diffusers

    diffusers.utils.logging.disable_progress_bar()
    options = {"revision": config.model.revision, "dtype": getattr(torch, config.model.precision)}
    if modular := config.model.family_spec.modular:
        blocks = getattr(diffusers, modular.blocks)()
        for name in modular.skipped:
            blocks.sub_blocks.pop(name)
        pipeline = blocks.init_pipeline(config.model.source)
        left_out = {name for name, component in components.items() if component is None}
        places = {name: pipeline.get_component_spec(name).subfolder for name in pipeline.pretrained_component_names}
        pipeline.update_components(**{name: value for name, value in components.items() if value is not None})
        names = [name for name, folder in places.items() if folder not in left_out and name not in components]
        pipeline.load_components(names, **options)
        return pipeline
    pipeline_class = getattr(diffusers, pipeline_name(config))
    return pipeline_class.from_pretrained(config.model.source, use_safetensors=True, **options, **components)


def load_trained(pipeline: Any, config: Config) -> None:
    """Load the trained weights into the pipeline."""
    result, base = config.result_folder, getattr(pipeline, config.part)
    modular = config.model.family_spec.modular
    if config.train.adapter.type == "full":
        trained = type(base).from_pretrained(result, use_safetensors=True, dtype=base.dtype)
        replace_parts = pipeline.update_components if modular else pipeline.register_modules
        replace_parts(**{config.part: trained})
    elif config.train.adapter.type == "lokr":  # load_lora_weights supports only LoRA
        base.load_lora_adapter(result, prefix="transformer", weight_name="pytorch_lora_weights.safetensors")
    else:
        second = {"load_into_transformer_2": True} if config.part == "transformer_2" else {}
        pipeline.load_lora_weights(result, **second)


def generate(config: Config, arguments: argparse.Namespace) -> None:
    """Write a picture or clip of the prompt."""
    from PIL import Image

    pipeline = base_pipeline(config, **missing_components(config))
    load_trained(pipeline, config)
    modular = config.model.family_spec.modular
    if torch.cuda.is_available():
        pipeline.to("cuda") if modular else pipeline.enable_model_cpu_offload()
    options: dict[str, Any] = {"prompt": arguments.prompt, "generator": torch.Generator().manual_seed(arguments.seed)}
    family, flavour = config.model.family_spec, config.model.flavour_spec
    options["num_inference_steps"] = arguments.steps or next(
        iter(listed(config.validation.steps)), flavour.steps or family.steps
    )
    if flavour.guidance is not None:
        options[family.guidance_argument] = flavour.guidance
    if arguments.image:
        images = [Image.open(path).convert("RGB") for path in arguments.image]
        options["image"] = images if len(images) > 1 else images[0]
    if size_text := arguments.size or next(iter(listed(config.validation.size)), None):
        size = Bucket.parse(size_text)
        options |= {"width": size.width, "height": size.height}
        if hasattr(pipeline, "resolutions"):
            pipeline.resolutions = [(size.width, size.height)]  # otherwise it uses the nearest of its resolutions
        if "use_resolution_binning" in signature(pipeline.__call__).parameters:
            options["use_resolution_binning"] = False
        if config.model.family_spec.video:
            options["num_frames"] = size.frames
    [result] = pipeline(**options, output="images") if modular else pipeline(**options, output_type="pil")[0]
    frames = result if isinstance(result, list) else [result]
    duration = 1000 / config.clip_rate
    clip = {"save_all": True, "append_images": frames[1:], "duration": duration} if len(frames) > 1 else {}
    frames[0].save(arguments.out, **clip)
    print(f"{arguments.out}: {pipeline_name(config)}, {config.run_name}")


@torch.no_grad()
def check_output_changes(config: Config) -> None:
    """Print the mean absolute change of the transformer's output by the trained weights. Exits if the output does not
    change."""
    torch.manual_seed(0)
    # Qwen-Image-2.1's pipeline asks its processor for the tokens of its system prompt when it is made.
    left_out = dict.fromkeys(name for name in config.model.family_spec.text_components if name != "processor")
    pipeline = base_pipeline(config, **missing_components(config) | left_out)
    inputs = example_inputs(getattr(pipeline, config.part))
    before = getattr(pipeline, config.part)(**inputs, return_dict=True).sample[0]  # the only sample of the batch
    load_trained(pipeline, config)
    difference = (getattr(pipeline, config.part)(**inputs, return_dict=True).sample[0] - before).abs().mean().item()
    folder = Path(config.output).parent.name + (f", {config.train.experts}" if config.train.experts else "")
    print(f"  {folder}: loaded in {pipeline_name(config)}; mean |change of the output| = {difference:.4f}")
    if not difference > 0:
        sys.exit(f"{folder}: the trained weights do not change the output")


def example_inputs(transformer: Any) -> dict:
    """Random inputs with the widths of the transformer's configuration."""
    config = transformer.config
    if "caption_channels" in config:
        return {
            "hidden_states": torch.randn(1, config.in_channels, 8, 8),
            "encoder_hidden_states": torch.randn(1, 12, config.caption_channels),
            "timestep": torch.tensor([500.0]),
        }
    if "num_single_layers" in config:
        return {
            "hidden_states": torch.randn(1, 16, config.in_channels),
            "encoder_hidden_states": torch.randn(1, 12, config.joint_attention_dim),
            "timestep": torch.tensor([0.5]),
            "img_ids": torch.cartesian_prod(*(torch.arange(side) for side in (1, 4, 4, 1))),
            "txt_ids": torch.cartesian_prod(*(torch.arange(side) for side in (1, 1, 1, 12))),
        }
    if "joint_attention_dim" in config:
        return {
            "hidden_states": torch.randn(1, 16, config.in_channels),
            "encoder_hidden_states": torch.randn(1, 12, config.joint_attention_dim),
            "timestep": torch.tensor([0.5]),
            "img_shapes": [[(1, 4, 4)]],
        }
    if "context_in_dim" in config:
        return {
            "hidden_states": torch.randn(1, 16, config.in_channels),
            "encoder_hidden_states": torch.randn(1, 12, config.context_in_dim),
            "timestep": torch.tensor([0.5]),
            "img_shapes": [[(1, 4, 4)]],
            "img_mask": torch.arange(16)[None] >= 12,  # a slot for 2x2 latents
        }
    if "num_text_layers" in config:
        return {
            "hidden_states": torch.randn(1, 16, config.in_channels),
            "encoder_hidden_states": torch.randn(1, 12, config.num_text_layers, config.text_hidden_dim),
            "timestep": torch.tensor([0.5]),
            "position_ids": torch.cat([torch.zeros(12, 3), torch.cartesian_prod(*map(torch.arange, (1, 4, 4)))]),
        }
    if "cap_feat_dim" in config:
        return {
            "x": [torch.randn(config.in_channels, 1, 8, 8)],
            "t": torch.tensor([0.5]),
            "cap_feats": [torch.randn(12, config.cap_feat_dim)],
        }
    if "text_dim" in config:
        return {
            "hidden_states": torch.randn(1, config.in_channels, 1, 8, 8),
            "encoder_hidden_states": torch.randn(1, 12, config.text_dim),
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


if __name__ == "__main__":
    main()
