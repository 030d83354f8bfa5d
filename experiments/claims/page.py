"""The page on quoted claims, and its data: the same findings give the same bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from schedlab.experiments.claims.claims import Finding, examine, load_claims, shipped
from schedlab.experiments.claims.quoted import (
    PARTS,
    VERDICTS,
    QuotedClaim,
    load_quoted,
    measured_of,
    verdict_of,
    wanted,
)
from schedlab.experiments.claims.report import (
    FIGURE_HEADER,
    anchor,
    cells,
    counts,
    experiment_data,
    section,
)
from schedlab.experiments.sweeps.runs import Runs
from schedlab.sim.files import write_text
from schedlab.sim.text import json_text, markdown_table

_PREFACE = """\
# What is said of LLM serving, and what of it holds

Written by `schedlab claims --page claims`. To change it, change `experiments/papers/claims/`
and run that again.

Five widely read posts on scheduling make {num} claims that have a number in them, or that a
number decides. Each stands here as quoted, with what its source says, and with simulated figures.
Figures that hold a single system against its paper come from the experiments of the page
[policies](policies.md) and were run for this page as well. Step times come from an analytic
roofline (UNCALIBRATED), so ratios are meant to carry over, milliseconds are not.

What the verdict on a figure means, and how intervals are made, stands on the page
[policies](policies.md). The verdict on a claim follows by rule from the figures that decide on it:

| verdict | meaning |
|---|---|
| holds | all of them are reproduced, and they test all of the claim |
| holds in part | some are, lie in our band or have at least the claimed direction; or all are, \
and a part of the claim is not tested, which is said |
| does not hold | none has |
| checked otherwise | no simulation, but a test or a measurement decides; it is named |
| not testable here | outside of what a simulation of scheduling can tell, and why |

A claim can hold and still be quoted wrongly: the column *source* says so.

Accepted bands are ours: around the source's number, as wide as a smaller setup was expected to
need, or expectations where it gives none; what lies in a band but outside the source is said to.
They were written before the first run, and not widened after it, with these exceptions. Added
after a first look were, in *length-variance* the fixed length, in *load* 0.02 and 24 requests/s, in
*closed-set* LTR over SJF, in *decision-cost* mean latency at 2 and 5 ms (for a capacity that was
badly posed), in *block-size* blocks of 256 for 50 tokens; in *long-prompts* the band of the longest
stall, at first 1.5-12 s, became what "indefinitely" claims. Moved, so that what is tested occurs at
all, were the loads of *load*, *kv-quantisation*, *paged-large-cache* and *scorpio*, the number of
requests of *short-outputs* and *paged-large-cache*, and the spike of *wait-spike*, at first of
random length, with its figures.
"""


def run_page(runs: Runs) -> tuple[list[QuotedClaim], list[Finding]]:
    """Run every experiment of this page, and of those of systems the figures that it cites.

    Parameters
    ----------
    runs : Runs
        Runs the points, and keeps them.

    Returns
    -------
    claims : list of QuotedClaim
        The list.
    findings : list of Finding
        Those of `experiments/claims` in full, then the others with the cited figures only.

    Raises
    ------
    SchedlabError
        If a file is wrong, or a run ends with an error.
    """
    claims = load_quoted()
    cited = wanted(claims)
    findings = [examine(path, spec, runs) for path, spec in load_claims(shipped("claims"))]
    own = {finding.spec.name for finding in findings}
    for path, spec in load_claims(shipped("policies")):
        if spec.name in cited and spec.name not in own:
            findings.append(examine(path, spec, runs, only=cited[spec.name]))
    return claims, findings


def markdown(claims: Sequence[QuotedClaim], findings: Sequence[Finding]) -> str:
    """Return the page: a table of all claims, a section for each part, then the experiments.

    Parameters
    ----------
    claims : sequence of QuotedClaim
        The list.
    findings : sequence of Finding
        Of all experiments that it names.

    Returns
    -------
    str
        Markdown, a pure function of the two.
    """
    by_name = {finding.spec.name: finding for finding in findings}
    own = [finding for finding in findings if finding.path.parent.name != "policies"]
    verdicts = {claim.id: verdict_of(claim, measured_of(claim, by_name)) for claim in claims}
    number = Counter(verdicts.values())
    lines = [_PREFACE.format(num=len(claims))]
    phrase = ", ".join(f"{number[verdict]} {verdict}" for verdict in VERDICTS if number[verdict])
    lines += [f"* Of {len(claims)} claims: {phrase}."]
    measured = [m for finding in own for m in finding.measured]
    lines += [f"* Of {len(measured)} figures made for this page: {counts(measured)}.", ""]
    rows = [
        (f"[{claim.id}](#{claim.id.lower()})", claim.quoted, claim.source, verdicts[claim.id])
        for claim in claims
    ]
    lines += ["## All claims", ""]
    lines += markdown_table(("", "claim as quoted", "source", "verdict"), rows)
    for letter, title in PARTS.items():
        lines += ["", f"## {letter}. {title}"]
        for claim in claims:
            if claim.id.startswith(letter):
                lines += ["", *_claim(claim, verdicts[claim.id], by_name)]
    lines += ["", "# The experiments of this page"]
    for finding in own:
        lines += ["", *section(finding)]
    return "\n".join(lines) + "\n"


def data(claims: Sequence[QuotedClaim], findings: Sequence[Finding]) -> dict[str, object]:
    """Return the same as plain data for JSON.

    Parameters
    ----------
    claims, findings : sequence
        As for `markdown`.

    Returns
    -------
    dict
        `versions`; `claims`, each with its verdict; `experiments` of this page, and those `cited`.
    """
    from schedlab.experiments.running.provenance import versions

    by_name = {finding.spec.name: finding for finding in findings}
    own = [finding for finding in findings if finding.path.parent.name != "policies"]
    return {
        "versions": versions(),
        "claims": [
            {
                **claim.model_dump(exclude_none=True, exclude_defaults=True),
                "verdict": verdict_of(claim, measured_of(claim, by_name)),
            }
            for claim in claims
        ],
        "experiments": [experiment_data(finding) for finding in own],
        "cited": [experiment_data(f) for f in findings if f not in own],
    }


def write(claims: Sequence[QuotedClaim], findings: Sequence[Finding], folder: Path) -> list[Path]:
    """Write claims.md and claims.json into a folder, which is made if absent.

    Parameters
    ----------
    claims, findings : sequence
        As for `markdown`.
    folder : Path
        Where to; files of these names are replaced.

    Returns
    -------
    list of Path
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "claims.md": markdown(claims, findings),
        "claims.json": json_text(data(claims, findings), digits=7) + "\n",
    }
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]


