"""masks: makes masks of items without a mask, with a segmentation model. The masks are stored under the root, from
which `bucket` reads them like companion files."""

from typing import Any

from schemas.cli.console import Console, Options, Report, make_app
from schemas.config.pipeline import Config
from stages.encoding.masks.settings import require_masks
from stages.encoding.stage_registry import MASKS as STAGE


def run(config: Config, options: Options, console: Console, **stage_options: Any) -> Report:
    """stage_options: options of all encoding stages."""
    require_masks(config)
    return STAGE.run(config, options, console, **stage_options)


ABOUT = "Make masks of pictures and clips without a mask, with a segmentation model."
app = make_app("masks", ABOUT, run, passes_to=STAGE.run, divided=True)

if __name__ == "__main__":
    app()
