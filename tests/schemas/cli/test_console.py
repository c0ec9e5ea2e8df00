"""What every program has: its options, exit codes, errors and commands."""

import errno
import json
import resource
from pathlib import Path
from typing import Annotated

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from schemas.cli.console import Options, Partition, Report, run_program
from schemas.cli.options import parse_partition
from schemas.config.loading import load_config
from schemas.errors import DAMAGE, INCOMPLETE, INTERRUPTED, OK, USAGE, LatentpressError
from tests.schemas.cli.programs import YAML, call

ROOT = Path(__file__).resolve().parents[3]


# ------------------------------------------------------------------------------------- options


def test_options_reach_the_program(here):
    seen = []

    def run(config, options, console):
        seen.append((config, options))
        return Report("probe")

    arguments = ["--set", "train.steps=7", "--set", "train.seed=1", "--shard", "1/3", "--device", "cuda:1"]
    result = call(run, *arguments, "--workers", "4", "--dry-run", divided=True)
    assert result.exit_code == OK, result.output
    config, options = seen[0]
    assert (config.train.steps, config.train.seed) == (7, 1)
    overrides = ("train.steps=7", "train.seed=1")
    expected = Options(Path("pipeline.yaml"), overrides, True, False, Partition(1, 3), "cuda:1", 4)
    assert options == expected
    assert call(run, *options.argv(), divided=True).exit_code == OK
    assert seen[1] == seen[0], "argv() gives the same options to another program"


def test_keyword_only_parameters_are_options_of_that_program(here):
    def run(config, options, console, *, fix: Annotated[bool, typer.Option(help="Mend it.")] = False):
        return Report("probe", details={"fix": fix})

    assert json.loads(call(run, "--json", "--fix").stdout)["details"] == {"fix": True}
    assert json.loads(call(run, "--json").stdout)["details"] == {"fix": False}
    assert "Mend it." in call(run, "--help").stdout


def test_options_without_use_are_read_and_not_shown(here):
    seen = []

    def run(config, options, console):
        seen.append(options)
        return Report("probe")

    text = call(run, "--help", unused=("workers",)).stdout
    assert "--shard" not in text and "--workers" not in text and "--device" in text
    assert "--shard" in call(run, "--help", divided=True).stdout
    assert call(run, "--workers", "3", unused=("workers",)).exit_code == OK and seen[0].workers == 3
    refused = call(run, "--shard", "1/3")
    assert refused.exit_code == USAGE and "--shard" in refused.stderr and len(seen) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nothing"],
        ["extra"],
        ["--shard", "3/3"],
        ["--shard", "1"],
        ["--shard", "-1/3"],
        ["--shard", "0/0"],
        ["--workers", "0"],
        ["--workers", "many"],
        ["--device", "gpu"],
        ["--set"],
    ],
)
def test_wrong_usage_ends_with_2_and_prints_no_report(here, arguments):
    result = call(lambda config, options, console: Report("probe"), *arguments, divided=True)
    assert result.exit_code == USAGE
    assert result.stdout == ""
    assert "Error: " in result.stderr


def test_command_line_goes_over_the_configured_resources(here):
    config = load_config("pipeline.yaml", ["stages.encode-text.threads=7", "stages.encode-text.workers=2"])
    assert Options().resources(config, "encode-text").workers == 2
    resources = Options(workers=5, device="cpu").resources(config, "encode-text")
    assert (resources.workers, resources.threads, resources.device) == (5, 7, "cpu")


@given(st.lists(st.integers(), max_size=30), st.integers(1, 7))
def test_the_parts_are_disjoint_and_together_everything(items, total):
    parts = [parse_partition(f"{i}/{total}").select(items) for i in range(total)]
    assert sorted(item for part in parts for item in part) == sorted(items)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


# ------------------------------------------------------------------------------------- exit codes, errors


