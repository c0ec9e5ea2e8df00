"""masks: masks of items that have none, by a segmentation model. They are kept under the root, where `bucket` finds
them in the place of companions."""

from typing import Any

from schemas.cli.console import Console, Options, Report, make_app
from schemas.config.pipeline import Config
from stages.encoding.masks.settings import require_masks
from stages.encoding.stage_registry import MASKS as STAGE


def run(config: Config, options: Options, console: Console, **more: Any) -> Report:
    """more: the options of every encoding stage."""
    require_masks(config)
    return STAGE.run(config, options, console, **more)


ABOUT = "Make masks of pictures and clips that have none, by a segmentation model."
app = make_app("masks", ABOUT, run, passes_to=STAGE.run, divided=True)

if __name__ == "__main__":
    app()
