"""The configuration that `configure` proposes: chosen by predictions, and described with what it takes."""

import shlex
import shutil
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from schemas.cli.console import Console
from schemas.config.loading import ConfigError, parse_config, parse_override, set_value
from schemas.config.pipeline import Config
from schemas.config.yaml_editor import CannotEdit
from schemas.config.yaml_editor import set_value as edit_value
from schemas.config.yaml_reader import parse_yaml
from schemas.errors import LatentpressError
from schemas.libraries import missing_libraries
from schemas.text_format import format_bytes, format_duration
from stages.configuring import files, rates
from stages.configuring.answers import Answers
from stages.configuring.choice import ROUND, choose_settings, least_edge
from stages.configuring.folder import Media
from stages.configuring.look import Looker, Prediction, require_items
from stages.configuring.recipes import Candidate, attempts
from stages.encoding.stage_state import MIN_REJECT_BASE

MOST_PREDICTIONS = 4  # each takes 5 to 20 s
SPARE = 0.6  # share of a card's memory


@dataclass
class Proposal:
    """file: where it will be; before: its text as it is, "" where there is none. overrides: of --set, which the file
    gets, too."""

    answers: Answers
    file: Path
    before: str
    overrides: Sequence[str]
    looker: Looker
    console: Console

    @cached_property
    def dataset(self) -> int:
        """The number of the dataset whose media these are."""
        if not self.before.strip():
            return 0
        return files.find_dataset(self.before, self.file, self._folder)

    @property
    def _folder(self) -> Path:
        return self.file.absolute().parent / self.answers.folder

    @cached_property
    def media(self) -> Media:
        first = next(attempts(self.answers))
        media = self.looker.discover(self._draft(first, None), self.dataset)
        require_items(media, self.answers.folder)
        return media

    def _draft(self, candidate: Candidate, media: Media | None, steps: int | None = None) -> str:
        settings = choose_settings(self.answers, candidate, media, steps)
        self._by_hand: list[str] = []
        if self.before.strip():
            text, self._by_hand = files.change_text(self.before, settings, self.dataset)
        else:
            text = files.write_text(settings, f"{self.answers.task}: {candidate.describe()}")
        for override in self.overrides:
            text = _override(text, override)
        return text

    @cached_property
    def _chosen(self) -> tuple[Candidate, Prediction]:
        """The first candidate that is predicted to fit the card; without a prediction the recipe of the card's size."""
        media = self.media
        queue, tried = deque(attempts(self.answers)), list[tuple[Candidate, Prediction]]()
        while queue and len(tried) < MOST_PREDICTIONS:
            candidate = queue.popleft()
            self.console.log(f"predicting the memory of {candidate.describe()}")
            prediction = self.looker.predict(self._draft(candidate, media), self.answers.card_gib)
            if not prediction.memory:
                return next(recipe for recipe in (candidate, *queue) if not recipe.roomy), prediction
            if not prediction.too_large:
                return self._with_less_saved(candidate, prediction)
            tried.append((candidate, prediction))
            if (tighter := candidate.tightened(prediction.too_large)) is not None:
                queue.append(tighter)  # after what is meant for smaller cards
        candidate, prediction = min(tried, key=lambda attempt: attempt[1].most_gib)
        large = ", ".join(f"{row['program']} {row['all_gib']} GiB" for row in prediction.memory if not row["fits"])
        raise LatentpressError(
            f"nothing that was tried fits a card of {self.answers.card_gib:g} GiB; the least, {candidate.describe()}, "
            f"takes more: {large}",
            "Name a larger card with --card, or set a smaller resolution, such as --set "
            f"datasets.{self.answers.name}.resolution=512.",
        )

    def _with_less_saved(self, candidate: Candidate, prediction: Prediction) -> tuple[Candidate, Prediction]:
        """Without the options that save memory and slow training down, where much of the card would be unused, as with
        small media or few frames."""
        if self.answers.recipe is not None:
            return candidate, prediction
        faster = candidate.without_savers("train")
        (train,) = (row for row in prediction.memory if row["program"] == "train")
        if faster is candidate or train["all_gib"] > SPARE * self.answers.card_gib:
            return candidate, prediction
        self.console.log(f"predicting the memory of {candidate.describe()}, with nothing saved in training")
        other = self.looker.predict(self._draft(faster, self.media), self.answers.card_gib)
        return (candidate, prediction) if other.too_large or not other.memory else (faster, other)

    @cached_property
    def text(self) -> str:
        """The text of the file."""
        candidate, _ = self._chosen
        text = self._draft(candidate, self.media)
        if (step := rates.seconds_of_step(parse_config(text, self.file))) and self.answers.seconds is not None:
            most = max(1, int(self.answers.seconds / step[0]))
            text = self._draft(candidate, self.media, max(ROUND, most // ROUND * ROUND) if most >= ROUND else most)
        for line in self._by_hand:
            self.console.warn(f"to be changed by hand: {line}")
        return text

    @cached_property
    def config(self) -> Config:
        return parse_config(self.text, self.file)

    def describe(self) -> dict[str, Any]:
        """Details of the report."""
        _, prediction = self._chosen
        plan, answers = self.looker.plan(self.text), self.answers
        chosen = self.config
        about: dict[str, Any] = {"media": answers.folder, "task": answers.task, "card_gib": answers.card_gib}
        about["time"] = "no limit" if answers.seconds is None else format_duration(answers.seconds)
        about |= {"sources": answers.sources} if answers.sources else {}
        samples, used = (sum(row[key] for row in plan["datasets"]) for key in ("samples", "used"))
        details: dict[str, Any] = {
            "file": {
                "path": str(self.file),
                "text": self.text,
                "changes": files.compare_texts(self.before, self.text, self.file.name) if self.before.strip() else "",
            },
            "answers": about,
            "media": self.media.describe() | {"used": used, "samples": samples},
            "model": f"{chosen.model.family} {chosen.model.flavour_spec.name}",
            "excluded": plan["excluded"] if isinstance(plan["excluded"], list) else 0,
            "memory": prediction.memory or f"not predicted: {prediction.why}",
            "disk": [*plan["disk"]],
            "free": self._free(chosen),
        }
        counts = {"encode-text": plan["texts"], "encode-latents": samples}
        just_now = {"discover": "configure, just now", "bucket": "its dry run, just now"}
        measured = {stage: (self.looker.seconds[stage], by) for stage, by in just_now.items()}
        details["time"] = rates.predict_times(chosen, counts, measured)
        if missing := self._missing(chosen):
            details["missing"] = missing
        self._warn()
        return details

    def _warn(self) -> None:
        dataset, family = self.config.datasets[self.dataset], self.config.model.family_spec
        limit, total = self.config.stages.max_reject_fraction, len(self.media) + self.media.set_aside
        if self.media.set_aside > limit * max(total, MIN_REJECT_BASE):
            self.console.warn(
                f"{self.media.set_aside} of {total} items of {dataset.id} are set aside, and discover stops above "
                f"{limit:g} of them: mend or remove them, or set stages.max_reject_fraction"
            )
        edge = max(dataset.resolutions(family.resolution))
        if edge < least_edge(self.config.model):
            self.console.warn(
                f"{dataset.id}: most items are small for {family.name}, so resolution is {edge:g}, at which it learns "
                "less of details: use larger ones, if there are any"
            )

    @staticmethod
    def _free(config: Config) -> str:
        root = Path(config.root)
        if "://" in config.root:
            return "of a store: unknown"
        with suppress(OSError):
            folder = next(part for part in (root, *root.parents) if part.is_dir())
            return f"{format_bytes(shutil.disk_usage(folder).free)} of the disk of {folder}"
        return "unknown"

    @staticmethod
    def _missing(config: Config) -> list[dict[str, str]]:
        return [
            {"missing": library.distribution, "for": option, "install": library.command}
            for library, option in missing_libraries(config).items()
        ]

    def commands(self) -> list[str]:
        """The three that follow."""
        file = f"--config {shlex.quote(str(self.file))}"
        hours, minutes = divmod(round((self.answers.seconds or 0) / 60), 60)
        words = f"{hours}h" * bool(hours) + f"{minutes}m" * bool(minutes)
        limit = f" --max-time {words}" if words else ""
        return [
            f"latentpress run {file} --dry-run",
            f"latentpress run {file}{limit}",
            f"latentpress status {file} --watch",
        ]

    def keep_media_table(self) -> None:
        self.looker.keep_table(self.text, self.dataset)


def _override(text: str, override: str) -> str:
    """A text with an override of the command line in it."""
    try:
        key, value = parse_override(override)
        path = set_value(parse_yaml(text).value or {}, key, value)
        return edit_value(text, path, override.partition("=")[2], False)
    except (CannotEdit, ValueError) as error:
        raise ConfigError([f"--set {override.partition('=')[0].strip()}: {error}"]) from error
