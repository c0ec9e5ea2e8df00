"""caption: captions for items that have none, or for all, by a vision-language model. In place of a plan of samples,
which needs captions, it has one of the media tables' items.

They are kept under the root, where `bucket` finds them, and the user's folders are not touched unless --write-files.
"""

import time
from typing import Annotated, Any

import typer

from cache.store.store import Store
from schemas.cli.console import Console, Options, Report, make_app
from schemas.config.pipeline import Config
from schemas.text_format import shorten
from stages.encoding.caption_files import list_writable, write_caption_files
from stages.encoding.captions.settings import require_caption
from stages.encoding.stage_registry import CAPTION as STAGE

_WRITE_HELP = "Also write <name>.txt beside media in local folders, where there is none."


def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    write_files: Annotated[bool, typer.Option("--write-files", help=_WRITE_HELP)] = False,
    **more: Any,
) -> Report:
    """more: the options of every encoding stage."""
    require_caption(config)
    began = time.time()
    writable = list_writable(config, console) if write_files else []
    report = STAGE.run(config, options, console, **more)
    if writable and not options.dry_run:
        counts = write_caption_files(Store(config.root), config, writable, began)
        report.details |= {"files_written": counts.written, "files_there_before": counts.existing}
        if counts.several_clips:
            report.details["clips_without_a_file"] = counts.several_clips
        if counts.sharing:
            report.details["same_name_without_a_file"] = len(counts.sharing)
            names = ", ".join(map(shorten, counts.sharing[:3]))
            console.warn(
                f"--write-files: {len(counts.sharing)} items have no file, as another picture or video of the same "
                f"name would get its caption too: {names}; rename one of each, and run `latentpress discover`"
            )
    return report


ABOUT = "Describe pictures and clips that have no caption, by a vision-language model."
app = make_app("caption", ABOUT, run, examples=["--write-files"], passes_to=STAGE.run)

if __name__ == "__main__":
    app()
