"""A results folder as one HTML page that needs nothing but itself."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from schedlab.experiments.analysis.by_class import class_table
from schedlab.experiments.figures.figures import Drawing, all_loads, drawings, fleet_drawings
from schedlab.experiments.figures.style import house_style
from schedlab.experiments.report.fleet import fleet_table
from schedlab.experiments.report.live import live, plotly_script
from schedlab.experiments.results import tables as report
from schedlab.experiments.results.saved_results import SavedResults, read_results
from schedlab.experiments.results.selection import FOLDER, merged
from schedlab.experiments.results.tables import Row, metrics_told
from schedlab.experiments.statistics import (
    LEAST_SEEDS,
    SMALLEST,
    corrected,
    paired_change,
    verdict,
    with_interval,
)
from schedlab.sim.errors import SpecError
from schedlab.sim.files import write_text
from schedlab.sim.metrics.registry import metric_named

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TEMPLATE = Path(__file__).with_name("page.html.jinja")
_JUDGED = ("request_throughput", "request_goodput", "mean_e2el_ms", "p99_ttft_ms", "p99_tpot_ms")
_SECTIONS = (
    "expected", "verdicts", "by_class", "figures", "fleet", "cost_models", "provenance",
    "all_metrics", "live",
)  # fmt: skip
_LARGEST_SVG_BYTES = 700_000
_ERRORS = {
    "mape": "mean absolute",
    "p50": "median",
    "p90": "90th percentile",
    "max": "largest",
    "bias": "bias of the sum",
}
_OF_COST_MODEL = (
    "model", "hardware", "model_source", "hardware_source", "profile", "tensor_parallel_size",
    "dtype", "weight_dtype", "kv_dtype", "compute_efficiency", "memory_efficiency",
    "profiling_overhead_s", "several_prefills", "unequal_contexts",
)  # fmt: skip


class PageTable(NamedTuple):
    """A table of the page.

    Attributes
    ----------
    header : sequence of str
        Empty for names and values.
    lines : sequence of sequence of str
        Cells.
    num_text : int
        So many columns at the left are text, the others numbers.
    note : str
        What to know to read it; may be empty.
    """

    header: Sequence[str]
    lines: Sequence[Sequence[str]]
    num_text: int = 1
    note: str = ""


def write_page(folder: Path, output: Path | None = None, others: Sequence[Path] = ()) -> Path:
    """Write the report of a results folder.

    Parameters
    ----------
    folder : Path
        What `schedlab run`, `sweep`, `find`, `tune` or `recommend` wrote.
    output : Path, optional
        The file; report.html in the folder if absent.
    others : sequence of Path
        Results of runs or sweeps to show beside them, as one sweep over the folders.

    Returns
    -------
    Path
        The file written. The same folder gives the same bytes.

    Raises
    ------
    SchedlabError
        If the folder holds no results.
    """
    from schedlab.experiments.report.search_page import is_search, write_search_page
    from schedlab.experiments.results.results_folder import add_to_marker

    if is_search(folder):
        if others:
            raise SpecError(f"{folder} is of a search: it is shown alone")
        return write_search_page(folder, output)
    path = output or folder / "report.html"
    text = report_page(merged([read_results(one) for one in (folder, *others)]), plotly_script())
    write_text(path, text)
    if output is None:
        add_to_marker(folder, [path.name])
    return path


def report_page(results: SavedResults, library: str | None = None) -> str:
    """Return the report of results as HTML.

    Parameters
    ----------
    results : SavedResults
        A results folder, or several as one.
    library : str, optional
        Plotly's JavaScript, which makes the page alive; without it, it has no script.

    Returns
    -------
    str
        One page: what to mind, tables, verdicts over paired replications, what each class of
        requests got (where the workload has classes), figures, what the engines of a fleet did,
        the cost model and its accuracy, provenance and all metrics. Styles and images are inside.
    """
    heads = [run.head() for run in results.runs]
    of_fleet = fleet_drawings(results)
    others = [one for one in drawings(results) if one.name not in {f.name for f in of_fleet}]
    return render(
        name=results.name,
        lead=_lead(results, heads),
        notes=report.notes(results.cost_models, [], results.predictors),
        warnings=results.warnings,
        results=_results_table(results),
        verdicts=_verdicts(results),
        by_class=_by_class(results),
        figures=images(others),
        fleet=_fleet(results, of_fleet),
        cost_models=_cost_models(results, heads),
        provenance=_provenance(results, heads),
        all_metrics=_all_metrics(results.rows),
        live=live(results.rows, results.name, library),
    )


def render(
    name: str,
    lead: str,
    notes: Sequence[str],
    results: PageTable,
    *,
    warnings: Sequence[str] = (),
    command: str = "",
    **sections: object,
) -> str:
    """Return a page of what was found, escaped and laid out.

    Parameters
    ----------
    name, lead : str
        Title, and a line below it.
    notes, warnings : sequence of str
        What to mind, in boxes above all else.
    results : PageTable
        The main table.
    command : str
        What to run, shown before the table; may be empty.
    **sections
        Others of the template, by name; those that are absent are left out.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    absent = dict.fromkeys(_SECTIONS)
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        **{**absent, **sections},
        name=name, lead=lead, notes=notes, results=results, warnings=warnings, command=command,
    )  # fmt: skip


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