def claim_rows(claims: Sequence[QuotedClaim], findings: Sequence[Finding]) -> list[tuple[str, ...]]:
    """Return the table of all claims for a terminal: identifier, quotation, verdict."""
    by_name = {finding.spec.name: finding for finding in findings}
    return [(c.id, c.quoted, verdict_of(c, measured_of(c, by_name))) for c in claims]


def _claim(claim: QuotedClaim, verdict: str, findings: dict[str, Finding]) -> Iterator[str]:
    yield f"### {claim.id}"
    yield ""
    yield f"> {claim.quoted}"
    yield ""
    yield f"*Source:* {claim.source}"
    yield ""
    because = claim.outside or claim.checked
    yield f"**{verdict[0].upper()}{verdict[1:]}.**" + (f" {because}" if because else "")
    if claim.only:
        yield ""
        yield f"Tested is only a part: {claim.only}"
    if claim.reading:
        yield ""
        yield claim.reading
    if claim.figures():
        yield ""
        yield from markdown_table(
            ("experiment", "figure", "claimed", *FIGURE_HEADER[2:]),
            _figure_rows(claim, findings),
            right=(2, 3, 4),
        )
    causes = [
        f"* {measured.figure.name}: {measured.cause.sentence}"
        for measured, _ in measured_of(claim, findings)
        if measured.cause is not None
    ]
    if causes:
        yield ""
        yield "Why not (what shows it stands with the experiment):"
        yield ""
        yield from causes


def _figure_rows(claim: QuotedClaim, findings: dict[str, Finding]) -> Iterator[list[str]]:
    named = zip(claim.figures(), measured_of(claim, findings), strict=True)
    for (experiment, _, decides), (measured, _) in named:
        finding = findings[experiment]
        system = finding.spec.claim.system if finding.spec.claim else experiment
        page = "policies.md" if finding.path.parent.name == "policies" else ""
        name, *rest = cells(measured)
        shown = name if decides else f"*beside:* {name}"
        yield [f"[{experiment}]({page}#{anchor(system)})", shown, *rest]
