"""What is written of a comparison: tables, data and figures."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from schedlab.experiments.analysis.comparison import (
    Compared,
    rank_agreement,
)
from schedlab.experiments.comparing.compare import PointComparison
from schedlab.experiments.comparing.level_runs import POLICY as LEVEL_POLICY
from schedlab.experiments.comparing.level_runs import SETTLING_STEPS, Level
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.identity import spec_hash
from schedlab.experiments.specification.paths import relative_paths
from schedlab.experiments.specification.sweep import points
from schedlab.sim.files import write_text
from schedlab.sim.text import json_text, markdown_table, percent


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

    text = json_text(to_data(found, spec))
    write_text(folder / "comparison.json", text + "\n")
    write_text(folder / "comparison.md", markdown(found, spec))
    save(step_figure(found, spec.name), folder / "steps")
    save(cdf_figure(found, spec.name), folder / "latency_cdf")
    save(frontier_figure(found, spec.name), folder / "throughput_p99")


def to_data(found: list[PointComparison], spec: ExperimentSpec) -> dict[str, Any]:
    """Return what comparison.json holds; paths in it are relative to the working directory."""
    origin = found[0].simulated.provenance
    levels = {
        load: {str(repeat + 1): _level_data(level) for repeat, level in rounds.items()}
        for load, rounds in _levels(found).items()
    }
    return {
        "name": spec.name,
        "spec": relative_paths(spec.to_data()),
        "spec_hash": spec_hash(spec),
        "bars": {"throughput": spec.real.throughput_bar, "latency": spec.real.latency_bar},
        "rank_agreement_kendall_tau": agreement(found),
        "runs": runs_told(found, spec),
        **({"levels": {"told": level_told(spec), "by_load": levels}} if levels else {}),
        "points": [
            {
                "label": point.label,
                "num_runs": point.num_runs,
                "policy": point.policy,
                "load": point.load,
                "num_requests": len(point.measured.requests["id"]),
                "decisions": {
                    "same_step_times": _same_step_times(point),
                    "measured_step_times": point.measured_difference or "identical",
                },
                "cost_error_by_step": point.steps,
                "real": point.measured.provenance["real"],
                "metrics": [
                    {
                        **asdict(row),
                        "spread": row.spread,
                        "deviations": row.deviations,
                        "within_bar_or_spread": row.holds,
                    }
                    for row in point.rows
                ],
            }
            for point in found
        ],
        **({"off_told": off} if (off := off_told(found)) else {}),
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


HEADER = ("metric", "measured", "spread", "simulated", "error", "deviations", "interval", "")
"""Of a table of `point_rows`."""


def markdown(found: list[PointComparison], spec: ExperimentSpec) -> str:
    """Return the comparison as tables a person reads."""
    real = found[0].measured.provenance["real"]
    assert isinstance(real, dict)
    lines = [
        f"# {spec.name}: measured against simulated",
        "",
        f"Device {real['device']}, clock {real['clock']}, {runs_told(found, spec)}. The error is "
        "simulated / measured - 1; the spread is half the range of the measured runs, - of a lone "
        "one; deviations are those of the simulation from their mean, in standard deviations of "
        "theirs; the interval is a 95 % bootstrap over requests. ok: within "
        f"{spec.real.throughput_bar:.0%} (throughput) or {spec.real.latency_bar:.0%} (latency), or "
        "inside the spread.",
        "",
        *([off, ""] if (off := off_told(found)) else []),
        *_level_section(found, spec),
    ]
    for point in found:
        told = (f"- {line}" for line in point_lines(point, spec))
        lines += [f"## {point.label}", "", *told, ""]
        lines += [*markdown_table(HEADER, point_rows(point)), ""]
    lines += ["## Do both backends rank the policies alike?", ""]
    lines += [f"- {line}" for line in agreement_lines(found)]
    return "\n".join(lines) + "\n"


def off_told(found: list[PointComparison]) -> str:
    """Say how many figures are off, and how many would be by chance; nothing if that is unknown."""
    rows = [row for point in found for row in point.rows if row.metric in SHOWN]
    chances = [row.off_by_chance for row in rows if row.off_by_chance is not None]
    if not chances:
        return ""
    off = sum(not row.holds for row in rows if row.off_by_chance is not None)
    return (
        f"{off} of {len(chances)} figures below are off. Were the measured runs drawn from the "
        f"simulation themselves, {math.fsum(chances):.1f} would be, by chance."
    )


def point_lines(point: PointComparison, spec: ExperimentSpec) -> list[str]:
    """Return what to say of a point: how often it was measured, decisions, cost of its steps."""
    return [
        f"measured {point.num_runs} of {spec.real.repeats} times"
        + (
            f", simulated {point.num_simulated} times, with other step times each"
            if point.num_simulated > 1
            else ""
        ),
        f"decisions with the same step times: {_same_step_times(point)}",
        f"decisions with measured step times: {point.measured_difference or 'identical'}",
        f"cost of the measured runs' own steps: mean error {point.steps['mape']:.1%}, "
        f"bias {point.steps['bias']:+.1%} over {point.steps['num_steps']} steps"
        + (", each at the level of its round" if point.levels else ""),
    ]


def point_rows(point: PointComparison) -> list[tuple[str, ...]]:
    """Return a row under `HEADER` for each metric that is shown."""
    return [_cells(row) for row in point.rows if row.metric in SHOWN]


def agreement_lines(found: list[PointComparison]) -> list[str]:
    """Return for each load how alike both backends rank the policies."""
    lines = []
    for load, taus in agreement(found).items():
        texts = (f"{m} {'-' if math.isnan(tau) else f'{tau:.2f}'}" for m, tau in taus.items())
        lines.append(f"{load or 'all'}: Kendall tau {', '.join(texts)}")
    return lines


def level_told(spec: ExperimentSpec) -> str:
    """Say how the level was measured that the simulation is priced at."""
    return (
        "Before and after each measured run requests of another workload and other seeds were "
        f"served by {LEVEL_POLICY}, {spec.real.level_requests_per_client} sent one after the other "
        "by each of as many clients as requests run in a step of that point's simulation, priced "
        "at the level that a first set of such runs told (in the middle one of the third of steps "
        "with the fewest, and of all, before the run; of the third with the most after it), with "
        "contexts as long as there, and with requests that wait where half of its steps have any. "
        f"Their steps, but for the first {SETTLING_STEPS} of each, in "
        "which the engine settles, say at what level those of a run stood in that round, and how "
        "far they scattered; how much more or less than by the profile each request that decodes "
        "adds to a step without prompts is told by those of all rounds of a load together. Nothing "
        "is fitted to the runs that are compared. A round is one "
        "measured run of each policy at a load, and the simulation is priced at the level of each "
        "of its rounds, as often at each."
    )


LEVEL_HEADER = (
    "load", "round", "steps without prompts", "each decode", "with prompts",
    "scheduling overhead", "steps",
)  # fmt: skip


def level_rows(found: list[PointComparison]) -> list[tuple[str, ...]]:
    """Return a row under `LEVEL_HEADER` for each round: how many times as long as the profile's.

    What each decode adds to a step without prompts is told beside what it does by the profile.
    """
    return [
        (
            load, str(repeat + 1), f"{level.decode_steps:.3f}",
            f"{level.run_level.lone_row_s * 1e6:+.0f} µs", f"{level.prompt_steps:.3f}",
            f"{level.overhead:.3f}", str(level.num_steps),
        )
        for load, rounds in _levels(found).items()
        for repeat, level in rounds.items()
    ]  # fmt: skip


def _level_section(found: list[PointComparison], spec: ExperimentSpec) -> list[str]:
    rows = level_rows(found)
    if not rows:
        return []
    cost_model = found[0].simulated.provenance["cost_model"]
    assert isinstance(cost_model, dict)
    own = cost_model["meta"]["level"]["run_level_of_profile"]
    return [
        "## At what level steps stood",
        "",
        f"{level_told(spec)} In the table: how many times as long as by the profile, and how much "
        "longer for each decode in a step without prompts; the profile's own "
        f"level is {own['decode_steps']:.3f} without prompts, {own['prompt_steps']:.3f} with, and "
        f"{own['decode_row_s'] * 1e6:.0f} µs more for each request that decodes and "
        f"{own['prompt_step_s'] * 1e6:.0f} µs more for a step with prompts.",
        "",
        *markdown_table(LEVEL_HEADER, rows),
        "",
    ]


def _levels(found: list[PointComparison]) -> dict[str, dict[int, Level]]:
    """Return the level of each round, by load."""
    levels: dict[str, dict[int, Level]] = {}
    for point in found:
        if point.levels:
            levels.setdefault(point.load, {}).update(point.levels)
    return {load: dict(sorted(rounds.items())) for load, rounds in levels.items()}


def _level_data(level: Level) -> dict[str, Any]:
    data = asdict(level)
    del data["step_spread"]
    return data


def _cells(row: Compared) -> tuple[str, ...]:
    interval = "" if row.interval is None else "{:+.1%} .. {:+.1%}".format(*row.interval)
    return (
        row.metric, f"{row.measured:.4g}", percent(row.spread), f"{row.simulated:.4g}",
        percent(row.error, signed=True),
        "-" if math.isnan(row.deviations) else f"{row.deviations:+.1f}", interval,
        "ok" if row.holds else "off" + _chance_told(row),
    )  # fmt: skip


def _chance_told(row: Compared) -> str:
    return "" if row.off_by_chance is None else f", {row.off_by_chance:.0%} by chance"


def runs_told(found: list[PointComparison], spec: ExperimentSpec) -> str:
    """Say how much of a comparison is measured, and what is not."""
    todo = points(spec)
    wanted, there = len(todo) * spec.real.repeats, sum(point.num_runs for point in found)
    if there == wanted:
        return f"{spec.real.repeats} measured runs a point"
    missing = [p.label for p in todo if p.label not in {point.label for point in found}]
    told = f"{there} of {wanted} runs are measured"
    return f"{told}; not one of: {'; '.join(missing)}" if missing else told


def _same_step_times(point: PointComparison) -> str:
    if not point.is_checked:
        return "not checked"
    return point.modelled_difference or "identical"
