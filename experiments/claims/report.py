"""Verdicts on claims as a page of Markdown and as JSON: the same findings give the same bytes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from schedlab.experiments.claims.claims import VERDICTS, Finding, MeasuredFigure
from schedlab.experiments.claims.readings import Reading
from schedlab.experiments.specification.claim import Figure
from schedlab.experiments.specification.claim_settings import settings_of
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.sweep import shown
from schedlab.sim.files import write_text
from schedlab.sim.text import json_text, markdown_table, number

_ABOUT = {
    "policies": """\
# Does it do what its paper says?

Written by `schedlab claims{files}`. To change it, change `experiments/papers/{folder}/*.yaml` and
run that again.

Each system of the literature is held against the figures of its paper, in simulation.""",
    "fleets": """\
# Do fleets do what is said of them?

Written by `schedlab claims --page fleets`. To change it, change `experiments/papers/fleets/*.yaml`
and run that again.

What papers and posts claim of several engines (prompts and answers apart, migration, routers) is
held against simulation.""",
}
"""How each page begins."""

_ABOUT_OWN = """\
# Does it do what is said of it?

Written by `schedlab claims {files}`. To change it, change what it is made of and run that again.

What is claimed is held against simulation."""
_PAPERS = Path(__file__).resolve().parents[1] / "papers"

_PREFACE = """\
 The step
times come from an analytic roofline (UNCALIBRATED: datasheets, and what kernels reach of them),
so ratios between policies are meant to carry over, milliseconds are not. All setups are smaller
than, or different from, the papers'; what differs stands with each system.

*measured* is the estimate over the seeds of the experiment with its 95 % confidence interval
(Student's t). Seeds are paired: both sides of a comparison meet the same arrivals and lengths.
Ratios are ratios of means. The verdicts, made by rule and never by hand:

| verdict | meaning |
|---|---|
| reproduced | the estimate lies in the accepted band, the interval meets what the source \
states, if it states a number, to the digits it states, and, where the claim has a direction, the \
interval excludes "no effect" (a ratio of 1, a change of 0) |
| in our band | the same, but the interval lies wholly outside what the source states |
| direction only | outside the band, but the interval lies wholly on the claimed side of no effect |
| opposite | the interval lies wholly on the other side of no effect |
| not reproduced | none of these |
| not measured | a replication had nothing to measure |

The band is fixed in the experiment beside the paper's own figure; where the paper gives none, the
table shows a dash and the band is an expectation of ours."""
_MOVED = {
    "policies": """\
 Loads that a setup states relative to
what the engine serves (hrrn, llumnix, ltr-overload, qoserve) moved when the step times did.
""",
    "fleets": """\
 Most set-ups were moved after a
first look, so that what is claimed can occur at all; each says how. Figures of *distserve*, of
*two-choices* and of gaps in *splitwise* were posed anew with them, and the band of *llm-d*'s
throughput over random began at 1.5.
""",
}
"""How it ends."""


def markdown(findings: Sequence[Finding], page: str = "policies") -> str:
    """Return the page: a table of all figures, then a section for each system.

    Parameters
    ----------
    findings : sequence of Finding
        In the order in which they are shown.
    page : {"policies", "fleets"}
        Which page it is.

    Returns
    -------
    str
        Markdown, a pure function of the findings.
    """
    measured = [m for finding in findings for m in finding.measured]
    stated = [m for m in measured if m.figure.paper is not None]
    papers = [m for m in stated if m.figure.stated_by == "paper"]
    posts = [m for m in stated if m.figure.stated_by == "post"]
    own = [m for m in measured if m.figure.paper is None]
    lines = [_beginning(page, findings)]
    lines += [f"* {len(papers)} figures that papers state: {counts(papers)}."] if papers else []
    lines += (
        [f"* {len(posts)} figures that posts and vendors state: {counts(posts)}."] if posts else []
    )
    lines += [f"* {len(own)} expectations of ours beside them: {counts(own)}."] if own else []
    lines += ["", "## All figures", ""]
    rows: list[list[str]] = []
    for finding in findings:
        claim = finding.spec.claim
        assert claim is not None
        about = [f"[{claim.system}](#{anchor(claim.system)})", claim.source, _setup(finding)]
        for figure in finding.measured:
            rows.append([*about, *cells(figure)])
            about = ["", "", ""]
    header = ("system", "source", "setup", *FIGURE_HEADER)
    lines += markdown_table(header, rows, right=(4, 5, 6))
    for finding in findings:
        lines += ["", *section(finding)]
    return "\n".join(lines) + "\n"


def data(findings: Sequence[Finding]) -> dict[str, object]:
    """Return the same as plain data for JSON, with provenance and every replication.

    Parameters
    ----------
    findings : sequence of Finding
        In the order in which they are stored.

    Returns
    -------
    dict
        `versions` and `experiments`; numbers have seven significant digits, None is what could
        not be measured.
    """
    from schedlab.experiments.running.provenance import versions

    return {
        "versions": versions(),
        "experiments": [experiment_data(finding) for finding in findings],
    }


def experiment_data(finding: Finding) -> dict[str, object]:
    """Return an experiment with its figures as plain data.

    Parameters
    ----------
    finding : Finding
        What came out; figures that were not asked for are not in it.
    """
    claim = finding.spec.to_data()["claim"]
    assert isinstance(claim, dict)
    measured = {m.figure.name for m in finding.measured}
    return {
        "file": finding.path.name,
        "source_sha256": finding.source_sha256,
        "spec_hash": finding.spec_hash,
        "seeds": [finding.spec.seed + r for r in range(finding.spec.replications)],
        "cost_models": list(finding.cost_models),
        "claim": {**claim, "figures": [f for f in claim["figures"] if f["name"] in measured]},
        "figures": [_figure_data(measured) for measured in finding.measured],
    }


def write(findings: Sequence[Finding], folder: Path, page: str = "policies") -> list[Path]:
    """Write PAGE.md and PAGE.json into a folder, which is made if absent.

    Parameters
    ----------
    findings : sequence of Finding
        What to write.
    folder : Path
        Where to; files of these names are replaced.
    page : {"policies", "fleets"}
        Which page it is.

    Returns
    -------
    list of Path
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        f"{page}.md": markdown(findings, page),
        f"{page}.json": json_text(data(findings), digits=7) + "\n",
    }
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]


