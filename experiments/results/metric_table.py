"""All metrics in tables, as the documentation and the command line show them."""

from __future__ import annotations

from schedlab.sim.metrics.registry import Metric, described, names

_TITLES = {
    "requests": "Of requests, in every result.json",
    "engine": "Of the engine, in every result.json",
    "fleet": "Of a fleet (`cluster`), in its result.json",
    "sessions": "Of sessions, in the result.json of a run of some",
    "tiers": "Of memory below the GPU's (`engine.kv_offload`), in its result.json",
    "more": "Computed when they are asked for",
}
_LEFT_OUT = ("median_", "std_", "p50_", "p90_", "p95_", "p99_")
_SESSION = "_session_s"


def metric_rows(every: bool = False) -> dict[str, list[tuple[str, str, str, str]]]:
    """Return (name, unit, better, definition) of every metric, by section.

    Parameters
    ----------
    every : bool
        Whether each statistic of a latency has a row; else the mean stands for all.
    """
    found: dict[str, list[tuple[str, str, str, str]]] = {title: [] for title in _TITLES.values()}
    for name in names():
        one = described(name)
        if every or not name.startswith(_LEFT_OUT) or name.endswith(_SESSION):
            told = one.every_run or one.about == "tiers"
            told = told or (one.about in ("fleet", "sessions") and not one.parameters)
            section = one.about if told else "more"
            found[_TITLES[section]].append((_name(one), one.unit, one.better, one.definition))
    return found


def metric_tables() -> str:
    """Return the same as Markdown."""
    lines = []
    for title, rows in metric_rows().items():
        lines += [
            f"### {title}",
            "",
            "| name | shown in | better | definition |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| `{name}` | {unit} | {better} | {_cell(text)} |" for name, unit, better, text in rows
        ]
        lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|").removesuffix(".")


def _name(metric: Metric) -> str:
    if not metric.parameters:
        return metric.name
    told = [
        key if parameter.default is parameter.empty else f"{key}={parameter.default}"
        for key, parameter in metric.parameters.items()
    ]
    return f"{metric.name}({', '.join(told)})"
