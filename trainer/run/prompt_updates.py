"""Validation prompts that join a run while it trains.

At each validation the configuration is read again. Where its prompts, sizes, step counts, guidances or seeds are
others, and there is a set with them, they are sampled from then on; where they are not encoded yet, the command is
named that does it. Training itself goes on with its own set and settings, and nothing here stops it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from cache.sets.set_lookup import find_configured_id, open_set
from cache.sets.trainset import SetNotFound, TrainSet
from cache.store.store import Store
from schemas.config.pipeline import Config
from schemas.config.validation import Validation
from schemas.errors import LatentpressError

if TYPE_CHECKING:
    from trainer.run.run_files import RunFiles  # it imports torch

#: Options of validation that are in force as they are now; the others, as they were when the run began.
UPDATED = ("prompts", "size", "steps", "guidance", "shift", "seed")
PROMPTS_COMMAND = "`latentpress run --prompts`"


class Update(NamedTuple):
    """Rank 0's finding."""

    validation: Validation
    set_id: str


class PromptUpdates:
    """The prompts that a run samples: those of its set, until the configuration has others. Every rank calls `check`.

    reload: reads the configuration again; raises LatentpressError. warn: on rank 0, and says nothing on others.
    """

    def __init__(
        self, config: Config, data: TrainSet, reload: Callable[[], Config], warn: Callable[[str], object]
    ) -> None:
        self.config, self.data = config, data
        self._reload, self._warn = reload, warn
        self._said: str | None = None

    def check(self, files: "RunFiles") -> tuple[Config, TrainSet]:
        """The configuration and the set whose prompts are sampled now."""
        update = files.from_main(self._find() if files.main else None)
        if update is None:
            return self.config, self.data
        data, problem = None, ""
        try:
            data = self._open(update.set_id)
        except (LatentpressError, OSError, ValueError) as error:
            problem = str(error)
        problems = [text for text in files.gathered(problem) if text]
        if data is None or problems:
            self._say(f"the new validation prompts can't be read, and those of before are sampled: {problems[0]}")
            return self.config, self.data
        self.config, self.data = self.config.model_copy(update={"validation": update.validation}), data
        return self.config, self.data

    def _find(self) -> Update | None:
        """The configuration's prompts now, where that is something else and encoded."""
        try:
            config = self._reload()
            if config.model != self.config.model:
                return None  # of another model, which this run does not train
            changes = {option: getattr(config.validation, option) for option in UPDATED}
            validation = self.config.validation.model_copy(update=changes)
            if validation == self.config.validation:
                return None
            updated = self.config.model_copy(update={"validation": validation})
            return Update(validation, find_configured_id(Store(self.config.root), updated))
        except SetNotFound:
            names = {prompt.name for prompt in self.config.validation.prompts}
            new = [prompt.name for prompt in validation.prompts if prompt.name not in names] or ["or other sizes"]
            self._say(
                f"the configuration has other validation prompts now, {', '.join(new)}, which are not encoded; "
                f"those of before are sampled until {PROMPTS_COMMAND} was run"
            )
        except (LatentpressError, OSError, ValueError) as error:
            self._say(f"the validation prompts are those of before, as the configuration can't be read: {error}")
        return None

    def _open(self, set_id: str) -> TrainSet:
        """The set, its prompts read and checked."""
        if set_id == self.data.id:
            return self.data
        data = open_set(Store(self.config.root), set_id, self.config.model.family, self.config.model.task)
        data.text_widths = self.data.text_widths
        assert data.validation is not None
        return data

    def _say(self, message: str) -> None:
        """Warn, once of the same."""
        if message != self._said:
            self._warn(message)
        self._said = message