@pytest.mark.parametrize(
    ("report", "code"),
    [
        (Report("p", done=3), OK),
        (Report("p", set_aside=[{"item": "a"}]), OK),
        (Report("p", remaining=1), INCOMPLETE),
        (Report("p", failed=[{"item": "a"}]), INCOMPLETE),
        (Report("p", remaining=1, failed=[{"item": "a"}], damage=[{"item": "a"}]), DAMAGE),
    ],
)
def test_the_report_decides_the_exit_code(here, report, code):
    assert report.exit_code == code
    result = call(lambda config, options, console: report, "--json")
    assert result.exit_code == code
    assert json.loads(result.stdout)["exit_code"] == code


def test_what_a_dry_run_would_do_is_not_work_that_was_left(here):
    result = call(lambda config, options, console: Report("probe", remaining=5), "--dry-run")
    assert result.exit_code == OK
    assert "probe (dry run): 0 done, 0 skipped, 5 to do" in result.stdout


def test_errors_of_the_configuration_end_with_2(here):
    (here / "pipeline.yaml").write_text(YAML + "trian: 1\n")
    result = call(lambda config, options, console: Report("probe"))
    assert (result.exit_code, result.stdout) == (USAGE, "")
    assert "pipeline.yaml:4: trian: unknown key (did you mean 'train'?)" in result.stderr
    document = json.loads(call(lambda config, options, console: Report("probe"), "--json").stdout)
    assert document["exit_code"] == USAGE
    assert document["error"]["type"] == "ConfigError"
    assert document["error"]["errors"][0].startswith("pipeline.yaml:4: trian: ")


def test_errors_of_the_project_are_shown_with_their_next_step_and_exit_code(here):
    class Broken(LatentpressError):
        exit_code = DAMAGE

    def run(config, options, console):
        raise Broken("shard 7 is [damaged]", "latentpress verify --repair")

    result = call(run, "--json")
    assert result.exit_code == DAMAGE
    assert "error: shard 7 is [damaged]\nlatentpress verify --repair" in result.stderr
    assert "Traceback" not in result.stderr
    assert json.loads(result.stdout) == {
        "program": "probe",
        "error": {
            "type": "Broken",
            "message": "shard 7 is [damaged]",
            "next_step": "latentpress verify --repair",
        },
        "exit_code": DAMAGE,
    }


def test_bugs_keep_their_traceback(here):
    def run(config, options, console):
        raise KeyError("ours")

    result = call(run)
    assert isinstance(result.exception, KeyError)
    assert result.exit_code == 1


def test_an_interrupt_says_how_to_go_on(here, capsys):
    def run(config, options, console):
        raise KeyboardInterrupt

    assert run_program("probe", run, Options()) == INTERRUPTED
    out, err = capsys.readouterr()
    assert out == ""
    assert "Run the same command again" in err and "where it stopped" not in err


def test_the_limit_of_open_files_is_raised_and_named_where_it_is_too_low(here, monkeypatch):
    given = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 100_000))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: given.append((kind, limits)))

    def run(config, options, console):
        raise OSError(errno.EMFILE, "Too many open files")

    result = call(run)
    assert given == [(resource.RLIMIT_NOFILE, (4096, 100_000))]
    assert result.exit_code == INCOMPLETE and "may open 256 files" in result.stderr and "ulimit -n" in result.stderr


# ------------------------------------------------------------------------------------- processes


def test_commands_in_texts_get_the_options_that_were_given(tmp_path) -> None:
    options = Options(tmp_path / "a b.yaml", ("x=1",))
    given = f"--config '{tmp_path}/a b.yaml' --set x=1"
    cases = {
        "latentpress index": f"latentpress index {given}",
        "latentpress gc --yes": f"latentpress gc {given} --yes",
        "run `latentpress discover`, then `latentpress bucket --dry-run`": (
            f"run `latentpress discover {given}`, then `latentpress bucket {given} --dry-run`"
        ),
        "none yet: latentpress index": f"none yet: latentpress index {given}",
        "to rebuild it: latentpress verify --repair   # makes it again": (
            f"to rebuild it: latentpress verify {given} --repair   # makes it again"
        ),
        f"latentpress index {given}": f"latentpress index {given}",
        "a latentpress of mine": "a latentpress of mine",
    }
    assert {text: options.complete_commands(text) for text in cases} == cases
    assert Options().complete_commands("run `latentpress index`") == "run `latentpress index`"