def row_texts(findings: Sequence[Finding]) -> list[tuple[str, ...]]:
    """Return the table of all figures for a terminal: system, then the cells of a figure."""
    return [
        (finding.spec.claim.system if finding.spec.claim else "", *cells(measured))
        for finding in findings
        for measured in finding.measured
    ]


def figure_text(figure: Figure, value: float) -> str:
    """Return a number of a figure as tables show it: 1.83x, +21 %, or three digits.

    Parameters
    ----------
    figure : Figure
        Whose number it is.
    value : float
        The number.
    """
    if math.isnan(value):
        return "-"
    if figure.compare == "ratio":
        return f"{_three(value)}x"
    if figure.compare in ("increase", "reduction"):
        # A reduction is shown as the change that it is.
        change = 100.0 * (value if figure.compare == "increase" else -value)
        # Adding 0.0 turns a rounded -0.0 into 0.0.
        return f"{round(change, 1) + 0.0:+.1f} %" if math.isfinite(change) else _three(change)
    return _three(value)


def band_text(figure: Figure, band: tuple[float, float] | None) -> str:
    """Return a band as tables show it; an open end is left out.

    Parameters
    ----------
    figure : Figure
        Whose band it is.
    band : (float, float) or None
        Low and high; None is shown as a dash.
    """
    if band is None:
        return "-"
    low, high = band
    if figure.compare == "reduction":
        low, high = high, low
    ends = [figure_text(figure, end) for end in (low, high)]
    if low == high:
        return ends[0]
    if not math.isfinite(low):
        return f"at most {ends[1]}" if math.isfinite(high) else "any"
    return f"{ends[0]} to {ends[1]}" if math.isfinite(high) else f"at least {ends[0]}"


def _ships(path: Path) -> bool:
    """Whether an experiment comes with the program."""
    return _PAPERS in path.resolve().parents


def _beginning(page: str, findings: Sequence[Finding]) -> str:
    """Return how a page begins; one of another folder's experiments names that folder."""
    folders = {finding.path.parent for finding in findings}
    folder = next(iter(folders)).name if len(folders) == 1 else page
    own = [path.as_posix() for path in {one.path: None for one in findings} if not _ships(path)]
    if own:
        return _ABOUT_OWN.format(files=" ".join(own)) + _PREFACE + "\n"
    if folder in _ABOUT or len(folders) > 1:
        return _ABOUT[page].format(files="", folder=page) + _PREFACE + _MOVED[page]
    files = f" experiments/papers/{folder}/*.yaml"
    return _ABOUT["policies"].format(files=files, folder=folder) + _PREFACE + "\n"


def counts(measured: Sequence[MeasuredFigure]) -> str:
    """Return how many figures have each verdict, as a phrase."""
    verdicts = Counter(m.verdict for m in measured)
    return ", ".join(f"{verdicts[v]} {v}" for v in VERDICTS if verdicts[v])


FIGURE_HEADER = ("figure", "paper", "accepted", "measured [95 %]", "verdict")
"""What `cells` are."""


def cells(measured: MeasuredFigure) -> list[str]:
    """Return what a table shows of a figure: name, paper, accepted, measured, verdict."""
    figure = measured.figure
    found = figure_text(figure, measured.estimate)
    if not math.isnan(measured.estimate):
        ends = [measured.low, measured.high]
        if figure.compare == "reduction":
            ends.reverse()
        found += " [" + ", ".join(figure_text(figure, end) for end in ends) + "]"
    if measured.num_bounds:
        found += " (a bound)"
    return [
        figure.name,
        band_text(figure, figure.paper),
        band_text(figure, figure.accept),
        found,
        measured.verdict,
    ]


