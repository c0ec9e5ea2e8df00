"""Checkpoints that differ from the tiny ones in a line of JSON, and encoders of every template."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from schemas.catalog import FAMILIES
from schemas.config.encoding import Text
from schemas.family import Template
from stages.encoding.text import gemma, kandinsky5, umt5
from stages.encoding.text.base import TextRequest, TextResult
from tests.project import SETTINGS


@pytest.fixture
def edited(tiny, tmp_path) -> Callable[..., Path]:
    """edited(kind, part, old, new): a copy of the checkpoint in which `new` replaces `old` in the part's JSON files."""

    def copy(kind: str, part: str, old: str, new: str) -> Path:
        for source in tiny(kind).iterdir():
            if source.name != part:
                (tmp_path / source.name).symlink_to(source)
                continue
            (tmp_path / part).mkdir()
            for file in source.iterdir():
                if file.suffix != ".json":
                    (tmp_path / part / file.name).symlink_to(file)
                    continue
                text = file.read_text().replace(old, new)
                json.loads(text)
                (tmp_path / part / file.name).write_text(text)
        return tmp_path

    return copy


@pytest.fixture(scope="session")
def make(tiny) -> Callable[..., Any]:
    """make(kind, dtype, folder=..., **options) -> the encoder of the kind's template, on one thread."""
    torch.set_num_threads(1)

    def encoder(kind: str, dtype: torch.dtype = torch.float32, folder: Path | None = None, **options: Any) -> Any:
        family, task = FAMILIES[SETTINGS[kind]["family"]], kind.rpartition("-")[2]
        template = family.templates[task if task in family.templates else "t2i"]
        module = {"sana": gemma, "wan2.1-t2v": umt5}.get(kind, kandinsky5)
        folder_path, share_prefix = str(folder or tiny(kind)), options.pop("share_prefix", True)
        cpu = torch.device("cpu")
        return module.Encoder(
            folder_path, None, template, template.max_length, dtype, cpu, Text(**options), share_prefix
        )

    return encoder


@pytest.fixture(scope="session")
def encoded() -> Callable[..., list[TextResult]]:
    """encoded(encoder, captions, image=None, negative=False): one batch; an image if the template has one."""

    def run(encoder: Any, captions: list[str], image: Image.Image | None = None, negative: bool = False) -> list:
        template: Template = encoder.template
        images = (image or gradient(),) if template.with_image else ()
        requests = [TextRequest(template.cleaner.text(caption), negative, images) for caption in captions]
        return encoder.encode([encoder.prepare(request) for request in requests])

    return run


def gradient() -> Image.Image:
    ramp = Image.linear_gradient("L").resize((192, 128))
    return Image.merge("RGB", [ramp, ramp.transpose(Image.Transpose.ROTATE_180), ramp.rotate(90)])


ROUNDING = 2.0**-8  # largest relative error of rounding a number to bfloat16


@pytest.fixture(scope="session")
def near(record_testsuite_property) -> Callable[..., None]:
    """near(name, rows): rows of (ours, theirs, exact), where `exact` is in float32 and the other two are in bfloat16.
    Checks that ours is as near to `exact` as theirs, and that both errors are roundings of a few layers; limit: largest
    error."""

    def check(name: str, rows: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], limit: float = 25) -> None:
        gaps: list[list[torch.Tensor]] = [[], [], []]
        for ours, theirs, exact in rows:
            assert ours.dtype == theirs.dtype == torch.bfloat16 and ours.shape == theirs.shape == exact.shape
            scale = exact.square().mean().sqrt() * ROUNDING
            pairs = (ours.float() - exact, theirs.float() - exact, ours.float() - theirs.float())
            for gap, pair in zip(gaps, pairs, strict=True):
                gap.append((pair / scale).flatten())
        ours, theirs, between = (torch.cat(gap) for gap in gaps)
        mean, their_mean, spread = (gap.square().mean().sqrt().item() for gap in (ours, theirs, between))
        most, their_most = (gap.abs().max().item() for gap in (ours, theirs))
        figures = f"{mean:.2f} (the pipeline {their_mean:.2f}), at most {most:.1f} ({their_most:.1f}); gap {spread:.2f}"
        record_testsuite_property(f"bfloat16 roundings, {name}", figures)
        print(f"{name}: {figures}")
        assert mean <= 1.1 * their_mean and most <= 1.25 * their_most
        assert mean <= 5 and most <= limit and spread <= their_mean

    return check
