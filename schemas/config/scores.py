"""validation.scores: what `latentpress score` measures of decoded validation samples."""

from collections.abc import Iterator

from pydantic import Field, field_validator

from schemas.config.section import Problem, Section, idle_options


class Scores(Section):
    """Nothing is measured, and no model is loaded, without `clip`."""

    clip: str | None = Field(None, description="folder or repo of a CLIP, for the CLIP score: samples to their prompts")
    clip_revision: str | None = Field(None, description="commit or tag of the repo")
    frames: int = Field(8, ge=1, le=256, description="frames of a clip that are scored, spread evenly")

    @field_validator("clip")
    @classmethod
    def _is_a_source(cls, model: str | None) -> str | None:
        if model is not None and "/" not in model:
            raise ValueError(f"{model!r} is neither a directory nor a repository (owner/name)")
        return model

    @property
    def any(self) -> bool:
        return bool(self.clip)

    def _problems(self) -> Iterator[Problem]:
        if not self.any:
            yield from idle_options(self, ("clip_revision", "frames"), "has no effect without clip; set that, too")
