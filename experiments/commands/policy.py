"""The `policy` command: prove that a policy keeps the laws."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from schedlab.experiments.commands import completion
from schedlab.experiments.commands.terminal import print_table

app = typer.Typer(
    help="Prove policies.", no_args_is_help=True, add_completion=False, rich_markup_mode=None
)


@app.callback()
def _group() -> None:
    """Keep `check` a command of its own though it is the only one."""


@app.command("check")
def check_command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="POLICY", help="A name, or module:Class.", autocompletion=completion.policies
        ),
    ],
    knobs: Annotated[
        list[str] | None,
        typer.Argument(metavar="KNOB=VALUE", help="Its knobs, e.g. chunk_size=256."),
    ] = None,
    may_wait: Annotated[
        bool, typer.Option("--may-wait", help="It may idle on purpose although requests wait.")
    ] = False,
    law: Annotated[
        list[str] | None,
        typer.Option("--law", metavar="LAW", help="Check this law only; may be repeated."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Which random workloads are drawn.")] = 0,
    num_cases: Annotated[
        int, typer.Option("--cases", min=1, max=100_000, help="How many of them.")
    ] = 20,
) -> None:
    """Check that a policy keeps every law, on small random workloads; exits with 1 if not."""
    from schedlab.experiments.specification.own_modules import find_own_modules
    from schedlab.policies import registry
    from schedlab.sim.errors import SpecError
    from schedlab.testing import LawBroken, policy_verdicts

    find_own_modules()
    given = dict(_knob(text) for text in knobs or [])
    registry.make(name, **given)  # a wrong name or knob is an error of its own

    def make() -> Any:  # noqa: ANN401 - some policy
        return registry.make(name, **given)

    make.__qualname__ = name
    try:
        found = policy_verdicts(make, may_wait=may_wait, only=law, seed=seed, num_cases=num_cases)
    except ValueError as error:
        raise SpecError(f"--law: {error}") from None
    print_table(
        "",
        ("", "law", "what it asks for"),
        [("holds" if one.broken is None else "BROKEN", one.law, one.meaning) for one in found],
        num_keys=2,
    )
    broken = [verdict.broken for verdict in found if verdict.broken is not None]
    # A policy that raises breaks every law at the same place, which is told once.
    alike: dict[tuple[str, str], list[LawBroken]] = {}
    for one in broken:
        alike.setdefault((one.reason, str(one.case)), []).append(one)
    for shown, *others in alike.values():
        typer.echo(f"\n{shown}")
        if others:
            typer.echo(f"the same breaks {', '.join(one.law for one in others)}")
    if broken:
        raise typer.Exit(1)


def _knob(text: str) -> tuple[str, object]:
    from schedlab.sim.errors import SpecError
    from schedlab.sim.yaml_lines import parse_yaml

    name, equals, value = text.partition("=")
    if not equals or not name:
        raise SpecError(f"knob {text!r}: write it as KNOB=VALUE")
    return name, parse_yaml(value, f"knob {text!r}").data
