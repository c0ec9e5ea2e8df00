"""diffusers' modular pipeline of FLUX.3, called like a pipeline, so that the checks of a row are those of all rows."""

from pathlib import Path
from typing import Any

import torch
from diffusers import ClassifierFreeGuidance, Flux3AutoBlocks, Flux3ModularPipeline
from diffusers.modular_pipelines.flux3.encoders import Flux3TextEncoderStep
from diffusers.utils.torch_utils import randn_tensor
from PIL.Image import Image

from examples.load_adapter import ChatTokenizer


class Flux3Pipeline(Flux3ModularPipeline):
    """Texts are encoded by `encode_prompt`, which is the pipeline's own step, and the remaining blocks do the rest."""

    def __init__(self, folder: Path | None = None) -> None:
        blocks = Flux3AutoBlocks()
        for name in ("prompt_upsampler", "text_encoder"):
            blocks.sub_blocks.pop(name)
        super().__init__(blocks=blocks, pretrained_model_name_or_path=folder)
        self.text_encoder = self.tokenizer = None

    @classmethod
    def of(cls, folder: Path, texts: bool, dtype: torch.dtype) -> "Flux3Pipeline":
        from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

        pipe = cls(folder)
        pipe.load_components(dtype=dtype)
        if texts:
            encoder = Qwen3VLForConditionalGeneration.from_pretrained(folder / "text_encoder", dtype=dtype)
            pipe.text_encoder = encoder
            pipe.tokenizer = ChatTokenizer(AutoTokenizer.from_pretrained(folder / "text_encoder"))
        return pipe

    def register_modules(self, **parts: Any) -> None:
        for name, part in parts.items():
            setattr(self, name, part)

    @torch.no_grad()
    def encode_prompt(self, prompt: str, negative: str, longest: int = 8192) -> tuple[torch.Tensor, torch.Tensor]:
        """(1, window, D) of both texts."""
        encode = Flux3TextEncoderStep._get_qwen3_vl_prompt_embeds
        found = [encode(self.text_encoder, self.tokenizer, text, "cpu", longest) for text in (prompt, negative)]
        return found[0], found[1]

    def __call__(
        self,
        prompt: str,
        negative_prompt: str,
        height: int,
        width: int,
        guidance_scale: float,
        num_inference_steps: int,
        image: Image | list[Image] | None = None,
        **options: Any,
    ) -> tuple[Any]:
        embeds, negative = self.encode_prompt(prompt, negative_prompt)
        self.update_components(guider=ClassifierFreeGuidance(guidance_scale=guidance_scale))
        sides = height // 16, width // 16
        found = super().__call__(
            prompt_embeds=embeds,
            negative_prompt_embeds=negative,
            height=height,
            width=width,
            latents=randn_tensor((1, self.num_channels_latents, *sides), dtype=self.transformer.dtype),
            num_inference_steps=num_inference_steps,
            **({} if image is None else {"image": image}),
            output="latents",
        )
        return (found.flatten(2).transpose(1, 2),)
