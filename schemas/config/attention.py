"""Attention backends, as diffusers names them."""

from typing import Annotated, Literal

from pydantic import AfterValidator

AttentionBackend = Literal[
    "native", "_native_flash", "_native_cudnn", "_native_efficient", "_native_math", "flash", "flash_hub",
    "_flash_3_hub", "xformers", "sage", "sage_hub",
]  # fmt: skip


def _refuse_inference_kernels(name: str) -> str:
    if name.startswith("sage"):
        raise ValueError(
            f"{name}: SageAttention's kernels have no backward pass, so they can't train; it is valid for "
            "validation.attention_backend"
        )
    return name


TrainingBackend = Annotated[AttentionBackend, AfterValidator(_refuse_inference_kernels)]
