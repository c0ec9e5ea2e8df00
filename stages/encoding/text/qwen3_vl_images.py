"""Images inside the prompts of a model with DeepStack. Features of several layers of its vision model are added to the
states after the first layers of the language model, in addition to the features that replace the placeholders."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.vision_utils import (
    get_vision_attention_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from schemas.devices import to_device_together
from stages.encoding.text.qwen_vl_images import ImagePromptModel, ProcessedImage
from stages.encoding.text.reader import PreparedPrompt


class DeepstackPromptModel(ImagePromptModel):
    """Features of an image are (tokens, D + K D): of the placeholders, and of the first K layers."""

    def __init__(self, model: Any, *arguments: Any) -> None:
        self._added_BLD: list[torch.Tensor] = []  # of the current pass, one for each of the first layers
        super().__init__(model, *arguments)
        # The stock method selects the images' tokens by a mask, for which it waits for the device.
        model.language_model.__dict__["_deepstack_process"] = lambda hidden, mask, added: hidden + added

    def _features(self, picture: ProcessedImage) -> torch.Tensor:
        """Features (tokens, D + K D) of one image. Positions are computed here, because the model would wait for the
        device to read the sizes."""
        visual, grid_13 = self._model_with_vision.visual, picture.grid_3[None]
        indices, weights = get_vision_interpolation_indices_and_weights(
            grid_13,
            num_grid_per_side=visual.num_grid_per_side,
            mode=visual.interpolation_mode,
            align_corners=visual.interpolation_align_corners,
            spatial_merge_size=visual.spatial_merge_size,
        )
        ends, longest = get_vision_attention_seqlens(grid_13, visual.config)
        host = [picture.pixels, indices, weights, get_vision_position_ids(grid_13, visual.spatial_merge_size)]
        if "flash" in visual.config._attn_implementation:  # other kernels read the ends on the host
            host.append(ends)
        pixels, indices, weights, positions, *moved = to_device_together(host, self.device)
        [ends] = moved or [ends]
        prepared: dict[str, Any] = {"interp_indices": indices, "interp_weights": weights, "position_ids": positions}
        prepared |= {"cu_seqlens": ends, **({} if longest is None else {"max_seqlen": longest})}
        output = self._model_with_vision.get_image_features(pixels, grid_13, **prepared)
        return torch.cat([output.pooler_output[0], *(layer[0] for layer in output.deepstack_features)], dim=1)

    def embeds(self, texts: Sequence[PreparedPrompt], ids_BL: torch.Tensor) -> torch.Tensor:
        embeds_BLD = self._model.get_input_embeddings()(ids_BL)
        layers = len(self._model_with_vision.visual.deepstack_visual_indexes)
        self._added_BLD = [torch.zeros_like(embeds_BLD) for _ in range(layers)]
        for row, place, features in self._placed_features(texts):
            parts = features.to(embeds_BLD.dtype).split(embeds_BLD.shape[-1], dim=1)
            for target, part in zip((embeds_BLD, *self._added_BLD), parts, strict=True):
                target[row, place] = part
        return embeds_BLD

    def _run(self, **inputs: Any) -> torch.Tensor:
        added, self._added_BLD = self._added_BLD, []
        return super()._run(**inputs, **({"deepstack_visual_embeds": added} if added else {}))
