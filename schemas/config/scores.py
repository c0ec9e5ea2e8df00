"""validation.scores: what `latentpress score` measures of decoded validation samples."""

from collections.abc import Iterator

from pydantic import Field, field_validator

from schemas.config.section import Problem, Section, idle_options


class Scores(Section):
    """Nothing is measured, and no model is loaded, without `clip` or `dinov2`."""

    clip: str | None = Field(None, description="folder or repo of a CLIP, for the CLIP score: samples to their prompts")
    clip_revision: str | None = Field(None, description="commit or tag of the repo")
    dinov2: str | None = Field(None, description="folder or repo of a DINOv2: similarity of samples to `references`")
    dinov2_revision: str | None = Field(None, description="commit or tag of the repo")
    references: str | None = Field(
        None, description="folder of pictures of the subject or the style that is trained, for `dinov2`"
    )
    frames: int = Field(8, ge=1, le=256, description="frames of a clip that are scored, spread evenly")

    @field_validator("clip", "dinov2")
    @classmethod
    def _is_a_source(cls, model: str | None) -> str | None:
        if model is not None and "/" not in model:
            raise ValueError(f"{model!r} is neither a directory nor a repository (owner/name)")
        return model

    @property
    def any(self) -> bool:
        return bool(self.clip or self.dinov2)

    def _problems(self) -> Iterator[Problem]:
        if self.dinov2 and not self.references:
            yield ("dinov2",), "needs references: a folder of pictures to which samples are compared"
        if not self.dinov2:
            yield from idle_options(self, ("dinov2_revision", "references"), "has no effect without dinov2; set that")
        if not self.clip:
            yield from idle_options(self, ("clip_revision",), "has no effect without clip; set that, or remove this")
        if not self.any:
            yield from idle_options(self, ("frames",), "has no effect without clip or dinov2; set one, or remove this")
