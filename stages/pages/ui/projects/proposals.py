"""Proposals: configurations that a program of the command line would write, shown before anything is written.

A proposal is a process with `--dry-run --json`, whose report has the text. The page keeps the newest, in a folder that
goes when it ends, and stops those that are being made then.
"""

import json
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from schemas.config.loading import parse_config, read_text
from schemas.errors import LatentpressError
from stages.configuring.text import compare_texts, write_file
from stages.pages.ui.child_programs import ChildPrograms, Refused, Start

Program = Literal["configure", "import-config"]
PROGRAMS: Mapping[str, tuple[str, ...]] = {
    "configure": ("configure", "--yes"),
    "import-config": ("import-config",),
}
MOST_KEPT, MOST_AT_WORK = 20, 2
MOST_BYTES = 8 << 20  # of a report that is read


@dataclass(frozen=True)
class Proposal:
    """file: that would be written; before: its text as it was, None where there was none. again: the address of the
    form with the same answers."""

    key: str
    program: Program
    file: Path
    before: str | None
    again: str
    programs: ChildPrograms
    report_file: Path

    @property
    def start(self) -> Start:
        start = self.programs.last_start(self.program)
        assert start is not None  # it is made by one
        return start

    def report(self) -> dict[str, Any]:
        """The report of its process; empty where that ended without one."""
        with suppress(OSError, ValueError), self.report_file.open("rb") as file:
            return json.loads(file.read(MOST_BYTES))
        return {}

    def text(self, report: Mapping[str, Any]) -> str:
        """The text of the file; "" where none is proposed."""
        details = report.get("details", {})
        return str(details.get("file", {}).get("text", "") or details.get("pipeline", ""))

    def changes(self, text: str) -> str:
        """The difference to the file that is there."""
        return "" if self.before is None else compare_texts(self.before, text, self.file.name)

    def is_written(self, text: str) -> bool:
        return bool(text) and self.before != text and _read(self.file) == text

    def write(self) -> None:
        """Write the text that was shown. LatentpressError if the file changed since."""
        if self.start.is_running or not (text := self.text(self.report())):
            raise Refused(f"there is nothing yet that {self.file} could have", "wait for the proposal")
        parse_config(text, self.file)
        write_file(self.file, self.before, text)


def _read(file: Path) -> str | None:
    return read_text(file) if file.exists() else None


class Proposals:
    """The proposals of one page, by their keys; a key can't be guessed, and is none after the page's end."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._proposals: dict[str, Proposal] = {}

    def find(self, key: str) -> Proposal | None:
        return {proposal.key: proposal for proposal in self._list()}.get(key)

    def _list(self) -> list[Proposal]:
        """List those whose folder was not removed by somebody else, as systems tidy up temporary files."""
        return [proposal for proposal in self._proposals.values() if proposal.report_file.exists()]

    def begin(self, program: Program, file: Path, words: Sequence[str], again: str) -> Proposal:
        """Start the program for a file. Refused while others are being made. words: its own options."""
        if sum(proposal.start.is_running for proposal in self._list()) >= MOST_AT_WORK:
            raise Refused(f"{MOST_AT_WORK} proposals are being made already", "wait for one of them, or stop it")
        if self._folder is None or not self._folder.is_dir():
            self._folder = Path(tempfile.mkdtemp(prefix="latentpress-ui-"))
        key = secrets.token_urlsafe(16)
        folder = self._folder / key
        folder.mkdir()
        programs = ChildPrograms(folder, ["--config", str(file), "--dry-run", "--json"], PROGRAMS)
        proposal = Proposal(key, program, file, _read(file), again, programs, folder / "report.json")
        programs.start(program, *words, report=proposal.report_file)
        self._proposals[key] = proposal
        for old in [proposal for proposal in self._list() if not proposal.start.is_running][:-MOST_KEPT]:
            del self._proposals[old.key]
            shutil.rmtree(self._folder / old.key, ignore_errors=True)
        return proposal

    def close(self) -> None:
        for proposal in self._list():
            with suppress(LatentpressError):  # it has ended
                proposal.programs.stop(proposal.program)
        self._proposals.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
