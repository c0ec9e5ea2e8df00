"""Checkpoints that differ from the tiny ones in a line of JSON, and encoders of every template."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from schemas.config.encoding import Text
from schemas.family import Template
from stages.encoding.text.base import TextRequest, TextResult
from tests.conformance.flavours import ROWS


@pytest.fixture
def edited(tiny, tmp_path) -> Callable[..., Path]:
    """edited(kind, part, old, new): a copy in whose part every JSON file has the string `new` for `old`."""

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
    """make(kind, dtype, folder=..., **options) -> the encoder of a row of the conformance suite, on one thread."""
    torch.set_num_threads(1)

    def encoder(kind: str, dtype: torch.dtype = torch.float32, folder: Path | None = None, **options: Any) -> Any:
        row, text = ROWS[kind], Text(**options)
        template = text.stored_template(row.spec.templates[row.task])
        module = importlib.import_module(f"stages.encoding.text.{row.spec.text_encoder}")
        where, length = str(folder or tiny(row.checkpoint or kind)), text.max_length or template.max_length
        return module.Encoder(where, None, template, length, dtype, torch.device("cpu"), text)

    return encoder


@pytest.fixture(scope="session")
def encoded() -> Callable[..., list[TextResult]]:
    """encoded(encoder, captions, image=None, negative=False): one batch; an image where the template has one."""

    def run(encoder: Any, captions: list[str], image: Image.Image | None = None, negative: bool = False) -> list:
        template: Template = encoder.template
        shown = (image or gradient(),) if template.with_image else ()
        requests = [TextRequest(template.cleaner.text(caption), negative, shown) for caption in captions]
        return encoder.encode([encoder.prepare(request) for request in requests])

    return run


def gradient() -> Image.Image:
    ramp = Image.linear_gradient("L").resize((192, 128))
    return Image.merge("RGB", [ramp, ramp.transpose(Image.Transpose.ROTATE_180), ramp.rotate(90)])
