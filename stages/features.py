"""features: what each picture and clip is like, before anything is planned: a vector by DINOv2, and measures."""

from typing import Any

from schemas.cli.console import Console, Options, Report, make_app
from schemas.config.pipeline import Config
from stages.encoding.features.settings import require_features
from stages.encoding.stage_registry import FEATURES as STAGE


def run(config: Config, options: Options, console: Console, **more: Any) -> Report:
    """more: the options of every encoding stage."""
    require_features(config)
    return STAGE.run(config, options, console, **more)


ABOUT = "Measure pictures and clips, and make a vector of each by a DINOv2."
app = make_app("features", ABOUT, run, passes_to=STAGE.run)

if __name__ == "__main__":
    app()
