"""The same trace, policies and seeds on both backends: how far is the simulation off, and why."""

from __future__ import annotations

import gc
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.experiments.analysis.comparison import (
    Compared,
    compare_runs,
    rank_agreement,
    step_errors,
)
from schedlab.experiments.comparing.machine import check_profile
from schedlab.experiments.comparing.measured_runs import MeasuredRuns
from schedlab.experiments.running.run import make_cost_model, run
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.identity import spec_hash
from schedlab.experiments.specification.sweep import Point, points
from schedlab.sim.core.plan_log import RecordedStep, first_difference, teacher_forced
from schedlab.sim.cost.fitted import FittedCostModel
from schedlab.sim.errors import SchedlabError
from schedlab.sim.files import write_text
from schedlab.sim.result import RunResult, json_value

Progress = Callable[[int, int, str], None]

THROUGHPUT_BAR, LATENCY_BAR = 0.05, 0.10
"""Errors that a replay should stay within, unless it lies in the spread of repeated runs."""


@dataclass
class PointComparison:
    """One policy at one load.

    Attributes
    ----------
    label, policy, load : str
        The settings; `load` is what they are without the policy.
    rows : list of Compared
        By metric.
    modelled_difference : str or None
        Where decisions differ when both backends use the same step times: must be None.
    measured_difference : str or None
        Where decisions first differ when the real backend uses measured times.
    steps : dict of str to float
        Error of the cost model alone: the measured run's own steps, priced.
    predicted_ns, measured_ns : ndarray
        Those steps.
    measured, simulated : RunResult
        The first measured run and the simulated one, for figures.
    """

    label: str
    policy: str
    load: str
    rows: list[Compared]
    modelled_difference: str | None
    measured_difference: str | None
    steps: dict[str, float]
    predicted_ns: np.ndarray[Any, np.dtype[np.int64]]
    measured_ns: np.ndarray[Any, np.dtype[np.int64]]
    measured: RunResult
    simulated: RunResult


class UnfinishedError(SchedlabError):
    """Time is up before all runs are measured; those that are have been kept."""


def compare(
    spec: ExperimentSpec,
    progress: Progress | None = None,
    *,
    keep: Path | None = None,
    max_s: float = math.inf,
) -> list[PointComparison]:
    """Run every point of an experiment on both backends.

    On the real one it runs `real.repeats` times by the clock of the experiment, and once by the
    modelled clock, which shows whether both decide alike when steps take the same time.

    Parameters
    ----------
    spec : ExperimentSpec
        Its ``real`` section says where; `real.repeats` measured runs a point, in ABBA order: all
        points forwards, then backwards, so that a slow drift of the machine hits all alike.
    progress : callable, optional
        Called with runs done, runs in all, and what comes next.
    keep : Path, optional
        Folder for the runs on the device; those found there are not repeated.
    max_s : float
        No run on the device begins later than this.

    Returns
    -------
    list of PointComparison
        In the order of the sweep.

    Raises
    ------
    UnfinishedError
        If `max_s` is over; call again with the same `keep`.
    SchedlabError
        If a point cannot run on one of the backends, or the profile is not of this machine.
    """
    todo = points(spec)
    for point in todo:
        cost_model = make_cost_model(point.spec)
        if isinstance(cost_model, FittedCostModel):
            check_profile(point.spec, cost_model)
    total = len(todo) * (spec.real.repeats + 2)
    done = 0

    def tell(what: str) -> None:
        nonlocal done
        if progress is not None:
            progress(done, total, what)
        done += 1

    kept = MeasuredRuns(keep, _identity(spec)) if keep is not None else None
    real: list[list[RunResult]] = [[] for _ in todo]
    records: list[list[RecordedStep]] = [[] for _ in todo]
    modelled_records: list[list[RecordedStep]] = [[] for _ in todo]
    deadline_s = time.monotonic() + max_s
    repeats = spec.real.repeats
    for repeat in range(repeats + 1):
        forwards = repeat % 2 == 0
        for i in range(len(todo)) if forwards else reversed(range(len(todo))):
            label, is_check = todo[i].label, repeat == repeats
            tell(
                f"checking decisions of {label}" if is_check
                else f"measuring {label} ({repeat + 1}/{repeats})"
            )  # fmt: skip
            before = kept.find(i, repeat) if kept is not None else None
            if before is None and time.monotonic() > deadline_s:
                left = (repeats + 1) * len(todo) - done + 1
                raise UnfinishedError(
                    f"time is up, {left} runs are left on the device; go on later"
                )
            result, steps = before or _measure(
                _on(todo[i].spec, "real", **({"clock": "modelled"} if is_check else {})),
                recorded=repeat in (0, repeats),
            )
            if kept is not None and before is None:
                kept.keep(i, repeat, result, steps)
            if is_check:
                modelled_records[i] = steps
            else:
                real[i].append(result)
                records[i] += steps
    found = []
    for i, point in enumerate(todo):
        tell(f"simulating {point.label}")
        simulated_steps: list[RecordedStep] = []
        simulated = run(_on(point.spec, "sim"), record=simulated_steps)
        modelled = first_difference(modelled_records[i], simulated_steps)
        difference = first_difference(records[i], simulated_steps)
        predicted, measured = teacher_forced(records[i], make_cost_model(point.spec))
        columns = simulated.requests
        ids, times_ns = columns["id"].tolist(), columns["arrival_ns"].tolist()
        arrivals_ns = dict(zip(ids, times_ns, strict=True))
        found.append(
            PointComparison(
                label=point.label,
                policy=_policy(point),
                load=_load(point),
                rows=compare_runs(point.label, real[i], simulated, spec.seed),
                modelled_difference=modelled.explain() if modelled else None,
                measured_difference=difference.explain(arrivals_ns) if difference else None,
                steps=step_errors(predicted, measured),
                predicted_ns=predicted,
                measured_ns=measured,
                measured=real[i][0],
                simulated=simulated,
            )
        )
    return found


