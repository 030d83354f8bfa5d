"""Cost models by name, by ``module:Class``, or by the profile folder they are read from."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from schedlab.sim.construct import Registry, construct, import_class
from schedlab.sim.cost.cost_model import CostModel
from schedlab.sim.cost.own_prices import check_own, is_own
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.deployment import Deployment

Maker = Callable[..., CostModel]
"""A class of cost models or a function that makes one: takes a `Deployment`, then its knobs."""

AnyMaker = TypeVar("AnyMaker", bound=Maker)

_MAKERS: Registry[Maker] = Registry("cost model", "schedlab.sim.cost", "my_module:MyCostModel")
_PROFILE_FILES: dict[str, str] = {}


def register(name: str, profile_file: str | None = None) -> Callable[[AnyMaker], AnyMaker]:
    """Make a cost model known under `name` (decorator of a class or of a function).

    A file in `schedlab.sim.cost` that does so is all that a new cost model takes.

    Parameters
    ----------
    name : str
        As in ``cost_model: {name: NAME}``.
    profile_file : str, optional
        The file by which a profile folder of this kind is known; the maker then takes the folder
        as the knob `profile`, and ``cost_model: FOLDER`` finds it.

    Raises
    ------
    ValueError
        If another one has the name.
    """

    def decorate(maker: AnyMaker) -> AnyMaker:
        _MAKERS.register(name)(maker)
        if profile_file is not None:
            _PROFILE_FILES[name] = profile_file
        return maker

    return decorate


names = _MAKERS.names


def profile_files() -> dict[str, str]:
    """Return the file that tells a profile's kind, by the name of the cost model that reads it."""
    names()
    return dict(_PROFILE_FILES)


def is_name(text: str) -> bool:
    """Say whether a text names a cost model rather than a profile folder."""
    module, colon, cls = text.partition(":")
    is_path = (
        colon and cls.isidentifier() and all(part.isidentifier() for part in module.split("."))
    )
    return bool(is_path) or text in names()


def maker(name: str) -> Maker:
    """Return what makes the cost model of a name or of a ``module:Class`` path.

    Raises
    ------
    SpecError
        If there is no such cost model; names the nearest one.
    """
    if ":" in name:
        return import_class("cost model", name, CostModel)  # type: ignore[type-abstract]
    return _MAKERS.get(name)


def knobs(name: str) -> dict[str, inspect.Parameter]:
    """Return the parameters of a cost model, by name, but for the deployment it is given."""
    made = maker(name)
    try:
        signature = inspect.signature(made, eval_str=True)
    except NameError:  # annotated with what is imported for type checkers only
        signature = inspect.signature(made)
    parameters = list(signature.parameters.values())
    if not parameters:
        raise SpecError(f"cost model {name!r}: must take a Deployment as its first argument")
    if parameters[0].default not in (inspect.Parameter.empty, None):  # a knob, by its looks
        raise SpecError(
            f"cost model {name!r}: its first parameter, {parameters[0].name}, is given the "
            "Deployment; write __init__(self, deployment, ...) and knobs after it"
        )
    return {parameter.name: parameter for parameter in parameters[1:]}


def kind_of(profile: Path | str) -> str:
    """Return the name of the cost model that reads a profile folder.

    Raises
    ------
    SpecError
        If it holds the file of no kind of profile, or of several.
    """
    refuse_two_kinds(profile)
    for name in _kinds_in(profile):
        return name
    files = ", ".join(sorted(profile_files().values()))
    raise SpecError(f"{profile}: no profile, it holds none of {files}")


def refuse_two_kinds(folder: Path | str) -> None:
    """Raise `SpecError` if a folder holds profiles of several kinds.

    They share meta.json, so that it says of one of them what is true of the other.
    """
    found = sorted(_kinds_in(folder).values())
    if len(found) > 1:
        raise SpecError(
            f"{folder}: holds several profiles, {' and '.join(found)}, and one meta.json for them; "
            "write each into a folder of its own"
        )


def refuse_other_kind(folder: Path | str, file: str) -> None:
    """Raise `SpecError` if a profile cannot be written because one of another kind is there.

    Parameters
    ----------
    folder : Path or str
        Where it would go; need not be there.
    file : str
        That tells the kind of what is to be written, e.g. ``table.json``.
    """
    for name, other in _kinds_in(folder).items():
        if other != file:
            raise SpecError(
                f"{folder}: holds a profile of another kind ({other}, which cost model {name!r} "
                "reads); choose another folder"
            )


def _kinds_in(folder: Path | str) -> dict[str, str]:
    """Return the file of each profile in a folder, by the cost model that reads it."""
    files = profile_files()
    return {name: file for name, file in files.items() if (Path(folder) / file).is_file()}


def make(name: str, deployment: Deployment | None, **params: Any) -> CostModel:  # noqa: ANN401 - any knob
    """Construct a cost model by name.

    Parameters
    ----------
    name : str
        A registered name, or ``module:Class``.
    deployment : Deployment or None
        What it is to price; None for a profile that is looked at for itself.
    **params
        Its knobs.

    Raises
    ------
    SpecError
        If there is no such cost model, it does not take these parameters, or what a user's says of
        itself cannot be.
    """
    made = construct(f"cost model {name!r}", maker(name), knobs(name), params, deployment)
    if is_own(made):
        check_own(made)
    return made


def load_profile(
    folder: Path | str,
    deployment: Deployment | None = None,
    **params: Any,  # noqa: ANN401 - any knob
) -> CostModel:
    """Return the cost model of a profile folder, whatever kind of profile it is.

    Parameters
    ----------
    folder : Path or str
        docs/cost-models.md has the formats.
    deployment : Deployment, optional
        What it is to price; compared with what was measured if given.
    **params
        Knobs of that kind.

    Raises
    ------
    SpecError
        If a file is missing or malformed, or the profile is of something else.
    """
    return make(kind_of(folder), deployment, profile=str(folder), **params)
