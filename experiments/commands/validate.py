"""The command that replays a recorded run of a real engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from schedlab.experiments.commands.experiment import AsJson, Quiet, SpecFile, load_experiment
from schedlab.experiments.commands.terminal import print_lines, print_table, steps_bar
from schedlab.sim.errors import SpecError
from schedlab.sim.files import check_writable

if TYPE_CHECKING:
    from schedlab.experiments.comparing.load_tests import LoadTestValidation
    from schedlab.experiments.specification.experiment import ExperimentSpec

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def validate(
    spec_file: SpecFile,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Changes, e.g. engine.async_scheduling=true (of OTHER.yaml, too)",
        ),
    ] = None,
    fitted_on: Annotated[
        Path | None,
        typer.Option(
            metavar="OTHER.yaml", help="Fit host-side terms on another recorded run first."
        ),
    ] = None,
    spec_only: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="With --fitted-on: a change of SPEC only."),
    ] = None,
    other_only: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="With --fitted-on: a change of OTHER.yaml only."),
    ] = None,
    by_step: Annotated[
        bool,
        typer.Option(
            "--by-step", help="Force the recorded times on the replay: decisions, cost by step."
        ),
    ] = False,
    figure: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --by-step: draw it, as FILE.png and FILE.svg."),
    ] = None,
    run: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="Of a file of load tests: only this one; repeatable."),
    ] = None,
    profiles: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Of load tests: where their profiles are.")
    ] = Path("profiles/imported"),
    measure_frontend: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Of load tests: measure their front end, write it, and test it."
        ),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Predict recorded runs of a real engine, SPEC or a file of load tests: measured, error."""
    from schedlab.experiments.comparing.load_tests import experiments_of, is_load_test
    from schedlab.experiments.comparing.validate import validate as run_validation
    from schedlab.sim.text import json_text

    if is_load_test(spec_file):
        if fitted_on is not None or by_step:
            raise SpecError("--fitted-on and --by-step need single requests, not quantiles")
        tests = experiments_of(spec_file, overrides or [], run or [], profiles)
        if measure_frontend is not None:
            _measure_frontend(tests, spec_file, measure_frontend, as_json, quiet)
        else:
            _print_load_tests(tests, as_json, quiet)
        return
    if measure_frontend is not None:
        raise SpecError(f"--measure-frontend needs a file of load tests, which {spec_file} is not")
    if run:
        raise SpecError(f"--run is of a file of load tests, which {spec_file} is not")

    for option, changes in (("--spec-only", spec_only), ("--other-only", other_only)):
        if changes and fitted_on is None:
            raise SpecError(f"{option} needs --fitted-on: without it there is one run only")
    both = overrides or []
    spec = load_experiment(spec_file, [*both, *(spec_only or [])])
    if spec.workload.load_test is not None and spec.validation is None:
        _print_load_tests([spec], as_json, quiet)
        return
    if by_step:
        if fitted_on is not None:
            raise SpecError("--by-step and --fitted-on answer different questions; choose one")
        _print_steps(spec, as_json, figure)
        return
    if figure is not None:
        raise SpecError("--figure needs --by-step: without it there is nothing to draw")
    if fitted_on is None:
        found = run_validation(spec)
    else:
        from schedlab.experiments.comparing.host_terms import validate_elsewhere

        with steps_bar(quiet) as progress:
            other = load_experiment(fitted_on, [*both, *(other_only or [])])
            terms, found = validate_elsewhere(spec, other, progress)
        typer.echo(f"fitted on {fitted_on}: {terms}", err=as_json)
    if as_json:
        typer.echo(json_text(found.to_data()))
        return
    print_table(f"{spec.name} (ms)", ("metric", "measured", "predicted", "error"), found.rows())
    print_lines(found.lines())


def _print_load_tests(specs: list[ExperimentSpec], as_json: bool, quiet: bool) -> None:
    from schedlab.experiments.comparing.load_tests import validate_load_tests

    with steps_bar(quiet) as progress:
        found = validate_load_tests(specs, progress)
    _print_errors(found, as_json)


def _measure_frontend(
    specs: list[ExperimentSpec], tests: Path, output: Path, as_json: bool, quiet: bool
) -> None:
    from schedlab.experiments.comparing.frontend_measurement import measure_frontend
    from schedlab.sim.drive.frontend import write_frontend

    check_writable(output)
    source = f"load tests of {tests.parent.name}/{tests.name} less their simulated engines"
    with steps_bar(quiet) as progress:
        found = measure_frontend(specs, source, progress)
    write_frontend(output, found.frontend, found.to_data())
    _print_errors(found.held_out, as_json)
    for line in (*found.lines(), f"front end: {output} (use it with frontend: {output})"):
        typer.echo(line, err=as_json)


def _print_errors(found: LoadTestValidation, as_json: bool) -> None:
    from schedlab.sim.text import json_text

    if as_json:
        typer.echo(json_text(found.to_data()))
        return
    title = "measured ms, and error of the prediction"
    print_table(title, found.header(), found.rows())
    print_lines(found.lines())


def _print_steps(spec: ExperimentSpec, as_json: bool, figure: Path | None) -> None:
    from schedlab.experiments.comparing.forced_replay import forced_replay
    from schedlab.sim.text import json_text

    found = forced_replay(spec)
    if figure is not None:
        from schedlab.experiments.comparing.by_step_figures import step_time_figure
        from schedlab.experiments.figures.style import save

        save(step_time_figure(found, spec.name), figure.with_suffix(""))
    if as_json:
        typer.echo(json_text(found.to_data()))
        return
    headings = ("kind", "count", "predicted ms", "recorded - predicted, ms")
    print_table(f"{spec.name}: recorded times forced on the replay", headings, found.rows())
    print_lines(found.lines())
