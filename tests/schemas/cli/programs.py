"""Programs that tests call."""

import io

from typer.testing import CliRunner

from schemas.cli.console import make_app

YAML = "root: w\nmodel: {family: sana}\ndatasets: [{id: a, instance_data_dir: x}]\n"


def call(run, *arguments, **keywords):
    return CliRunner().invoke(make_app("probe", "Do it.", run, **keywords), arguments)


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    """A clock that stands still until `now` is set."""

    now = 0.0

    def __call__(self):
        return self.now
