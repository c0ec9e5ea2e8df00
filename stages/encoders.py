"""The encoding stages: what a program asks that looks at all of them."""

from cache.shard import ENCODERS
from schemas.config import Config
from stages import encode_latents, encode_text, encode_vision
from stages.stage import EncodingStage

STAGES: tuple[EncodingStage, ...] = (encode_text.STAGE, encode_latents.STAGE, encode_vision.STAGE)
KINDS = tuple(stage.kind for stage in STAGES)  # the folders of their shards
assert {stage.kind: stage.name for stage in STAGES} == ENCODERS


def wanted(config: Config) -> list[EncodingStage]:
    """Those whose shards this configuration needs."""
    return [stage for stage in STAGES if stage is not encode_vision.STAGE or config.vision.model]
