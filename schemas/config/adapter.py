"""train.adapter: what is trained, a LoRA, a LoKr or the whole model, and where it starts."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer

from schemas.config.section import Count, Problem, Section, check_pattern, foreign_options

AdapterFormat = Literal["diffusers", "comfyui"]
FileFormat = Literal["diffusers", "comfyui", "lycoris"]  # the last is written beside the others, of a LoKr
#: Format -> name of the file. A pipeline given a folder prefers the first name to all others.
FILE_NAMES: dict[FileFormat, str] = {
    "diffusers": "pytorch_lora_weights.safetensors",
    "comfyui": "comfyui_lora.safetensors",
    "lycoris": "lycoris_weights.safetensors",
}
Alpha = Annotated[float, Field(gt=0, le=1e6)]
#: Options of an adapter's type -> the types.
TYPE_OPTIONS = {
    **dict.fromkeys(("rank", "alpha", "rank_pattern", "alpha_pattern", "formats"), ("lora", "lokr")),
    **dict.fromkeys(("dropout", "rslora", "dora", "init_weights"), ("lora",)),
    **dict.fromkeys(("decompose_factor", "decompose_both"), ("lokr",)),
}


class Adapter(Section):
    type: Literal["lora", "lokr", "full"] = Field("lora", description="what is trained; full: the model itself")
    rank: Count = Field(16, description="of the matrices; with init default that of the file")
    alpha: Alpha | None = Field(None, description="default: rank; with init: that of the file")
    dropout: float = Field(0.0, ge=0, lt=1, description="of a LoRA's input")
    targets: tuple[str, ...] | None = Field(
        None, strict=False, description="regular expressions of full module paths; default: the family's"
    )
    rank_pattern: dict[str, Count] = Field({}, description="regular expression -> rank of the modules that it matches")
    alpha_pattern: dict[str, Alpha] = Field({}, description="the same for alpha; default: each module's rank")
    rslora: bool = Field(False, description="rank-stabilized: scaled by alpha / sqrt(rank), not alpha / rank")
    dora: bool = Field(False, description="train the magnitude of each output's weights apart from their direction")
    init_weights: Literal["default", "gaussian", "orthogonal", "pissa", "olora"] = Field(
        "default", description="initial weights of a LoRA, as peft makes them"
    )
    decompose_factor: int = Field(-1, ge=-1, le=65_536, description="of LoKr; -1: near the square root of each side")
    decompose_both: bool = Field(False, description="LoKr: factorize the left matrix too")
    formats: tuple[AdapterFormat, ...] = Field(
        ("diffusers",), strict=False, min_length=1, description="files of the result"
    )
    init: str | None = Field(
        None,
        min_length=1,
        description="adapter file, or folder of one or of its run, to start from; default: a new one",
    )

    @field_validator("targets", "rank_pattern", "alpha_pattern")
    @classmethod
    def _compile(cls, patterns: Any) -> Any:
        for pattern in patterns or ():
            check_pattern(pattern)
        return patterns

    @model_serializer(mode="wrap")
    def _serialize(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without a rank that is that of the initial adapter, as the default would be a given rank when read again."""
        values: dict[str, Any] = handler(self)
        if self.init is not None and "rank" not in self.model_fields_set:
            values.pop("rank", None)
        return values

    def _problems(self) -> Iterator[Problem]:
        if self.init is not None and self.type == "full":
            yield ("init",), "training starts from an adapter only with type: lora or lokr; merge it into the model"
        more = [name for name in ("rank_pattern", "alpha_pattern") if getattr(self, name)]
        more += ["init_weights"] if self.init_weights != "default" else []
        if self.init is not None and more:
            yield ("init",), f"ranks, alphas and weights at the start are those of the file; remove {', '.join(more)}"
        yield from foreign_options(self, "type", TYPE_OPTIONS)
        if self.init_weights in ("pissa", "olora") and self.dora:
            yield (
                ("init_weights",),
                f"{self.init_weights} changes the base weights, so its file holds the difference of two LoRAs, which "
                "DoRA has no place for; use gaussian or orthogonal, or dora: false",
            )
        if self.init_weights == "orthogonal" and any(rank % 2 for rank in (self.rank, *self.rank_pattern.values())):
            yield ("init_weights",), "orthogonal needs even ranks, in rank and in rank_pattern"
        if "comfyui" in self.formats and self.dora:
            yield ("formats",), "comfyui's file has no place for DoRA's magnitudes here; use diffusers alone"
