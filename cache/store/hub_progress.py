"""How far a download of huggingface_hub is, as an activity of this program in place of the library's own bars."""

from typing import Any

from schemas.cli.progress import Progress


def bar_class(task: Progress) -> Any:
    """A class for `tqdm_class`, whose bars of bytes move `task`. The library has two for one download: bytes that come,
    and bytes that are written. The one that is further counts."""
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **settings: Any) -> None:
            self._of_bytes = settings.get("unit") == "B"
            super().__init__(*args, **{**settings, "disable": True})

        def update(self, n: float | None = 1) -> None:
            if not self._of_bytes:
                return
            self.n += n or 0
            task.total = max(task.total or 0, self.total or 0) or None
            task.advance(max(0, self.n - task.done))

    return Bar