def _identity(spec: ExperimentSpec) -> str:
    from schedlab.gpu_backend.kernel_hash import kernel_hash

    return f"{spec_hash(spec)[:16]} kernels {kernel_hash(spec.real.device)}"


def _measure(spec: ExperimentSpec, recorded: bool) -> tuple[RunResult, list[RecordedStep]]:
    steps: list[RecordedStep] = []
    gc.collect()
    result = run(spec, record=steps if recorded else None)
    return result, steps


def agreement(found: list[PointComparison]) -> dict[str, dict[str, float]]:
    """Return Kendall's tau of the policy rankings, by load and metric."""
    loads = dict.fromkeys(point.load for point in found)
    return {
        load: rank_agreement([row for point in found if point.load == load for row in point.rows])
        for load in loads
    }


def write(found: list[PointComparison], spec: ExperimentSpec, folder: Path) -> None:
    """Write comparison.json, comparison.md and the figures into a folder."""
    from schedlab.experiments.comparing.compare_figures import (
        cdf_figure,
        frontier_figure,
        step_figure,
    )
    from schedlab.experiments.figures.style import save

    text = json.dumps(json_value(to_data(found, spec)), indent=1, allow_nan=False)
    write_text(folder / "comparison.json", text + "\n")
    write_text(folder / "comparison.md", markdown(found, spec))
    save(step_figure(found, spec.name), folder / "steps")
    save(cdf_figure(found, spec.name), folder / "latency_cdf")
    save(frontier_figure(found, spec.name), folder / "throughput_p99")


