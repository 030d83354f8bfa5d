"""Sections of the specification that say what is measured, and what is searched for."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

from pydantic import BeforeValidator, Field, model_validator

from schedlab.experiments.specification.fields import (
    TEXT,
    Count,
    CountOrZero,
    Finite,
    Positive,
    Seconds,
    Section,
    Shorthand,
    whole,
)
from schedlab.experiments.specification.workload import Workload
from schedlab.sim.errors import SpecError
from schedlab.sim.yaml_lines import KeyPath

Fail = Callable[[KeyPath, str], NoReturn]

_SENTENCE = re.compile(
    r"\s*(?P<side>max|min)(?:imi[sz]e)?\s+(?P<key>\S+)"
    r"(?:\s+between\s+(?P<low>\S+)\s+and\s+(?P<high>\S+))?"
    r"\s+subject\s+to\s+(?P<constraints>.+?)\s*"
)
_CONSTRAINT = re.compile(r"(?P<metric>[\w.:]+(?:\(.*\))?)\s*(?P<sign><=|>=)\s*(?P<constraint>\S+)")
_BETWEEN_CONSTRAINTS = re.compile(r"\s+and\s+|\s*,\s*(?![^(]*\))")


class MeasurementSpec(Section):
    """Which part of a run is measured; all of it if this section is absent."""

    warm_up_s: Seconds | None = Field(
        default=None, description="Seconds after the first arrival that are left out."
    )
    warm_up_requests: CountOrZero | None = Field(
        default=None,
        description="Instead: first requests that are left out, with all that arrive at the same "
        "instant as the last of them.",
    )
    cool_down_s: Seconds | None = Field(
        default=None,
        description="Seconds before the last arrival that are left out; if absent the run is "
        "measured to its end.",
    )

    @model_validator(mode="after")
    def _one_warm_up(self) -> MeasurementSpec:
        if self.warm_up_s is not None and self.warm_up_requests is not None:
            raise ValueError("give warm_up_s or warm_up_requests, not both")
        return self

    @property
    def leaves_all(self) -> bool:
        """Whether nothing is left out, as without this section."""
        return not (self.warm_up_s or self.warm_up_requests) and self.cool_down_s is None


def check_measure(measure: MeasurementSpec | None, workload: Workload, fail: Fail) -> None:
    """Refuse a warm-up that leaves no request, as far as that is known before a trace is read.

    Parameters
    ----------
    measure : MeasurementSpec or None
        What is measured.
    workload : Workload
        Of what.
    fail : callable
        Called with the key at fault and what is wrong with it; must raise.
    """
    path = ("measure", "warm_up_requests")
    left_out = measure.warm_up_requests if measure is not None else None
    if not left_out or workload.sessions is not None:
        return
    at_once = workload.request_rate == math.inf or (
        workload.arrivals is not None and workload.arrivals.process == "all_at_once"
    )
    num = workload.num_requests
    if num is not None and left_out >= num:
        fail(path, f"{left_out} of {num} requests leaves nothing to measure")
    if at_once and workload.max_concurrency is None and not workload.follow_sessions:
        fail(path, "all requests arrive at once, so none of them comes after the warm-up")


def _range(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


Range = Annotated[tuple[Positive, Positive], BeforeValidator(_range)]


def _axis(value: object) -> object:
    """Take two numbers that can be the ends of a logarithmic range, or names."""
    if not isinstance(value, list | tuple):
        return value
    numbers = [one for one in value if isinstance(one, int | float) and not isinstance(one, bool)]
    if value and all(isinstance(one, str) and one for one in value):
        return tuple(value)
    if len(value) == len(numbers) == 2 and all(0 < one <= 1e15 for one in numbers):
        return tuple(map(float, numbers))
    raise ValueError(
        "takes the smallest and the largest value, two numbers above 0, or names to choose from; "
        f"got {list(value)}"
    )


Axis = Annotated[tuple[float | str, ...], BeforeValidator(_axis)]
"""Two numbers, the smallest and the largest value, or names."""


class Find(Section):
    """The largest or least value of a key at which every constraint holds; for `schedlab find`."""

    maximize: str | None = Field(
        default=None,
        min_length=1,
        description="Dotted key of a number, e.g. `workload.request_rate`.",
    )
    minimize: str | None = Field(
        default=None,
        min_length=1,
        description="Instead: the key whose least value is searched, e.g. `cluster.count`, at "
        "which constraints hold and below which they break.",
    )
    between: Range | None = Field(
        default=None,
        description="Smallest and largest value tried; if absent, doubled and halved from the "
        "value the key has, or 1.",
    )
    at_most: dict[str, Finite] = Field(
        default_factory=dict, description="Metric to the most it may be."
    )
    at_least: dict[str, Finite] = Field(
        default_factory=dict, description="Metric to the least it may be."
    )
    tolerance: Positive = Field(
        default=0.02,
        description="Search ends when the next larger value tried, at which a constraint breaks, "
        "is no more than this share above the answer.",
    )
    settle: Annotated[bool, Field(strict=True)] = Field(
        default=True,
        description="Whether to double `workload.num_requests`, four times at most, until the "
        "answer moves by no more than the tolerance, or than half its interval.",
    )

    @property
    def key(self) -> str:
        """What is searched."""
        key = self.maximize or self.minimize
        assert key is not None
        return key

    @property
    def least(self) -> bool:
        """Whether the least value is searched, and not the largest."""
        return self.minimize is not None

    @property
    def extreme(self) -> str:
        """Which of the two, in a word."""
        return "least" if self.least else "largest"

    @model_validator(mode="after")
    def _makes_sense(self) -> Find:
        if (self.maximize is None) == (self.minimize is None):
            raise ValueError("give either maximize or minimize, the key that is searched")
        if not self.at_most and not self.at_least:
            raise ValueError(
                f"give at_most or at_least: without a constraint there is no {self.extreme} value"
            )
        if self.between is not None and self.between[0] >= self.between[1]:
            raise ValueError(f"between must rise, got {list(self.between)}")
        return self


def _find(value: object) -> object:
    """Read `max KEY between A and B subject to METRIC <= X and METRIC >= Y`, or `min KEY ...`."""
    if not isinstance(value, str):
        return value
    said = _SENTENCE.fullmatch(value)
    if said is None:
        raise ValueError(
            "write it as a mapping, or as: max KEY between A and B subject to METRIC <= X (or min)"
        )
    data: dict[str, Any] = {f"{said['side']}imize": said["key"]}
    if said["low"] is not None:
        data["between"] = [_number(said["low"]), _number(said["high"])]
    for part in _BETWEEN_CONSTRAINTS.split(said["constraints"]):
        constraint = _CONSTRAINT.fullmatch(part)
        if constraint is None:
            raise ValueError(f"{part!r} is no constraint: write it as METRIC <= X or METRIC >= X")
        metric, sign = constraint["metric"], constraint["sign"]
        bounds = data.setdefault("at_most" if sign == "<=" else "at_least", {})
        if metric in bounds:
            raise ValueError(f"{metric} {sign} stands there twice; give the bound that is meant")
        bounds[metric] = _number(constraint["constraint"])
    return data


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no number") from None


FindField = Annotated[Find, Shorthand(_find, TEXT)]


class Tune(Section):
    """The best values of some keys within constraints; for `schedlab tune`."""

    maximize: str | None = Field(
        default=None,
        min_length=1,
        description="A metric, e.g. `output_throughput`, or a dotted key such as "
        "`workload.request_rate`: the largest value within the constraints, as `find` finds it.",
    )
    minimize: str | None = Field(
        default=None,
        min_length=1,
        description="Instead: a metric that is to be small, e.g. "
        "`usd_per_million_output_tokens` of a fleet.",
    )
    over: Annotated[dict[str, Axis], Field(min_length=1)] = Field(
        description="Dotted key to the smallest and largest value tried, e.g. "
        "`engine.max_num_seqs: [8, 512]`, or to the names tried, e.g. "
        "`hardware: [a100-80gb, h100-80gb]`."
    )
    at_most: dict[str, Finite] = Field(
        default_factory=dict, description="Metric to the most it may be."
    )
    at_least: dict[str, Finite] = Field(
        default_factory=dict, description="Metric to the least it may be."
    )
    between: Range | None = Field(
        default=None, description="Of a key that is maximized: smallest and largest value tried."
    )
    levels: Annotated[int, Field(ge=2, le=1000), BeforeValidator(whole)] = Field(
        default=4, description="Values of each key in the first, coarse grid."
    )
    tolerance: Positive = Field(
        default=0.2,
        description="Search ends when the values next to the best differ by no more than this "
        "share.",
    )
    max_settings: Count = Field(default=100, description="Most settings tried.")
    settle: Annotated[bool, Field(strict=True)] = Field(
        default=True,
        description="Whether to double `workload.num_requests`, four times at most, until the "
        "answer moves by no more than 2 %, or than half its interval.",
    )

    @property
    def goal(self) -> str:
        """The metric, or key, that is to be large or small."""
        goal = self.maximize or self.minimize
        assert goal is not None
        return goal

    @property
    def extreme(self) -> str:
        """What is done with it, in a word."""
        return "maximized" if self.minimize is None else "minimized"

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """The keys that take numbers, each with the smallest and largest value tried."""
        found = {}
        for key, axis in self.over.items():
            low, *more = axis
            if not isinstance(low, str):
                (high,) = more
                assert not isinstance(high, str)
                found[key] = (low, high)
        return found

    @model_validator(mode="after")
    def _ranges_rise(self) -> Tune:
        for key, (low, high) in self.ranges.items():
            if low >= high:
                raise ValueError(f"over: {key} must rise, got {[low, high]}")
        for key, axis in self.over.items():
            if len(set(axis)) < len(axis):
                raise ValueError(f"over: {key} has a name twice, got {list(axis)}")
        if (self.maximize is None) == (self.minimize is None):
            raise ValueError("give either maximize or minimize")
        if is_key(self.goal):
            if self.minimize is not None:
                raise ValueError(f"minimize takes a metric, and {self.goal} is a key")
            if not self.at_most and not self.at_least:
                raise ValueError("give at_most or at_least: a largest value needs a constraint")
            if self.goal in self.over:
                raise ValueError(f"{self.goal} is both maximized and varied")
        elif self.between is not None:
            raise ValueError(f"between belongs to a key that is maximized; {self.goal} is none")
        return self


def is_key(goal: str) -> bool:
    """Say whether what is maximized is a dotted key and not a metric."""
    return "." in goal and not any(sign in goal for sign in "(:")


def check_bound(metric: str, bound: float, path: KeyPath, fail: Fail) -> None:
    """Refuse a bound that no run can hold, on a metric that is known.

    Parameters
    ----------
    metric : str
        Its name.
    bound : float
        What it is to be at most, or at least.
    path : tuple
        Where that is asked for, under `at_most` or `at_least`.
    fail : callable
        Called with the key at fault and what is wrong with it; must raise.
    """
    from schedlab.sim.metrics.registry import metric_named

    if impossible := metric_named(metric).no_bound(bound, at_least="at_least" in path):
        fail(path, impossible)


def check_search(find: Find | None, tune: Tune | None, swept: list[str], fail: Fail) -> None:
    """Check that a search names metrics that exist and keys that nothing else sets.

    Parameters
    ----------
    find, tune : Find, Tune or None
        The sections.
    swept : list of str
        Keys that the sweep sets.
    fail : callable
        Called with the key at fault and what is wrong with it; must raise.
    """
    from schedlab.sim.metrics.registry import metric_named

    def check(name: str, path: KeyPath) -> None:
        try:
            metric_named(name)
        except SpecError as error:
            fail(path, str(error))

    for name, section in (("find", find), ("tune", tune)):
        if section is None:
            continue
        for side in ("at_most", "at_least"):
            for metric, bound in getattr(section, side).items():
                check(metric, (name, side, metric))
                check_bound(metric, bound, (name, side, metric), fail)
        goal = section.key if isinstance(section, Find) else section.goal
        if isinstance(section, Tune) and not is_key(goal):
            check(goal, (name, "minimize" if section.minimize else "maximize"))
        keys = [goal, *(section.over if isinstance(section, Tune) else ())]
        for key in keys:
            if key in swept:
                fail(
                    (name,),
                    f"{key} is swept as well; give it one value ({key}=1) to sweep it no more",
                )
