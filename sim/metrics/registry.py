"""Metrics by name, with their parameters, or by ``module:function`` for those that live elsewhere.

A metric is a function of an `Observation` (the measured part of a run) that returns a number. Its
docstring is its definition, and `register` says how it is written. Whatever stands in a file of
this folder is found here: nothing else has to be touched.
"""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Literal, TypeVar, get_args, get_type_hints

import numpy as np

from schedlab.sim.construct import with_file
from schedlab.sim.errors import SchedlabError, SpecError, nearest
from schedlab.sim.own_code import FAULTS, raised
from schedlab.sim.user_modules import import_own

if TYPE_CHECKING:
    from schedlab.sim.metrics.observation import Observation

About = Literal["requests", "engine", "fleet", "sessions", "tiers"]
Better = Literal["higher", "lower", "neither"]
Value = float | str
Function = Callable[..., float]
SomeFunction = TypeVar("SomeFunction", bound=Function)

_FIRST = (
    "throughput", "targets", "concurrency", "distributions", "preemption", "prefix_hits", "steps",
)  # fmt: skip
"""Modules whose metrics result.json has, in its order; the others follow by name."""
_WRITTEN = re.compile(r"\s*(?P<name>[\w.]+(?::\w+)?)\s*(?:\((?P<parameters>.*)\))?\s*")
_OUTER_COMMA = re.compile(r",(?![^(]*\))")
_SHARES = ("_share", "_utilization", "_attainment")
_UNITS = {"_s": "s", "_ms": "ms", "_bytes": "bytes", "_tokens": "tokens"}


@dataclass(frozen=True)
class Metric:
    """A number that can be told of a run.

    Attributes
    ----------
    name : str
        With its parameters, e.g. ``p99_ttft_ms`` or ``largest(latency=itl)``.
    of : callable
        Takes an `Observation` and returns the number; NaN where there is nothing to measure.
    label : str
        What people call it.
    unit : str
        What it is shown in; empty for a plain number.
    scale : float
        The number times this is in `unit`: 100 for a share that is shown in per cent.
    better : {"higher", "lower", "neither"}
        ``neither`` where it only describes the workload or the run.
    definition : str
        In words and formulas; the docstring of the function, up to its parameters.
    parameters : mapping of str to inspect.Parameter
        What still can be chosen; empty once it is.
    about : {"requests", "engine", "fleet", "sessions", "tiers"}
        Whether it can be told of some requests alone, is of the engine that serves them all, needs
        to know what the engines of a fleet are, is of sessions as a whole, or of memory below the
        GPU's.
    every_run : bool
        Whether result.json has it of every run.
    """

    name: str
    of: Callable[[Observation], float]
    label: str
    unit: str
    scale: float
    better: Better
    definition: str
    parameters: Mapping[str, inspect.Parameter]
    about: About = "requests"
    every_run: bool = False

    @property
    def axis(self) -> str:
        """Label and unit, as an axis has them."""
        return f"{self.label} ({self.unit})" if self.unit else self.label

    @property
    def larger_is_better(self) -> bool | None:
        """Which way it is better, None if neither."""
        return {"higher": True, "lower": False, "neither": None}[self.better]

    def no_bound(self, bound: float, *, at_least: bool) -> str:
        """Say why no run can be held to a bound; nothing where one may.

        Parameters
        ----------
        bound : float
            What the metric is to be at least, or at most.
        at_least : bool
            Which of the two.
        """
        if self.unit != "%" or self.scale != 100 or ":" in self.name:
            return ""
        if at_least and bound > 1:
            meant = f"; {bound / 100:g}?" if bound <= 100 else ""
            return f"{bound:g}: a share, at most 1{meant}"
        if not at_least and bound < 0:
            return f"{bound:g}: a share, at least 0"
        return ""

    def given(self, parameters: Mapping[str, Value]) -> Metric:
        """Return the metric with its parameters chosen.

        Parameters
        ----------
        parameters : mapping of str to float or str
            Those without a default at least.

        Raises
        ------
        SpecError
            If one is missing, unknown or none of its choices.
        """
        for key in parameters:
            if key not in self.parameters:
                if not self.parameters:
                    raise SpecError(f"the metric {self.name} takes no parameters, got {key!r}")
                raise SpecError(
                    f"{self.name} has no such parameter {key!r}; {nearest(key, self.parameters)}"
                )
        absent = [
            key for key, p in self.parameters.items()
            if p.default is p.empty and key not in parameters
        ]  # fmt: skip
        if absent:
            raise SpecError(f"{self.name} needs {', '.join(absent)}")
        values = {
            key: _checked(key, parameters[key], p)
            for key, p in self.parameters.items()
            if key in parameters
        }
        if not values:
            return replace(self, parameters={}) if self.parameters else self
        chosen = ", ".join(f"{key}={_text(value)}" for key, value in values.items())
        return replace(
            self,
            name=f"{self.name}({chosen})",
            of=partial(self.of, **values),
            label=f"{self.label}, {', '.join(map(_text, values.values()))}",
            parameters={},
        )


