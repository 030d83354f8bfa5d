"""What `find` and `tune` came to: tables, sentences and JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from schedlab.experiments.results.tables import notes
from schedlab.experiments.search.cheapest import Cheapest, prices
from schedlab.experiments.search.constraints import constraints_of
from schedlab.experiments.search.find import Found
from schedlab.experiments.search.tune import Trial, Tuned
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.identity import spec_hash
from schedlab.experiments.specification.search import Find, Tune
from schedlab.experiments.specification.sweep import shown
from schedlab.experiments.statistics import with_interval
from schedlab.sim.files import write_text
from schedlab.sim.text import json_text, number, percent

Data = dict[str, Any]

_SHOWN_TRIALS = 10
_SHOWN_REASONS = 5
BEYOND = {"at least": ">= ", "below": "< ", "at most": "<= ", "above": "> "}
"""What stands before an answer that lies beyond what was tried."""


def basis_lines(
    cost_models: Sequence[Mapping[str, Any]], extrapolated: Sequence[str] = ()
) -> list[str]:
    """Return what an absolute answer rests on: the cost models and what is known of their error.

    Parameters
    ----------
    cost_models : sequence of mapping
        What each says of itself.
    extrapolated : sequence of str
        A line for each run that left the range one was measured in.
    """
    lines = list(dict.fromkeys(notes(cost_models, [])))
    if extrapolated:
        lines.append(
            f"warning: {len(extrapolated)} runs left the range that the cost model was measured "
            f"in, e.g. {extrapolated[0]}"
        )
    if any(described.get("name") == "roofline" for described in cost_models):
        lines.append(
            "the answer is as good as these times: on recorded runs of GPUs whose kernels it knows "
            "the roofline was 2 to 9 % off, 6 to 63 % on others (docs/cost-models.md)"
        )
    return lines


def find_rows(found: Sequence[Found]) -> list[tuple[str, ...]]:
    """Return a row a setting: its answer, and between what it lies."""
    rows: list[tuple[str, ...]] = []
    for one in found:
        if one.error:
            rows.append((one.label, "-", "-", "-"))
            continue
        beyond = BEYOND.get(one.bound, "")
        breaks = [bracket.breaks_at for bracket in one.brackets]
        holds = [number(b.value, 4) if b.has_answer else "-" for b in one.brackets]
        half_width = None if one.bound else one.value.half_width
        rows.append(
            (
                one.label,
                beyond + with_interval(one.value.mean, half_width),
                ", ".join(holds),
                ", ".join(number(value, 4) if 0 < value < math.inf else "-" for value in breaks),
            )
        )
    return rows


def find_table(
    spec: ExperimentSpec, found: Sequence[Found]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the header and rows of a search; with prices if the least of a fleet is searched."""
    assert spec.find is not None
    header: tuple[str, ...] = ("setting", spec.find.key, "holds at", "breaks at")
    rows = find_rows(found)
    costs = [prices(one) for one in found] if spec.find.least else []
    if any(cost is not None for cost in costs):
        header = (*header, "USD an hour")
        rows = [
            (*row, "-" if cost is None else with_interval(cost.mean, cost.half_width))
            for row, cost in zip(rows, costs, strict=True)
        ]
    return header, rows


def find_lines(spec: ExperimentSpec, found: Sequence[Found]) -> list[str]:
    """Return what to say under the table: what was asked, how surely, and what is odd."""
    asked = spec.find
    assert asked is not None
    constraints = " and ".join(map(str, constraints_of(asked.at_most, asked.at_least)))
    lines = [f"{asked.extreme} {asked.key} at which {constraints} ({_requests(spec, found)})"]
    if spec.replications > 1:
        lines.append(
            f"mean ± 95 % interval over {spec.replications} seeds, each searched alone to within "
            f"{100 * asked.tolerance:g} %"
        )
    else:
        lines.append(
            f"one seed, searched to within {100 * asked.tolerance:g} %: no interval; set "
            "replications to 5 or more"
        )
    for one in found:
        said = (one.error,) if one.error else one.remarks
        lines += [f"{one.label}: {line}" for line in said]
    return lines


