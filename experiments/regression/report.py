"""The outcome of a regression check for people, for a pull request, and for a CI server."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from schedlab.experiments.regression.check import FAILING, CaseVerdict, Move, Status
from schedlab.sim.files import replacing
from schedlab.sim.text import markdown_table, number, percent

HEADER = ("workload", "policy", "metric", "kept", "now", "change", "allowed", "")

_MOST_ROWS_MARKDOWN = 200
_ORDER: tuple[Status, ...] = (
    "worse", "not reproduced", "failed", "other question", "new", "gone", "better", "same",
)  # fmt: skip


def passes(cases: Sequence[CaseVerdict]) -> bool:
    """Say whether a check is passed: nothing worse, missing, failed or not reproduced."""
    return not any(case.status in FAILING for case in cases)


def rows(cases: Sequence[CaseVerdict]) -> list[tuple[str, ...]]:
    """Return a row for each figure that moved, and for each case without figures to compare.

    Parameters
    ----------
    cases : sequence of Case
        What was judged.

    Returns
    -------
    list of tuple of str
        Columns as in `HEADER`; failing cases first.
    """
    found: list[tuple[str, ...]] = []
    for case in sorted(cases, key=lambda case: case.status not in FAILING):
        for move in case.moves:
            verdict = "better" if move.better else "WORSE"
            if case.status == "not reproduced":
                verdict = f"NOT REPRODUCED, seed {move.seed}"
            found.append(
                (case.workload, case.policy, move.metric, *_values(move), _change(move),
                 _allowed(move), verdict)
            )  # fmt: skip
        if not case.moves and case.status != "same":
            dashes = ("-",) * 5
            found.append(
                (case.workload, case.policy, *dashes, f"{case.status.upper()}: {case.detail}")
            )
    return found


def summary_lines(cases: Sequence[CaseVerdict], versions_differ: str) -> list[str]:
    """Return what the table does not say: how many of each, how they were compared, what to do.

    Parameters
    ----------
    cases : sequence of Case
        What was judged.
    versions_differ : str
        What differs between the versions the baseline was kept by and those of now.

    Returns
    -------
    list of str
        Sentences.
    """
    count = Counter(case.status for case in cases)
    parts = [f"{count[status]} {status}" for status in _ORDER if count[status]]
    lines = [f"{len(cases)} policies on workloads: {', '.join(parts)}."]
    if exact := sum(case.exact for case in cases):
        lines.append(f"{exact} compared to the last bit: same program, same question.")
    tolerant = [c for c in cases if not c.exact and c.status in ("same", "better", "worse")]
    if tolerant:
        within = sum(case.num_within for case in tolerant)
        lines.append(
            f"{len(tolerant)} compared by tolerance, means over the seeds (changed: "
            f"{versions_differ}); "
            + (
                "1 figure moved, but no further than it may."
                if within == 1
                else f"{within} figures moved, but no further than they may."
            )
        )
    if count["better"] and passes(cases):
        lines.append("Better than kept: schedlab regress update keeps it from being lost again.")
    if not passes(cases):
        lines.append(
            "If this is meant: schedlab regress update, look at the difference, and commit it."
        )
    return lines


def markdown(cases: Sequence[CaseVerdict], versions_differ: str) -> str:
    """Return the outcome as Markdown, for the summary of a pull request.

    Parameters
    ----------
    cases, versions_differ
        As for `summary_lines`.

    Returns
    -------
    str
        At most 200 rows; failing cases come first.
    """
    verdict = "passed" if passes(cases) else "FAILED"
    lines = [f"## Scheduling regression check {verdict}", ""]
    lines += summary_lines(cases, versions_differ)
    moved = rows(cases)
    if moved:
        shown = moved[:_MOST_ROWS_MARKDOWN]
        lines += ["", *markdown_table(HEADER, shown, right=(3, 4, 5, 6))]
    if len(moved) > _MOST_ROWS_MARKDOWN:
        lines += ["", f"... and {len(moved) - _MOST_ROWS_MARKDOWN} more rows."]
    return "\n".join(lines) + "\n"


def write_junit(cases: Sequence[CaseVerdict], path: Path) -> None:
    """Write the outcome as JUnit XML: a test case for each policy on each workload.

    Parameters
    ----------
    cases : sequence of Case
        What was judged. Improvements pass, with what moved as their output.
    path : Path
        The file.
    """
    bad = [case for case in cases if case.status in FAILING]
    suite = ET.Element(
        "testsuite",
        name="schedlab regress",
        tests=str(len(cases)),
        failures=str(sum(case.status != "failed" for case in bad)),
        errors=str(sum(case.status == "failed" for case in bad)),
        time=f"{sum(case.seconds for case in cases):.3f}",
    )
    for case in cases:
        name = f"{case.policy} (gone)" if case.status == "gone" else case.policy
        test = ET.SubElement(
            suite,
            "testcase",
            classname=f"regress.{case.workload}",
            name=name,
            time=f"{case.seconds:.3f}",
        )
        text = "\n".join(_sentence(move) for move in case.moves) or case.detail
        if case.status in FAILING:
            kind = "error" if case.status == "failed" else "failure"
            first = _sentence(case.moves[0]) if case.moves else case.detail
            told = ET.SubElement(test, kind, type=case.status, message=_xml(first))
            told.text = _xml(text)
        elif text:
            ET.SubElement(test, "system-out").text = _xml(text)
    with replacing(path) as temporary:
        root = ET.Element("testsuites")
        root.append(suite)
        ET.indent(root)
        ET.ElementTree(root).write(temporary, encoding="utf-8", xml_declaration=True)


def _sentence(move: Move) -> str:
    which = f" (seed {move.seed})" if move.seed is not None else ""
    verdict = "better" if move.better else "worse"
    return (
        f"{move.metric}{which}: {' -> '.join(_values(move))} "
        f"({_change(move)}, {verdict}; allowed {_allowed(move)})"
    )


def _values(move: Move) -> tuple[str, str]:
    return number(move.before, 4), number(move.now, 4)


def _change(move: Move) -> str:
    if math.isnan(move.change) or math.isinf(move.change):
        return "-"
    # A change in the last bits must not read as none.
    small = abs(move.change) < 5e-5
    return f"{move.change:+.0e}" if small else percent(move.change, 2, signed=True)


def _allowed(move: Move) -> str:
    return f"±{number(move.allowed, 4)}" if move.allowed else "none"


def _xml(text: str) -> str:
    """Leave out what XML 1.0 cannot hold, such as the colours of a terminal."""
    return "".join(c for c in text if c in "\n\t" or ord(c) >= 32)