def to_data(found: list[PointComparison], spec: ExperimentSpec) -> dict[str, Any]:
    """Return what comparison.json holds; paths in it are relative to the working directory."""
    origin = dict(found[0].simulated.provenance)
    settings = spec.to_data()
    if spec.cost_model.profile is not None:
        profile = os.path.relpath(spec.cost_model.profile)
        settings["cost_model"] = {**settings["cost_model"], "profile": profile}
        origin["cost_model"] = {**_mapping(origin["cost_model"]), "profile": profile}
    return {
        "name": spec.name,
        "spec": settings,
        "spec_hash": spec_hash(spec),
        "bars": {"throughput": THROUGHPUT_BAR, "latency": LATENCY_BAR},
        "rank_agreement_kendall_tau": agreement(found),
        "points": [
            {
                "label": point.label,
                "policy": point.policy,
                "load": point.load,
                "num_requests": len(point.measured.requests["id"]),
                "decisions": {
                    "same_step_times": point.modelled_difference or "identical",
                    "measured_step_times": point.measured_difference or "identical",
                },
                "cost_error_by_step": point.steps,
                "real": point.measured.provenance["real"],
                "metrics": [
                    {
                        **asdict(row),
                        "spread": row.spread,
                        "within_bar_or_spread": row.holds(THROUGHPUT_BAR, LATENCY_BAR),
                    }
                    for row in point.rows
                ],
            }
            for point in found
        ],
        "provenance": {
            key: origin[key]
            for key in ("cost_model", "scheduling_overhead", "versions", "git_commit", "engine")
        },
    }


SHOWN = (
    "request_throughput", "output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms",
    "p99_tpot_ms", "p99_itl_ms", "mean_e2el_ms", "p99_e2el_ms", "num_preemptions",
    "kv_utilization",
)  # fmt: skip


def markdown(found: list[PointComparison], spec: ExperimentSpec) -> str:
    """Return the comparison as tables a person reads."""
    real = found[0].measured.provenance["real"]
    assert isinstance(real, dict)
    lines = [
        f"# {spec.name}: measured against simulated",
        "",
        f"Device {real['device']}, clock {real['clock']}, {spec.real.repeats} measured runs a "
        f"point. The error is simulated / measured - 1; the spread is half the range of the "
        f"measured runs; the interval is a 95 % bootstrap over requests. ok: within "
        f"{THROUGHPUT_BAR:.0%} (throughput) or {LATENCY_BAR:.0%} (latency), or inside the spread.",
        "",
    ]
    for point in found:
        lines += [
            f"## {point.label}",
            "",
            f"- decisions with the same step times: {point.modelled_difference or 'identical'}",
            f"- decisions with measured step times: {point.measured_difference or 'identical'}",
            f"- cost of the measured run's own steps: mean error {point.steps['mape']:.1%}, "
            f"bias {point.steps['bias']:+.1%} over {point.steps['num_steps']} steps",
            "",
            "| metric | measured | spread | simulated | error | interval | |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in point.rows:
            if row.metric in SHOWN:
                interval = (
                    "" if row.interval is None else "{:+.1%} .. {:+.1%}".format(*row.interval)
                )
                mark = "ok" if row.holds(THROUGHPUT_BAR, LATENCY_BAR) else "off"
                cells = (
                    row.metric, f"{row.measured:.4g}", _percent(row.spread),
                    f"{row.simulated:.4g}", _percent(row.error, sign=True), interval, mark,
                )  # fmt: skip
                lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    lines += ["## Do both backends rank the policies alike?", ""]
    for load, taus in agreement(found).items():
        said = ", ".join(f"{m} {_number(tau)}" for m, tau in taus.items())
        lines.append(f"- {load or 'all'}: Kendall tau {said}")
    return "\n".join(lines) + "\n"


def _on(spec: ExperimentSpec, backend: str, **real: Any) -> ExperimentSpec:  # noqa: ANN401
    return spec.model_copy(
        update={"backend": backend, "real": spec.real.model_copy(update=real), "replications": 1}
    )


def _policy(point: Point) -> str:
    return point.settings.get("policy", point.spec.policy.name)


def _load(point: Point) -> str:
    rest = {key: value for key, value in point.settings.items() if key != "policy"}
    return ", ".join(f"{key.rsplit('.', 1)[-1]}={value}" for key, value in rest.items())


def _percent(value: float, sign: bool = False) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:+.1%}" if sign else f"{value:.1%}"


def _number(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "-"


def _mapping(value: object) -> dict[str, object]:
    assert isinstance(value, dict)
    return value
