"""A results folder as one HTML page that needs nothing but itself."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from schedlab.experiments.analysis.by_class import class_table
from schedlab.experiments.figures.figures import drawings, shown_load
from schedlab.experiments.report import html_parts as html
from schedlab.experiments.results import tables as report
from schedlab.experiments.results.saved_results import SavedResults, read_results
from schedlab.experiments.results.tables import Row
from schedlab.experiments.statistics import paired_change, verdict
from schedlab.sim.files import write_text
from schedlab.sim.metrics.metric_names import larger_is_better, with_interval, written

_JUDGED = ("request_throughput", "request_goodput", "mean_e2el_ms", "p99_ttft_ms", "p99_tpot_ms")
_SHOWN_VERDICTS = 40
_ERRORS = {
    "mape": "mean absolute",
    "p50": "median",
    "p90": "90th percentile",
    "max": "largest",
    "bias": "bias of the sum",
}
_OF_COST_MODEL = (
    "model", "hardware", "model_source", "hardware_source", "profile", "tensor_parallel_size",
    "dtype", "kv_dtype", "compute_efficiency", "memory_efficiency", "kernel_latency_s",
    "profiling_overhead_s", "several_prefills", "unequal_contexts",
)  # fmt: skip


def write_page(folder: Path, output: Path | None = None) -> Path:
    """Write the report of a results folder.

    Parameters
    ----------
    folder : Path
        What `schedlab run` or `schedlab sweep` wrote.
    output : Path, optional
        The file; report.html in the folder if absent.

    Returns
    -------
    Path
        The file written. The same folder gives the same bytes.

    Raises
    ------
    SchedlabError
        If the folder holds no results.
    """
    from schedlab.experiments.results.results_folder import add_to_marker

    path = output or folder / "report.html"
    text = report_page(read_results(folder))
    write_text(path, text)
    if output is None:
        add_to_marker(folder, [path.name])
    return path


def report_page(results: SavedResults) -> str:
    """Return the report of results as HTML.

    Parameters
    ----------
    results : SavedResults
        A results folder.

    Returns
    -------
    str
        One page: what to mind, tables, verdicts over paired replications, what each class of
        requests got (where the workload has classes), figures, the cost model
        and its accuracy, provenance and all metrics. Styles and images are inside of it.
    """
    heads = [run.head() for run in results.runs]
    sections = {
        "Results": _results_table(results),
        "Verdicts": _verdicts(results),
        "By class": _by_class(results),
        "Figures": _figures(results),
        "Cost model": _cost_models(results, heads),
        "Provenance": _provenance(results, heads),
        "All metrics": _all_metrics(results.rows),
    }
    shown = {title: inside for title, inside in sections.items() if inside}
    names = {title: title.lower().replace(" ", "-") for title in shown}
    return html.page(
        f"{results.name} - schedlab report",
        html.element("h1", html.text(results.name)),
        html.element("p", html.text(_lead(results, heads)), class_="lead"),
        html.element(
            "nav",
            *(html.element("a", html.text(t), href=f"#{name}") for t, name in names.items()),
        ),
        _what_to_mind(results),
        *(
            html.element("h2", html.text(title), id=names[title]) + inside
            for title, inside in shown.items()
        ),
        html.element(
            "footer", "Made by schedlab from files in its results folder, without network."
        ),
    )


def _lead(results: SavedResults, heads: Sequence[Mapping[str, Any]]) -> str:
    """Say in a line what was run."""
    parts = []
    if len(results.rows) > 1:
        parts.append(f"{len(results.rows)} settings")
    counts = sorted({row.num_replications for row in results.rows})
    if counts[-1] > 1:
        parts.append(f"{'-'.join(str(count) for count in counts)} replications each")
    num_requests = sorted({int(row.mean("num_requests")) for row in results.rows})
    low, high = num_requests[0], num_requests[-1]
    parts.append(f"{low:,} requests" if low == high else f"{low:,} to {high:,} requests")
    origins = [head["provenance"] for head in heads]
    for key in ("model", "hardware", "backend"):
        values = list(dict.fromkeys(str(origin[key]) for origin in origins if key in origin))
        if values:
            parts.append(", ".join(values))
    return " · ".join(parts)


def _what_to_mind(results: SavedResults) -> str:
    notes = report.notes(results.cost_models, [], results.predictors)
    boxes = [html.element("div", html.bullets(notes), class_="box")]
    if results.warnings:
        boxes.append(
            html.element(
                "div",
                html.element("strong", "Warnings"),
                html.bullets(results.warnings),
                class_="box warning",
            )
        )
    return "".join(boxes)


def _results_table(results: SavedResults) -> str:
    rows = results.rows
    keys = list(dict.fromkeys(key for row in rows for key in row.settings if key != "policy"))
    metrics = ["request_throughput", "output_throughput"]
    if any(row.mean("num_with_slo") > 0 for row in rows):
        metrics += ["request_goodput", "slo_attainment"]
    metrics += ["median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "p99_itl_ms"]
    metrics += ["median_e2el_ms", "p99_e2el_ms", "num_preemptions", "rejected"]
    several = any(row.num_replications > 1 for row in rows)
    note = "± is the 95 % confidence interval over replications (Student's t). " if several else ""
    note += "TTFT: time from arrival to the first token; E2EL: to the last; TPOT: time per output "
    note += "token after the first; ITL: gaps between the tokens of all requests."
    if len(rows) == 1:
        found = html.definitions((written(m).label, _cell(rows[0], m)) for m in metrics)
    else:
        header = ["policy", *(key.rsplit(".", 1)[-1].replace("_", " ") for key in keys)]
        lines = [
            [row.policy, *(row.settings.get(key, "") for key in keys)]
            + [_cell(row, metric) for metric in metrics]
            for row in rows
        ]
        header += [written(metric).label for metric in metrics]
        found = html.table(header, lines, 1 + len(keys))
    return found + html.element("p", html.text(note), class_="lead")


def _by_class(results: SavedResults) -> str:
    """Say what each class of requests got, where the workload has classes."""
    if not results.runs or "tenant" not in results.runs[0].load().requests:
        return ""
    header, lines = class_table(results.folder)
    note = "Goodput of a class: its good requests over the time of the whole run; classes add up."
    return html.table(header, lines, 2) + html.element("p", html.text(note), class_="lead")


def _verdicts(results: SavedResults) -> str:
    """Compare each setting with the first one, at one load, over common random numbers."""
    there, load = shown_load(results.rows)
    values = {row.label: [run.head()["metrics"] for run in results.of(row)] for row in there}
    if len(there) < 2 or min(len(runs) for runs in values.values()) < 2:
        return ""
    base, *others = there
    lines = []
    for row in others:
        for metric in _JUDGED:
            pair = [[run[metric] for run in values[one.label]] for one in (row, base)]
            if None in (*pair[0], *pair[1]) or len(pair[0]) != len(pair[1]):
                continue
            change = paired_change(*pair)
            said = verdict(
                _short(row), _short(base), written(metric).name, change, larger_is_better(metric)
            )
            lines.append((said, _effect(change.effect_size), str(change.num_pairs)))
    intro = (
        f"Each setting against {_short(base)}, the first{', ' + load if load else ''}: paired over "
        "replications with the same random numbers; the brackets hold the 95 % confidence "
        "interval. The effect size is the mean of the paired differences over their standard "
        "deviation."
    )
    found = html.table(("verdict", "effect size", "pairs"), lines)
    if len(lines) > _SHOWN_VERDICTS:
        found = html.folded(f"{len(lines)} verdicts", found)
    return html.element("p", html.text(intro)) + found


def _figures(results: SavedResults) -> str:
    return "".join(
        html.picture(item.draw(), item.name.replace("_", " "), item.caption)
        for item in drawings(results)
    )


def _cost_models(results: SavedResults, heads: Sequence[Mapping[str, Any]]) -> str:
    parts = []
    for described in results.cost_models:
        facts = [
            (key.replace("_", " "), described[key]) for key in _OF_COST_MODEL if described.get(key)
        ]
        facts += [
            (key.replace("_", " "), _said(value))
            for key, value in (described.get("meta") or {}).items()
            if isinstance(value, str | int | float | Mapping) and key not in (*described, "engine")
        ]
        parts.append(html.element("h3", html.text(described.get("name"))))
        parts.append(html.definitions(facts))
        parts.append(_accuracy(described))
        simplifications = described.get("simplifications") or []
        if simplifications:
            parts.append(html.element("p", "What it leaves out:") + html.bullets(simplifications))
        if described.get("mismatches"):
            parts.append(
                html.element("p", "Where the profile is of something else:")
                + html.bullets(map(str, described["mismatches"]))
            )
    outside = sum(head["provenance"].get("extrapolated_steps", 0) for head in heads)
    steps = sum(head["metrics"]["num_steps"] for head in heads)
    if any("validity" in described for described in results.cost_models) and steps:
        share = f"{outside:,} of {steps:,} steps ({outside / steps:.1%})"
        parts.append(html.element("p", f"{share} lie outside the range it was measured in."))
    return "".join(parts)


def _accuracy(described: Mapping[str, Any]) -> str:
    """Say how far the cost model was off where somebody measured it."""
    errors = described.get("error")
    if isinstance(errors, Mapping):
        names = list(dict.fromkeys(key for part in errors.values() for key in part))
        rows = [
            [part.replace("_", " "), *(_share(name, found.get(name)) for name in names)]
            for part, found in errors.items()
        ]
        header = [
            "error against measured steps",
            *(_ERRORS.get(name, name.replace("_", " ")) for name in names),
        ]
        return html.table(header, rows)
    published = described.get("published_error")
    if published is not None:
        said = published if isinstance(published, str) else json.dumps(published)
        return html.element("p", html.text(f"Accuracy: published error {said}."))
    if described.get("calibration") == "UNCALIBRATED":
        return html.element(
            "p",
            "Accuracy: not known. The times are computed from a datasheet and were not held "
            "against this model on this device: compare settings by them, do not quote them.",
        )
    return html.element("p", "Accuracy: the cost model states none.")


def _provenance(results: SavedResults, heads: Sequence[Mapping[str, Any]]) -> str:
    origins = [head["provenance"] for head in heads]
    pairs: list[tuple[str, object]] = [("runs with files", len(heads))]
    for name, key in (
        ("seeds", "seed"),
        ("schedlab and packages", "versions"),
        ("git commit", "git_commit"),
    ):
        values = list(dict.fromkeys(_said(origin.get(key)) for origin in origins))
        if values:
            pairs.append((name, "; ".join(values)))
    if len(origins) == 1:
        pairs.append(("spec hash", origins[0].get("spec_hash")))
    parts = [html.definitions(pairs)]
    versions = {_said((o.get("versions"), o.get("git_commit"))) for o in origins}
    if len(versions) > 1:
        parts.append(
            html.element(
                "div", "The runs were not all made by the same version.", class_="box warning"
            )
        )
    sources = {
        f"{origin['spec']['policy']['name']}: {origin['policy_source']}"
        for origin in origins
        if "policy_source" in origin
    }
    if sources:
        parts.append(html.folded("Policies, and what they follow", html.bullets(sorted(sources))))
    workloads = list(dict.fromkeys("\n".join(o.get("workload", [])) for o in origins))
    if workloads and workloads[0]:
        more = f" (of the first run; {len(workloads)} kinds in all)" if len(workloads) > 1 else ""
        parts.append(html.folded(f"Workload{more}", html.element("pre", html.text(workloads[0]))))
    spec = results.folder / "spec.yaml"
    if spec.is_file():
        content = html.element("pre", html.text(spec.read_text(encoding="utf-8")))
        parts.append(html.folded("The experiment, spec.yaml", content))
    return "".join(parts)


def _all_metrics(rows: Sequence[Row]) -> str:
    names = list(rows[0].metrics)
    lines = [[name, *(_exact(row.mean(name)) for row in rows)] for name in names]
    header = ["metric", *(row.label or row.policy for row in rows)]
    return html.folded(
        f"{len(names)} metrics of every setting, means over replications",
        html.table(header, lines),
    )


def _short(row: Row) -> str:
    from schedlab.experiments.figures.plots import curve_name

    return curve_name(row)


def _cell(row: Row, metric: str) -> str:
    if metric not in row.metrics:
        return "-"
    mean, half_width = row.metrics[metric]
    if not math.isfinite(mean):
        return "-"
    return with_interval(mean, half_width, written(metric).scale)


def _exact(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else "-"


def _effect(size: float) -> str:
    return f"{size:+.1f}" if math.isfinite(size) else ("-" if math.isnan(size) else "constant")


def _share(name: str, value: object) -> str:
    return f"{value:.2%}" if isinstance(value, float) and name in _ERRORS else str(value)


def _said(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_said(item)}" for key, item in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
