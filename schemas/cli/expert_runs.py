"""Programs that work on a training run, where `train.experts: both` makes it two: one after the other."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import wraps
from types import MappingProxyType
from typing import Any

from schemas.cli.console import Console
from schemas.cli.options import Options
from schemas.cli.report import Report
from schemas.config.pipeline import Config
from schemas.errors import USAGE, LatentpressError


class BothExperts(LatentpressError):
    """An option that names one file or folder, where there are two runs."""

    exit_code = USAGE


def for_each_expert(
    *, in_order: bool = False, of_one: Mapping[str, str] = MappingProxyType({})
) -> Callable[[Callable[..., Report]], Callable[..., Report]]:
    """A decorator of a program's `run`, which is then called for the run of each expert. in_order: for the second
    only once the first has done its work. of_one: its arguments that are for one run only, and the options' names."""

    def decorate(run: Callable[..., Report]) -> Callable[..., Report]:
        @wraps(run)
        def run_all(config: Config, options: Options, console: Console, **own_options: Any) -> Report:
            if len(config.expert_runs) == 1:
                return run(config, options, console, **own_options)
            for name, option in of_one.items():
                if own_options.get(name) is not None:
                    raise BothExperts(
                        f"{option} is for one adapter, and train.experts is both",
                        "Add --set train.experts=high or --set train.experts=low.",
                    )
            reports = dict[str, Report]()
            for expert_config in config.expert_runs:
                name = str(expert_config.train.experts)
                given = replace(options, overrides=(*options.overrides, f"train.experts={name}"))
                reports[name] = run(expert_config, given, console, **own_options)
                if in_order and reports[name].exit_code:
                    break
            return join_reports(reports)

        return run_all

    return decorate


def join_reports(reports: Mapping[str, Report]) -> Report:
    """One report of several: their sums and lists, details that all have alike, and the others of each by its name."""
    first, *others = reports.values()
    joined = replace(first, details=dict(_join_details({name: report.details for name, report in reports.items()})))
    for name, value in vars(first).items():
        if type(value) is int or isinstance(value, list):
            setattr(joined, name, sum((getattr(report, name) for report in others), value))
    joined.next_steps = [*dict.fromkeys(joined.next_steps)]
    return joined


def _join_details(details: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    first, *others = details.values()
    alike = {key: value for key, value in first.items() if all((key, value) in other.items() for other in others)}
    yield from alike.items()
    for name, values in details.items():
        if differing := {key: value for key, value in values.items() if key not in alike}:
            yield name, differing
