"""Parts that every program shares: options, exit codes, errors and commands."""

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


def test_options_reach_the_program(folder):
    calls = []

    def run(config, options, console):
        calls.append((config, options))
        return Report("probe")

    arguments = ["--set", "train.steps=7", "--set", "train.seed=1", "--shard", "1/3", "--device", "cuda:1"]
    result = call(run, *arguments, "--workers", "4", "--dry-run", divided=True)
    assert result.exit_code == OK, result.output
    config, options = calls[0]
    assert (config.train.steps, config.train.seed) == (7, 1)
    overrides = ("train.steps=7", "train.seed=1")
    expected = Options(Path("pipeline.yaml"), overrides, True, False, Partition(1, 3), "cuda:1", 4)
    assert options == expected
    assert call(run, *options.argv(), divided=True).exit_code == OK
    assert calls[1] == calls[0], "argv() gives the same options to another program"


def test_keyword_only_parameters_are_options_of_that_program(folder):
    def run(config, options, console, *, fix: Annotated[bool, typer.Option(help="Mend it.")] = False):
        return Report("probe", details={"fix": fix})

    assert json.loads(call(run, "--json", "--fix").stdout)["details"] == {"fix": True}
    assert json.loads(call(run, "--json").stdout)["details"] == {"fix": False}
    assert "Mend it." in call(run, "--help").stdout


def test_unused_options_are_parsed_and_hidden(folder):
    calls = []

    def run(config, options, console):
        calls.append(options)
        return Report("probe")

    text = call(run, "--help", unused=("workers",)).stdout
    assert "--shard" not in text and "--workers" not in text and "--device" in text
    assert "--shard" in call(run, "--help", divided=True).stdout
    assert call(run, "--workers", "3", unused=("workers",)).exit_code == OK and calls[0].workers == 3
    refused = call(run, "--shard", "1/3")
    assert refused.exit_code == USAGE and "--shard" in refused.stderr and len(calls) == 1


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
def test_wrong_usage_ends_with_2_and_prints_no_report(folder, arguments):
    result = call(lambda config, options, console: Report("probe"), *arguments, divided=True)
    assert result.exit_code == USAGE
    assert result.stdout == ""
    assert "Error: " in result.stderr


def test_the_command_line_overrides_the_configured_resources(folder):
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
        (Report("p", rejects=[{"item": "a"}]), OK),
        (Report("p", remaining=1), INCOMPLETE),
        (Report("p", failed=[{"item": "a"}]), INCOMPLETE),
        (Report("p", remaining=1, failed=[{"item": "a"}], damage=[{"item": "a"}]), DAMAGE),
    ],
)
def test_the_report_decides_the_exit_code(folder, report, code):
    assert report.exit_code == code
    result = call(lambda config, options, console: report, "--json")
    assert result.exit_code == code
    assert json.loads(result.stdout)["exit_code"] == code


def test_remaining_work_of_a_dry_run_is_not_incomplete(folder):
    result = call(lambda config, options, console: Report("probe", remaining=5), "--dry-run")
    assert result.exit_code == OK
    assert "probe (dry run): 0 done, 0 skipped, 5 to do" in result.stdout


def test_errors_of_the_configuration_end_with_2(folder):
    (folder / "pipeline.yaml").write_text(YAML + "trian: 1\n")
    result = call(lambda config, options, console: Report("probe"))
    assert (result.exit_code, result.stdout) == (USAGE, "")
    assert "pipeline.yaml:4: trian: unknown key (did you mean 'train'?)" in result.stderr
    document = json.loads(call(lambda config, options, console: Report("probe"), "--json").stdout)
    assert document["exit_code"] == USAGE
    assert document["error"]["type"] == "ConfigError"
    assert document["error"]["errors"][0].startswith("pipeline.yaml:4: trian: ")


def test_errors_of_the_project_are_shown_with_their_next_step_and_exit_code(folder):
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


def test_bugs_keep_their_traceback(folder):
    def run(config, options, console):
        raise KeyError("ours")

    result = call(run)
    assert isinstance(result.exception, KeyError)
    assert result.exit_code == 1


def test_an_interrupt_names_the_next_step(folder, capsys):
    def run(config, options, console):
        raise KeyboardInterrupt

    assert run_program("probe", run, Options()) == INTERRUPTED
    out, err = capsys.readouterr()
    assert out == ""
    assert "Run the same command again" in err and "where it stopped" not in err


def test_the_limit_of_open_files_is_raised_and_named_if_it_is_too_low(folder, monkeypatch):
    limits_set = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 100_000))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: limits_set.append((kind, limits)))

    def run(config, options, console):
        raise OSError(errno.EMFILE, "Too many open files")

    result = call(run)
    assert limits_set == [(resource.RLIMIT_NOFILE, (4096, 100_000))]
    assert result.exit_code == INCOMPLETE and "256 open files" in result.stderr and "ulimit -n" in result.stderr


# ------------------------------------------------------------------------------------- processes


def test_commands_in_texts_get_the_configured_options(tmp_path) -> None:
    options = Options(tmp_path / "a b.yaml", ("x=1",))
    words = f"--config '{tmp_path}/a b.yaml' --set x=1"
    cases = {
        "latentpress index": f"latentpress index {words}",
        "latentpress gc --yes": f"latentpress gc {words} --yes",
        "run `latentpress discover`, then `latentpress bucket --dry-run`": (
            f"run `latentpress discover {words}`, then `latentpress bucket {words} --dry-run`"
        ),
        "none yet: latentpress index": f"none yet: latentpress index {words}",
        "to rebuild it: latentpress verify --repair   # makes it again": (
            f"to rebuild it: latentpress verify {words} --repair   # makes it again"
        ),
        f"latentpress index {words}": f"latentpress index {words}",
        "a latentpress of mine": "a latentpress of mine",
    }
    assert {text: options.complete_commands(text) for text in cases} == cases
    assert Options().complete_commands("run `latentpress index`") == "run `latentpress index`"
