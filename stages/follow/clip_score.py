"""CLIP, by `transformers`: unit vectors of pictures and of texts.

The CLIP score of a picture (Hessel et al. 2021, https://arxiv.org/abs/2104.08718, as torchmetrics scales it) is
max(100 * cos(picture, prompt), 0); of a clip it is the mean of its frames'. Preprocessing is that of the checkpoint's
preprocessor_config.json, by Pillow, so that a score does not depend on whether torchvision is installed.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from cache.models.weights import load_pretrained
from stages.encoding import model_loading


class Clip:
    """One CLIP, for inference in float32."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        """Raises WeightsError for damaged files and for missing weights."""
        from transformers import AutoTokenizer, CLIPModel
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        with model_loading.reading_errors(str(folder), "the CLIP"):
            model = load_pretrained(CLIPModel, folder, dtype=torch.float32)
            self._processor: Any = CLIPImageProcessorPil.from_pretrained(folder)
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = model.eval().to(device)
        self._device = device
        self.max_tokens: int = model.config.text_config.max_position_embeddings

    @torch.no_grad()
    def embed_frames(self, frames_FHWC: np.ndarray) -> torch.Tensor:
        """(F, D) of uint8 frames."""
        pixels_FCHW = self._processor(images=list(frames_FHWC), return_tensors="pt")["pixel_values"]
        pooled_FC = self._model.vision_model(pixel_values=pixels_FCHW.to(self._device)).pooler_output
        return _to_unit(self._model.visual_projection(pooled_FC))

    @torch.no_grad()
    def embed_text(self, text: str) -> torch.Tensor:
        """(D,). Of a longer text the first tokens and the end token, as CLIP itself cuts it."""
        tokens = self._tokenizer(text, truncation=True, max_length=self.max_tokens, return_tensors="pt")
        pooled_1C = self._model.text_model(**tokens.to(self._device)).pooler_output
        return _to_unit(self._model.text_projection(pooled_1C))[0]

    def find_cut(self, prompt: str) -> tuple[int, int] | None:
        """(tokens, how many of them count) of a prompt that is too long; the begin and the end token included."""
        tokens = len(self._tokenizer(prompt, verbose=False)["input_ids"])
        return (tokens, self.max_tokens) if tokens > self.max_tokens else None

    def score(self, frames_FHWC: np.ndarray, prompt: str) -> float:
        """The CLIP score, 0 to 100."""
        cosine_F = self.embed_frames(frames_FHWC) @ self.embed_text(prompt)
        return (100 * cosine_F).clamp(min=0).mean().item()


def _to_unit(vectors_ND: torch.Tensor) -> torch.Tensor:
    return vectors_ND / vectors_ND.norm(dim=-1, keepdim=True)
