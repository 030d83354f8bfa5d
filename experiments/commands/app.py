"""The application behind the command `schedlab`: a command is imported when it is called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from schedlab.experiments.commands.cli import COMMANDS, drop_output, drop_what_has_no_room, overview
from schedlab.experiments.commands.exit_codes import INTERRUPTED, USER_ERROR
from schedlab.experiments.commands.experiment import with_experiment
from schedlab.sim.errors import SchedlabError

_EXTRAS = {
    "torch": "schedlab[gpu]",
    "triton": "schedlab[gpu]",
    "safetensors": "safetensors",
    "sklearn": "schedlab[predictors]",
    "ray": "schedlab[ray]",
    "vllm": "schedlab[vllm]",
    "aiconfigurator_core": "schedlab[aiconfigurator]",
}
"""Packages that some commands need, and what brings them along."""

_WORDS = {
    "<str>": "NAME",
    "<path>": "FILE",
    "<int>": "N",
    "<int range>": "N",
    "<float>": "X",
    "<float range>": "X",
}
"""What stands for a value of a type in help."""

_EARLIER_NAMES = {"compare-policies": "compare"}
"""What commands were called before, which works for a version more, and are called now."""


class _OnDemand(Mapping[str, Any]):
    """Commands by name, each imported when it is asked for."""

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - click's
        module, _ = COMMANDS[name]
        group = get_group(import_module(f"{__package__}.{module}").app)
        group.name = name
        return _in_words(group.commands.get(name, group))

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


def _in_words(command: Any) -> Any:  # noqa: ANN401 - click's
    """Let the help of a command say what a value stands for instead of its type in Python."""
    for inner in getattr(command, "commands", {}).values():
        _in_words(inner)
        inner.short_help = inner.short_help or (inner.help or "").split("\n\n")[0]  # not cut
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            parameter.display_type_rich = lambda ctx: ""  # its name says it
        elif hasattr(parameter, "display_type"):
            told = parameter.display_type
            parameter.display_type = lambda ctx, told=told: _WORDS.get(told(ctx), told(ctx))
    return command


_UsageError: Any = typer.BadParameter.__base__  # click's, or the one that newer Typers bring


class _Commands(TyperGroup):
    """Imports commands on demand; turns errors meant for users into one line and an exit code."""

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - click's
        super().__init__(**settings)
        self.commands = _OnDemand()  # type: ignore[assignment]  # nobody adds to it

    def get_help(self, _: typer.Context) -> str:  # type: ignore[override]
        """Return the overview, for which no command is imported."""
        return overview().rstrip("\n")

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Look for no option of ours where a command comes first: to convert None imports much."""
        own = self.params, self.add_help_option
        if args and not args[0].startswith("-"):
            self.params, self.add_help_option = [], False
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            raise _misused(error) from None
        finally:
            self.params, self.add_help_option = own

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]  # noqa: ANN401
        """Take a command by an earlier name, too, and say what it is called now."""
        given = args[0]
        now = _EARLIER_NAMES.get(given, given)
        if given == "compare" and _name_an_experiment(args[1:]):
            now = "measure"  # it was `compare` when comparing results was `compare-policies`
        if now != given:
            _complain(f"schedlab {given} is called schedlab {now} now; this name will go")
        return super().resolve_command(ctx, [now, *args[1:]])

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]  # noqa: ANN401
        try:
            return super().invoke(ctx)
        except SchedlabError as error:
            told = "; ".join(line.strip() for line in str(error).splitlines())
            _complain(f"error: {with_experiment(told)}")
            raise typer.Exit(USER_ERROR) from None
        except _UsageError as error:
            raise _misused(error) from None
        except KeyboardInterrupt:
            _complain("interrupted; no result was written")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            drop_output()
            raise typer.Exit(1) from None
        except OSError as error:
            _complain(f"error: {SchedlabError(error)}")  # which cuts a name that is too long
            drop_what_has_no_room()
            raise typer.Exit(USER_ERROR) from None
        except ModuleNotFoundError as error:
            name = (error.name or "").partition(".")[0]
            if name not in _EXTRAS:
                raise
            _complain(f"error: {name} is not installed: pip install '{_EXTRAS[name]}'")
            raise typer.Exit(USER_ERROR) from None
        except MemoryError as error:
            _complain(f"error: {with_experiment(f'not enough memory: {error}')}")
            raise typer.Exit(USER_ERROR) from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _asked_for_version(asked: bool) -> None:
    if asked:
        from schedlab.experiments.commands.doctor import version

        version()
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_asked_for_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Take the options that need no command; see `overview` for what is said of them."""


def _name_an_experiment(arguments: list[str]) -> bool:
    """Say whether arguments hold a YAML file, or begin with the name of an experiment."""
    from schedlab.experiments.specification.shipped import shipped_experiments

    if any(argument.endswith((".yaml", ".yml")) for argument in arguments):
        return True
    first = arguments[0] if arguments else ""
    return first in shipped_experiments() and not Path(first).is_dir()


def _misused(error: Any) -> Exception:  # noqa: ANN401 - click's
    """Say in one line how the command line is wrong; return what ends the program."""
    told = error.format_message()
    if error.ctx is None or told == error.ctx.get_help():
        return error  # type: ignore[no-any-return]  # a group without a command shows its help
    told = " ".join(told.split()).rstrip(".")
    _complain(f"error: {SchedlabError(told)}; see {error.ctx.command_path} -h")
    return typer.Exit(USER_ERROR)


def _complain(text: str) -> None:
    typer.echo(text, err=True)