def section(finding: Finding) -> Iterator[str]:
    """Yield the lines of the section on an experiment."""
    spec, claim = finding.spec, finding.spec.claim
    assert claim is not None
    yield f"## {claim.system}"
    yield ""
    yield f"{claim.statement} ({claim.source})"
    yield ""
    file = finding.path.as_posix()
    if _ships(finding.path):
        file = f"experiments/papers/{finding.path.parent.name}/{finding.path.name}"
    yield f"* Experiment: `{file}`, {_setup(finding)}."
    yield f"* Differs from the source: {claim.scaled_down}"
    for measured in finding.measured:
        yield f"* {_sentence(spec, measured)}"
        yield from (f"  {line}" for line in _why(measured))
    if claim.comment:
        yield ""
        yield claim.comment
    if spec.claim is not None and any(m.num_bounds for m in finding.measured):
        yield ""
        yield "A bound: in some replications the bar still held at the highest load of the sweep."


def _why(measured: MeasuredFigure) -> Iterator[str]:
    """Yield why a figure is not reproduced, and what shows it; nothing where nobody says why."""
    cause = measured.cause
    if cause is None:
        return
    yield f"* *Why:* {cause.sentence}"
    for variation, again in zip(cause.shown_by, measured.shown_by, strict=True):
        changes = ", ".join(f"{key}={_changed(value)}" for key, value in variation.change.items())
        varied = f" (`{changes}`)" if changes else ""
        _, _, expected, found, _ = cells(again)
        holds = "as it says" if again.verdict == "reproduced" else f"but {expected} was expected"
        yield f"  * {variation.name}{varied}: {found}, {holds}."


def _changed(value: object) -> str:
    """Return a changed value as text; of a file its name, which is the same on every machine."""
    is_file = isinstance(value, str) and Path(value).is_absolute()
    return Path(str(value)).name if is_file else shown(value)


def _sentence(spec: ExperimentSpec, measured: MeasuredFigure) -> str:
    """Say in words what was compared, and how it came out."""
    figure = measured.figure
    if figure.capacity is not None:
        bars = [f"{name} <= {_three(bar)}" for name, bar in figure.capacity.at_most.items()]
        bars += [f"{name} >= {_three(bar)}" for name, bar in figure.capacity.at_least.items()]
        what = f"largest `{figure.capacity.over}` with {' and '.join(bars)}"
    else:
        assert figure.metric is not None
        knobs = ", ".join(f"{k}={shown(v)}" for k, v in figure.metric.knobs.items())
        what = f"`{figure.metric.name}`" + (f" ({knobs})" if knobs else "")
    where = _where(spec, figure, "of") or "in the only setting"
    if figure.against is not None:
        where += f" against {_where(spec, figure, 'against')}"
    if figure.at:
        where += f", at {_where(spec, figure, 'at')}"
    _, _, _, found, outcome = cells(measured)
    sides = ""
    if measured.against:
        sides = f" ({_mean(measured.of)} against {_mean(measured.against)})"
    return f"**{figure.name}**: {outcome}. {what}, {where}: {found}{sides}."


def _where(spec: ExperimentSpec, figure: Figure, side: str) -> str:
    """Name the settings of a side as the figure does, with the name of what is chosen."""
    setting = settings_of(spec, figure, "against" if side == "against" else "of")[0]
    texts = []
    for key, given in (getattr(figure, side) or {}).items():
        chosen = spec.sweep[key][setting[list(spec.sweep).index(key)]]
        if isinstance(given, dict) and isinstance(chosen, dict) and "name" in chosen:
            given = {"name": chosen["name"], **given}
        texts.append(
            shown(given) if key == "policy" else f"{key.rsplit('.', 1)[-1]}={shown(given)}"
        )
    return ", ".join(texts)


def _mean(readings: Sequence[Reading]) -> str:
    values = [reading.value for reading in readings]
    return _three(math.fsum(values) / len(values))


def _setup(finding: Finding) -> str:
    spec = finding.spec
    return f"{spec.model} on {spec.hardware}, {spec.replications} seeds"


def _figure_data(measured: MeasuredFigure) -> dict[str, object]:
    return {
        "name": measured.figure.name,
        "estimate": measured.estimate,
        "interval": [measured.low, measured.high],
        "of": [reading.value for reading in measured.of],
        "against": [reading.value for reading in measured.against],
        "num_bounds": measured.num_bounds,
        "verdict": measured.verdict,
        **({"shown_by": [_figure_data(m) for m in measured.shown_by]} if measured.shown_by else {}),
    }


def anchor(heading: str) -> str:
    """Return GitHub's anchor of a heading."""
    kept = "".join(c for c in heading.lower() if c.isalnum() or c in " -_")
    return kept.replace(" ", "-")


def _three(value: float) -> str:
    return number(value, padded=True)