_METRICS: dict[str, Metric] = {}


def register(
    name: str | None = None,
    *,
    unit: str | None = None,
    better: Better = "lower",
    label: str | None = None,
    scale: float | None = None,
    about: About = "requests",
    every_run: bool = False,
) -> Callable[[SomeFunction], SomeFunction]:
    """Make a function known as a metric (decorator).

    Parameters
    ----------
    name : str, optional
        The function's if absent.
    unit, label, scale : optional
        As attributes of `Metric`; what the name says if absent: ``_s`` and ``_ms`` end times,
        ``_share`` and ``_attainment`` shares that are shown in per cent.
    better : {"higher", "lower", "neither"}
        Which way.
    about : {"requests", "engine", "fleet", "sessions", "tiers"}
        What it tells of.
    every_run : bool
        Whether result.json is to have it. It must then need no parameter.

    Raises
    ------
    ValueError
        If another function has the name.
    """

    def decorate(function: SomeFunction) -> SomeFunction:
        metric = _described(name or function.__name__, function, unit, better, label, scale)
        other = _METRICS.get(metric.name)
        if other is not None and _source(other.of) != _source(function):
            raise ValueError(f"metric name {metric.name!r} is taken by {_source(other.of)}")
        _METRICS[metric.name] = replace(metric, about=about, every_run=every_run)
        return function

    return decorate


def metric_named(name: str, /, **parameters: Value) -> Metric:
    """Return a metric by name, ready to be measured.

    Parameters
    ----------
    name : str
        A registered name, with its parameters in brackets where it has some, or
        ``module:function`` for a function of one's own.
    **parameters : float or str
        The same parameters, unless they stand in the name.

    Returns
    -------
    Metric
        Without parameters that are still to be chosen.

    Raises
    ------
    SpecError
        If there is no such metric, or it does not take these parameters.

    Examples
    --------
    >>> metric_named("p99_ttft_ms").axis
    'P99 TTFT (ms)'
    >>> metric_named("largest", latency="itl").name
    'largest(latency=itl)'
    """
    written = _WRITTEN.fullmatch(name)
    if written is None:
        raise SpecError(f"{name!r} is no metric: write NAME, or NAME(parameter=value, ...)")
    found = _own(written["name"]) if ":" in written["name"] else _registered(written["name"])
    return found.given({**_read(name, written["parameters"] or ""), **parameters})


def names() -> list[str]:
    """Return the names of all registered metrics: those of every run first, in their order."""
    _load()
    return list(_METRICS)


def every_run() -> list[Metric]:
    """Return the metrics that result.json has, in its order."""
    _load()
    return [one.given({}) for one in _METRICS.values() if one.every_run]


def every_fleet() -> list[Metric]:
    """Return the metrics that result.json has of a fleet beside those of every run."""
    return _every("fleet")


def every_session() -> list[Metric]:
    """Return the metrics that result.json has of sessions beside those of every run."""
    return _every("sessions")


def every_tier(names: Sequence[str]) -> list[Metric]:
    """Return the metrics that result.json has of tiers: of all, and where they are several each."""
    _load()
    asked = []
    for one in _METRICS.values():
        if one.about == "tiers":
            asked.append(one.given({}))
            if len(names) > 1 and "tier" in one.parameters:
                asked += [one.given({"tier": name}) for name in names]
    return asked


def _every(about: About) -> list[Metric]:
    _load()
    return [one.given({}) for one in _METRICS.values() if one.about == about and not one.parameters]


def described(name: str) -> Metric:
    """Return a registered metric with the parameters that it takes.

    Raises
    ------
    SpecError
        If there is none of that name.
    """
    return _registered(name)


@cache
def _load() -> None:
    """Import every module of this package, so that its metrics are registered."""
    package = __name__.rpartition(".")[0]
    folder = importlib.import_module(package).__path__
    others = sorted(module.name for module in pkgutil.iter_modules(folder))
    modules = [f"{package}.{module}" for module in dict.fromkeys((*_FIRST, *others))]
    for module in modules:
        importlib.import_module(module)
    # Who imported one of them before this must not change the order.
    found = sorted(
        _METRICS.items(),
        key=lambda item: (*modules, item[1].of.__module__).index(item[1].of.__module__),
    )
    _METRICS.clear()
    _METRICS.update(found)