def _results_table(results: SavedResults) -> PageTable:
    rows = results.rows
    keys = list(dict.fromkeys(key for row in rows for key in row.settings if key != "policy"))
    metrics = ["request_throughput", "output_throughput"]
    if any(row.mean("num_with_slo") > 0 for row in rows):
        metrics += ["request_goodput", "slo_attainment"]
    metrics += ["median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "p99_itl_ms"]
    metrics += ["median_e2el_ms", "p99_e2el_ms"]
    counts = {"num_preemptions": "preempted", "rejected": "rejected"}
    none = [name for name in counts if all(row.mean(name) == 0 for row in rows)]
    metrics += [name for name in counts if name not in none]
    several = any(row.num_replications > 1 for row in rows)
    note = "± is the 95 % confidence interval over replications (Student's t). " if several else ""
    note += "TTFT: time from arrival to the first token; E2EL: to the last; TPOT: time per output "
    note += "token after the first; ITL: gaps between the tokens of all requests."
    if none:
        note += f" No request was {' or '.join(counts[name] for name in none)}."
    if len(rows) == 1:
        return _facts(((metric_named(m).axis, _cell(rows[0], m)) for m in metrics), note)
    header = ["policy", *(key.rsplit(".", 1)[-1].replace("_", " ") for key in keys)]
    lines = [
        [row.policy, *(row.settings.get(key, "") for key in keys)]
        + [_cell(row, metric) for metric in metrics]
        for row in rows
    ]
    return PageTable(
        [*header, *(metric_named(m).axis for m in metrics)], lines, 1 + len(keys), note
    )


def _by_class(results: SavedResults) -> PageTable | None:
    """Say what each class of requests got, where the workload has classes."""
    several = any(FOLDER in row.settings for row in results.rows)
    if several or not results.runs or "tenant" not in results.runs[0].load().requests:
        return None
    note = "Goodput of a class: its good requests over the time of the whole run; classes add up."
    return PageTable(*class_table(results.folder), 2, note)


def _fleet(results: SavedResults, found: Sequence[Drawing]) -> dict[str, Any] | None:
    """Say what the engines of a fleet did, where there is one."""
    told = fleet_table(results)
    return None if told is None else {"table": PageTable(*told), "figures": images(found)}


def _verdicts(results: SavedResults) -> dict[str, Any] | None:
    """Compare each setting with the first one, at each load, over common random numbers."""
    loads = all_loads(results.rows)
    runs = {row.label: [run.head()["metrics"] for run in results.of(row)] for row in results.rows}
    if max(len(rows) for rows, _ in loads) < 2 or min(map(len, runs.values())) < 2:
        return None
    found = []
    for (base, *others), load in loads:
        for row, metric in product(others, _JUDGED):
            values, base_values = ([run[metric] for run in runs[r.label]] for r in (row, base))
            if None in (*values, *base_values) or len(values) != len(base_values):
                continue
            change = paired_change(values, base_values)
            found.append((load, row, base, metric_named(metric), change))
    lines = []
    changes = corrected([change for *_, change in found])
    for (load, row, base, named, _), change in zip(found, changes, strict=True):
        sentence = verdict(_short(row), _short(base), named.label, change, named.larger_is_better)
        at = [load.split(" ", 2)[1]] if len(loads) > 1 else []
        lines.append((*at, sentence, _effect(change.effect_size), str(change.num_pairs)))
    load = loads[0][1] if len(loads) == 1 else "at each rate"
    intro = (
        f"Each setting against {_short(loads[0][0][0])}, the first"
        f"{', ' + load if load else ''}: paired over "
        "replications with the same random numbers; the brackets hold the 95 % confidence "
        f"interval. A verdict needs {LEAST_SEEDS} replications, a change of {SMALLEST:.0%} at "
        f"least, and a p-value of 5 % that is corrected for the {len(lines)} comparisons (Holm). "
        "The effect size is the mean of the paired differences over their standard deviation."
    )
    header = [loads[0][1].split(" ", 2)[2]] if len(loads) > 1 else []
    header += ["verdict", "effect size", "pairs"]
    return {"intro": intro, "table": PageTable(header, lines, num_text=len(header) - 2)}


def images(found: Iterable[Drawing]) -> list[dict[str, object]]:
    """Return figures as the template shows them."""
    return [
        {"caption": one.caption, "alt": one.name.replace("_", " "), **_image(one.draw())}
        for one in found
    ]


def _image(figure: Figure) -> dict[str, object]:
    """Return a figure as an image inside the page, and its width on the page in pixels.

    SVG with text as shapes, so that it looks the same without our font; PNG if that is large.
    """
    data, kind = _rendered(figure, "svg"), "svg+xml"
    if len(data) > _LARGEST_SVG_BYTES:
        data, kind = _rendered(figure, "png"), "png"
    width = round(float(figure.get_size_inches()[0]) * 96)
    return {"width": width, "source": f"data:image/{kind};base64,{base64.b64encode(data).decode()}"}


def _rendered(figure: Figure, image_format: str) -> bytes:
    import matplotlib as mpl

    metadata: dict[str, Any] = {"Date": None} if image_format == "svg" else {"Software": None}
    file = io.BytesIO()
    with house_style(), mpl.rc_context({"svg.fonttype": "path"}):
        figure.savefig(file, format=image_format, metadata=metadata)
    return file.getvalue()


def _cost_models(
    results: SavedResults, heads: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    if not results.cost_models:
        return None
    models = []
    for described in results.cost_models:
        facts = [
            (key.replace("_", " "), described[key]) for key in _OF_COST_MODEL if described.get(key)
        ]
        facts += [
            (key.replace("_", " "), _in_words(value))
            for key, value in (described.get("meta") or {}).items()
            if isinstance(value, str | int | float | Mapping) and key not in (*described, "engine")
        ]
        errors = described.get("error")
        models.append(
            {
                "name": described.get("name"),
                "facts": _facts(facts),
                "errors": _error_table(errors) if isinstance(errors, Mapping) else None,
                "accuracy": _accuracy(described),
                "simplifications": described.get("simplifications"),
                "mismatches": described.get("mismatches"),
            }
        )
    outside = sum(head["provenance"].get("extrapolated_steps", 0) for head in heads)
    steps = sum(head["provenance"]["num_steps"] for head in heads)
    measured = any("validity" in described for described in results.cost_models) and steps
    share = f"{outside:,} of {steps:,} steps ({outside / steps:.1%})" if measured else ""
    return {"models": models, "outside": share}


def _error_table(errors: Mapping[str, Mapping[str, object]]) -> PageTable:
    """Say how far the cost model was off where somebody measured it."""
    names = list(dict.fromkeys(name for part in errors.values() for name in part))
    header = [_ERRORS.get(name, name.replace("_", " ")) for name in names]
    lines = [
        [part.replace("_", " "), *(_share(name, values.get(name)) for name in names)]
        for part, values in errors.items()
    ]
    return PageTable(["error against measured steps", *header], lines)


def _accuracy(described: Mapping[str, Any]) -> str:
    """Say what is known of the error of a cost model that brings no table of it."""
    published = described.get("published_error")
    if published is not None:
        text = published if isinstance(published, str) else json.dumps(published)
        return f"published error {text}."
    if described.get("calibration") == "UNCALIBRATED":
        return (
            "not known. The times are computed from a datasheet and were not held "
            "against this model on this device: compare settings by them, do not quote them."
        )
    return "the cost model states none."


def _provenance(results: SavedResults, heads: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    origins = [head["provenance"] for head in heads]
    facts: list[tuple[str, object]] = [("runs with files", len(heads))]
    for name, key in (
        ("seeds", "seed"),
        ("schedlab and packages", "versions"),
        ("git commit", "git_commit"),
    ):
        values = list(dict.fromkeys(_in_words(origin.get(key)) for origin in origins))
        if values:
            facts.append((name, "; ".join(values)))
    if len(origins) == 1:
        facts.append(("spec hash", origins[0].get("spec_hash")))
    versions = {_in_words((o.get("versions"), o.get("git_commit"))) for o in origins}
    policies = {
        f"{origin['spec']['policy']['name']}: {origin['policy_source']}"
        for origin in origins
        if "policy_source" in origin
    }
    workloads = dict.fromkeys("\n".join(origin.get("workload", [])) for origin in origins)
    spec = results.folder / "spec.yaml"
    return {
        "facts": _facts(facts),
        "several_versions": len(versions) > 1,
        "policies": sorted(policies),
        "workloads": [lines for lines in workloads if lines],
        "spec": spec.read_text(encoding="utf-8") if spec.is_file() else "",
    }


def _all_metrics(rows: Sequence[Row]) -> PageTable:
    names = metrics_told(rows)
    lines = [[name, *(_exact(row.told(name).mean) for row in rows)] for name in names]
    return PageTable(["metric", *(row.label or row.policy for row in rows)], lines)


def _facts(pairs: Iterable[tuple[str, object]], note: str = "") -> PageTable:
    """Return names and values as a table."""
    return PageTable((), [(name, str(value)) for name, value in pairs], 2, note)


def _short(row: Row) -> str:
    from schedlab.experiments.figures.plots import curve_name

    return curve_name(row)


def _cell(row: Row, metric: str) -> str:
    mean, half_width = row.estimate(metric)
    return with_interval(mean, half_width, metric_named(metric).scale)


def _exact(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else "-"


def _effect(size: float) -> str:
    return f"{size:+.1f}" if math.isfinite(size) else ("-" if math.isnan(size) else "constant")


def _share(name: str, value: object) -> str:
    return f"{value:.2%}" if isinstance(value, float) and name in _ERRORS else str(value)


def _in_words(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_in_words(item)}" for key, item in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
