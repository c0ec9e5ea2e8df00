"""LoKr through peft: the update of a matrix is alpha / rank times the Kronecker product of two small ones.

`save_lora` writes `pytorch_lora_weights.safetensors` with peft's names and configuration, which `load_lora_weights`
refuses and `pipeline.transformer.load_lora_adapter(folder, prefix="transformer", weight_name=...)` reads.
`trainer/adapters/files.py` writes the files of other programs.
"""

from collections.abc import Mapping
from typing import Any

import torch
from peft import LoKrConfig
from peft.tuners.lokr.layer import Linear, LoKrLayer

from trainer.setup import adapters


class KroneckerLinear(Linear):
    """peft's layer, without making the product: (w1 kron w2) x = w1 X w2^T with X the reshaped x, so that neither the
    product nor its gradient is in memory, and the base may be packed in 4 bits, whose shape peft would take for the
    product's."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.disable_adapters or self.merged:
            return super().forward(x, *args, **kwargs)
        result = self.base_layer(x, *args, **kwargs)
        for name in self.active_adapters:
            w1, w2 = kronecker_factors(self, name)
            x_MN = x.to(w1.dtype).unflatten(-1, (w1.shape[1], w2.shape[1]))
            update = (w1 @ (x_MN @ w2.T)).flatten(-2)  # (..., M, K) -> (..., L, K) -> (..., L * K)
            result = result + self.scaling[name] * update
        return result.to(x.dtype)


def kronecker_factors(layer: LoKrLayer, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """w1 and w2, multiplied out where they are stored as two factors."""
    one, two = ((layer.lokr_w1, layer.lokr_w1_a, layer.lokr_w1_b), (layer.lokr_w2, layer.lokr_w2_a, layer.lokr_w2_b))
    w1, w2 = (whole[name] if name in whole else a[name] @ b[name] for whole, a, b in (one, two))
    return w1, w2


def add_lokr(
    model: Any, scales: Mapping[str, tuple[int, float]], decompose_factor: int = -1, decompose_both: bool = False
) -> None:
    """Freeze the model, and add a float32 LoKr, drawn from torch's generator, to each target.

    scales: full module path -> rank and alpha. decompose_factor: the first factor of each side; -1: near its root.
    """
    model.requires_grad_(False)
    for expert, own in adapters.scales_by_component(model, scales):
        rank, alpha, patterns = adapters.scale_settings(own)
        config = LoKrConfig(
            r=rank,
            alpha=alpha,  # type: ignore[arg-type]  # peft takes fractions
            target_modules=[*own],
            decompose_factor=decompose_factor,
            decompose_both=decompose_both,
            **patterns,
        )
        expert.add_adapter(config, adapters.ADAPTER_NAME)
        for path, layer in [*expert.named_modules()]:
            if isinstance(layer, Linear):
                r, scale = own[path]
                ours = KroneckerLinear(layer.get_base_layer(), adapters.ADAPTER_NAME, config=config, r=r, alpha=scale)
                expert.set_submodule(path, ours)
    adapters.finish_adapter(model, [*scales])
