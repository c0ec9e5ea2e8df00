"""validation: the eval loss, and prompts that are denoised while training."""

from pydantic import Field

from schemas.config.attention import AttentionBackend
from schemas.config.section import SIZE, Name, Section, Seed, Steps, UnitFloat


class Prompt(Section):
    name: Name
    prompt: str
    negative_prompt: str | None = Field(None, description="default: the pipeline's own")
    image: str | None = Field(None, description="source image (i2i), first frame or clip (i2v)")


class Validation(Section):
    prompts: tuple[Prompt, ...] = Field((), strict=False)
    size: str | None = Field(None, pattern=SIZE, description="WxH or WxH@F; default: the family's resolution, square")
    every: Steps = Field(500, description="steps")
    steps: int | None = Field(None, ge=1, le=10_000, description="denoising steps; default: the family's")
    guidance: float | None = Field(None, ge=0, le=1000, description="default: the family's")
    shift: float | None = Field(None, gt=0, le=1000, description="of the sampling schedule; default: the checkpoint's")
    seed: Seed = 0
    attention_backend: AttentionBackend | None = Field(None, description="of prompts; default: train.attention_backend")
    eval_samples: int = Field(8, ge=0, le=1_000_000, description="samples of the fixed-grid eval loss; 0: none")
    eval_sigmas: tuple[UnitFloat, ...] = Field((0.2, 0.4, 0.6, 0.8), strict=False)
    fps: float | None = Field(None, gt=0, le=1000, description="of decoded videos; default: the first video dataset's")
