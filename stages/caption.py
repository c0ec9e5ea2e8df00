"""caption: captions for items that have none, or for all, by a vision-language model; in place of a plan of samples,
which needs captions, it has one of the media tables' items.

They are kept under the root, where `bucket` finds them, and the user's folders are not touched unless --write-files.
"""

from schemas.cli.console import make_app
from stages.encoding.stage_registry import CAPTION as STAGE

run = STAGE.run
app = make_app("caption", "Describe pictures and clips that have no caption, by a vision-language model.", run)

if __name__ == "__main__":
    app()
