"""A loaded CLIP score."""

from pathlib import Path

import torch

from cache.store.store import Store
from schemas.config.validation import Scores
from stages.follow.clip_score import ClipScore


def load_clip(folder: Path) -> ClipScore:
    made = ClipScore(Scores(clip=str(folder)), Store(str(folder.parent / "memo")))
    made.load(torch.device("cpu"))
    return made