def find_data(
    spec: ExperimentSpec,
    found: Sequence[Found],
    told: Sequence[str],
    num_runs: int,
    best: Cheapest | None = None,
) -> Data:
    """Return the same for JSON, with every value that was tried."""
    assert spec.find is not None
    constraints = constraints_of(spec.find.at_most, spec.find.at_least)
    return {
        "name": spec.name,
        "spec_hash": spec_hash(spec),
        "find": _asked(spec.find),
        "num_runs": num_runs,
        "settings": [
            {
                "label": one.label,
                "error": one.error or None,
                "num_requests": one.num_requests,
                "settled": one.settled,
                "mean": None if one.error else one.value.mean,
                "ci95": None if one.error else one.value.half_width,
                "bound": one.bound or None,
                "replications": [
                    {
                        "value": bracket.value,
                        "breaks_at": bracket.breaks_at,
                        "tried": [
                            {
                                "value": probe.value,
                                "excess": {
                                    str(constraint): excess
                                    for constraint, excess in zip(
                                        constraints, probe.excess, strict=True
                                    )
                                },
                            }
                            for probe in bracket.probes
                        ],
                    }
                    for bracket in one.brackets
                ],
                "remarks": list(one.remarks),
            }
            for one in found
        ],
        "verdicts": list(told),
        **({"cheapest": best._asdict()} if best is not None else {}),
    }


def tune_rows(tuned: Tuned) -> list[tuple[str, ...]]:
    """Return a row for each of the best settings tried."""
    return [
        (
            *(shown(value) for value in trial.values.values()),
            with_interval(trial.goal.mean, trial.goal.half_width),
            "hold" if trial.holds else f"broken by {percent(max(trial.excess), 0)}",
        )
        for trial in tuned.trials[:_SHOWN_TRIALS]
    ]


def tune_lines(spec: ExperimentSpec, tuned: Tuned) -> list[str]:
    """Return what to say under the table: the winner on new seeds, and what is odd."""
    asked = spec.tune
    assert asked is not None
    constraints = (
        " and ".join(map(str, constraints_of(asked.at_most, asked.at_least))) or "no constraints"
    )
    invalid = f", {tuned.num_invalid} left out" if tuned.num_invalid else ""
    lines = [
        f"{len(tuned.trials)} settings tried{invalid}; {asked.extreme}: {asked.goal} within "
        f"{constraints} ({_requests(spec)})"
    ]
    for title, trial in (("best", tuned.best), ("given", tuned.given)):
        if trial is not None:
            values = ", ".join(f"{key}={shown(value)}" for key, value in trial.values.items())
            goal = with_interval(trial.goal.mean, trial.goal.half_width)
            held = "constraints hold" if trial.holds else "A CONSTRAINT BREAKS"
            lines.append(f"{title}: {values}: {goal}, {held} (on {len(trial.goals)} new seeds)")
    reasons = sorted(tuned.left_out.items(), key=lambda pair: -pair[1])
    lines += [f"{num} left out: {why}" for why, num in reasons[:_SHOWN_REASONS]]
    return [*lines, tuned.verdict, *tuned.remarks]


def tune_data(spec: ExperimentSpec, tuned: Tuned, num_runs: int) -> Data:
    """Return the same for JSON, with every setting that was tried."""
    assert spec.tune is not None

    def plain(trial: Trial | None) -> Data | None:
        if trial is None:
            return None
        data = asdict(trial)
        del data["least"], data["is_bound"]  # said once, by the key that is asked and in a remark
        return {**data, "holds": trial.holds}

    return {
        "name": spec.name,
        "spec_hash": spec_hash(spec),
        "tune": _asked(spec.tune),
        "num_runs": num_runs,
        "num_invalid": tuned.num_invalid,
        "left_out": dict(tuned.left_out),
        "best_on_new_seeds": plain(tuned.best),
        "given_on_new_seeds": plain(tuned.given),
        "verdict": tuned.verdict,
        "remarks": list(tuned.remarks),
        "tried": [plain(trial) for trial in tuned.trials],
    }


def write_json(data: Data, path: Path) -> None:
    """Write a report, whole or not at all."""
    write_text(path, json_text(data) + "\n")


def _asked(section: Find | Tune) -> Data:
    """Return what was asked, with the one key that says what is optimized."""
    return section.model_dump(exclude={"minimize" if section.minimize is None else "maximize"})


def _requests(spec: ExperimentSpec, found: Sequence[Found] = ()) -> str:
    lengths = [one.num_requests for one in found if not one.error]
    asked = lengths[0] if lengths else spec.workload.num_requests
    length = "the whole trace" if asked is None else f"{asked} requests a run"
    return length if spec.measure is None else f"{length}, a part measured"