def _registered(name: str) -> Metric:
    _load()
    if name not in _METRICS:
        raise SpecError(
            f"no metric is called {name!r}; {nearest(name, _METRICS)} (or a function of your own, "
            "like my_module:my_metric)"
        )
    return _METRICS[name]


def _own(path: str) -> Metric:
    """Return a function of somebody else's module as a metric."""
    module_name, _, function_name = path.partition(":")
    try:
        module = import_own(module_name)
    except Exception as error:
        raise SpecError(
            f"metric {path!r}: cannot import {module_name!r}: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, function_name, None)
    if not inspect.isroutine(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise SpecError(
            f"metric {path!r}: {with_file(module)} has no function {function_name!r}; "
            f"{nearest(function_name, functions)}"
        )
    better: Better = getattr(function, "better", "lower")
    if better not in get_args(Better):
        raise SpecError(
            f"metric {path!r}: better is {better!r}; {nearest(better, get_args(Better))}"
        )
    said = {key: getattr(function, key, None) for key in ("unit", "label", "scale")}
    own = _described(function_name, function, said["unit"], better, said["label"], said["scale"])
    return replace(own, name=path, of=partial(_told, path, function))


def _told(path: str, function: Function, run: Observation, **parameters: Value) -> float:
    """Return what a function of somebody else's module says of a run, if that is a number."""
    try:
        found: object = function(run, **parameters)
    except SchedlabError:
        raise
    except FAULTS as error:
        raise SpecError(f"metric {path!r} raised {raised(error, function)}") from error
    number = (
        found.item() if isinstance(found, np.ndarray | np.generic) and not found.ndim else found
    )
    if not isinstance(number, int | float):
        raise SpecError(f"metric {path!r} gives {' '.join(repr(found).split()):.60}, not a number")
    try:
        return float(number)
    except OverflowError:
        raise SpecError(f"metric {path!r} gives a number that is too large") from None


def _described(
    name: str,
    function: Function,
    unit: str | None,
    better: Better,
    label: str | None,
    scale: float | None,
) -> Metric:
    """Return a function as a metric, written as its name says where nothing else is said."""
    parameters = dict(inspect.signature(function).parameters)
    if not parameters:
        raise SpecError(f"metric {name!r} takes nothing: its first argument is the run")
    del parameters[next(iter(parameters))]
    words = name.replace("kv_", "KV ").replace("_", " ").removeprefix("num ")
    if name.endswith(_SHARES):
        unit, scale = unit or "%", scale or 100.0
        words = words.removesuffix(" share")
    suffix = next((end for end in _UNITS if name.endswith(end)), None)
    if unit is None and suffix is not None:
        unit = _UNITS[suffix]
        words = words.removesuffix(suffix.replace("_", " "))
    return Metric(
        name=name,
        of=function,
        label=label or words,
        unit=unit or "",
        scale=scale or 1.0,
        better=better,
        definition=_definition(function),
        parameters={
            key: p.replace(annotation=_types(function).get(key, p.annotation))
            for key, p in parameters.items()
        },
    )


def _types(function: Function) -> Mapping[str, object]:
    try:
        return get_type_hints(function)
    except NameError:  # of a module that imports its types for the type checker only
        return {}


def _definition(function: Function) -> str:
    said = inspect.getdoc(function) or ""
    said = re.split(r"\n\n\w+\n---", said)[0]
    return " ".join(said.removeprefix("Return ").split())


def _source(function: Function) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _read(name: str, text: str) -> dict[str, Value]:
    """Read the parameters in the brackets of a written metric."""
    values: dict[str, Value] = {}
    for part in filter(None, map(str.strip, _OUTER_COMMA.split(text))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise SpecError(f"{name!r}: {part!r} is no parameter: write it as name=value")
        values[key] = _number(value)
    return values


def _number(text: str) -> Value:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _text(value: Value) -> str:
    return (
        value if isinstance(value, str) else f"{value:.12g}" if math.isfinite(value) else str(value)
    )


def _checked(key: str, value: Value, parameter: inspect.Parameter) -> Value:
    choices = get_args(parameter.annotation)
    if choices and all(isinstance(choice, str) for choice in choices) and value not in choices:
        raise SpecError(f"{key}: no {value!r}; {nearest(str(value), choices)}")
    if parameter.annotation in (float, int) and isinstance(value, str):
        raise SpecError(f"{key}: must be a number, got {value!r}")
    return value
