"""What a checkpoint's own config.json says, read without loading anything else of it."""

import json
from pathlib import Path
from typing import Any

from schemas.config import Model
from schemas.errors import LatentpressError

#: NABLA attention works on blocks of 8x8 patches of 2x2 latents of 8x8 pixels.
NABLA_SIDE = 128


def transformer_config(model: Model) -> dict[str, Any]:
    """The transformer's config.json, from the local directory or the hub's cache (fetched when it is absent)."""
    source = Path(model.source)
    if source.is_dir():
        path = source / "transformer" / "config.json"
    else:
        path = Path(_from_hub(model))
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise LatentpressError(
            f"{path} is not there: {model.source} is no checkpoint in diffusers layout",
            "set model.path to a directory that holds transformer/, vae/, text_encoder/ and the like",
        ) from error


def side_multiple(model: Model) -> int:
    """What both sides of a bucket must be multiples of, in pixels: more where the checkpoint's attention is NABLA."""
    if model.spec.transformer == "kandinsky5" and transformer_config(model).get("attention_type") == "nabla":
        return NABLA_SIDE
    return model.spec.side_multiple


def _from_hub(model: Model) -> str:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return hf_hub_download(model.source, "transformer/config.json", revision=model.revision)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise LatentpressError(
            f"transformer/config.json of {model.source} can't be had: {error}",
            "set model.path to a local copy, or check the network, HF_ENDPOINT and HF_HUB_OFFLINE",
        ) from error
