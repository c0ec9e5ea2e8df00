"""How a picture file says that it is a preview, decoded by a tiny autoencoder: a text chunk of the PNG."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.PngImagePlugin import PngInfo

KEY, PREVIEW = "latentpress", "preview"


def preview_mark() -> "PngInfo":
    """For Pillow's `save`."""
    from PIL.PngImagePlugin import PngInfo

    mark = PngInfo()
    mark.add_text(KEY, PREVIEW)
    return mark


def is_preview(path: Path) -> bool:
    """Whether a picture has the mark; reads its header alone. A file that can't be read has none."""
    from PIL import Image

    if path.suffix != ".png":
        return False
    try:
        with Image.open(path) as image:
            return image.info.get(KEY) == PREVIEW
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return False
