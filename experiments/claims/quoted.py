"""The list of quoted claims: what is said, what its source says, and which figures decide."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from schedlab.experiments.specification.fields import Section
from schedlab.sim.errors import SpecError, nearest
from schedlab.sim.yaml_lines import read_yaml

if TYPE_CHECKING:
    from schedlab.experiments.claims.claims import Finding, MeasuredFigure

LIST = Path(__file__).resolve().parents[1] / "papers" / "claims" / "quoted_claims.yml"

PARTS = {
    "A": "Static and continuous batching",
    "B": "Length-aware scheduling and learning to rank",
    "C": "KV memory and paging",
    "D": "Parameters of vLLM",
    "E": "Chunked prefill, service levels, WAIT",
    "F": "Overhead and tails",
}
"""Parts of the list by the letter that identifiers begin with."""

VERDICTS = ("holds", "holds in part", "does not hold", "checked otherwise", "not testable here")


class QuotedClaim(Section):
    """A claim as quoted, and what decides on it; figures are named by experiment."""

    id: str = Field(pattern="^[A-F][0-9]+$", description="Part, and number in it.")
    quoted: str = Field(min_length=1, description="The claim as posts have it.")
    source: str = Field(min_length=1, description="What its source says.")
    test: dict[str, list[str]] = Field(
        default_factory=dict, description="Experiment to the figures that decide."
    )
    beside: dict[str, list[str]] = Field(
        default_factory=dict, description="Experiment to figures worth seeing with it."
    )
    only: str | None = Field(
        default=None,
        description="Which part of the claim the figures test; it then holds in part at most.",
    )
    reading: str | None = Field(default=None, description="How the figures are to be read.")
    outside: str | None = Field(default=None, description="Why no simulation can decide.")
    checked: str | None = Field(default=None, description="What checks it instead of a figure.")

    @model_validator(mode="after")
    def _one_way(self) -> QuotedClaim:
        if bool(self.test) + (self.outside is not None) + (self.checked is not None) != 1:
            raise ValueError(f"{self.id}: give exactly one of test, outside and checked")
        return self

    def figures(self) -> list[tuple[str, str, bool]]:
        """Return experiment, figure, and whether it decides, in the order of the list."""
        return [
            (experiment, name, decides)
            for named, decides in ((self.test, True), (self.beside, False))
            for experiment, names in named.items()
            for name in names
        ]


def load_quoted(path: Path = LIST) -> list[QuotedClaim]:
    """Load the list of quoted claims.

    Parameters
    ----------
    path : Path
        A YAML list.

    Raises
    ------
    SpecError
        If an entry is wrong, or an identifier is given twice.
    """
    try:
        claims = TypeAdapter(list[QuotedClaim]).validate_python(read_yaml(path).data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SpecError(f"{path}: {where}: {first['msg']}") from error
    seen: set[str] = set()
    for claim in claims:
        if claim.id in seen:
            raise SpecError(f"{path}: {claim.id} is given twice")
        seen.add(claim.id)
    return claims


def wanted(claims: list[QuotedClaim]) -> dict[str, set[str]]:
    """Return which figures the claims name, by experiment."""
    found: dict[str, set[str]] = {}
    for claim in claims:
        for experiment, name, _ in claim.figures():
            found.setdefault(experiment, set()).add(name)
    return found


def measured_of(
    claim: QuotedClaim, findings: dict[str, Finding]
) -> list[tuple[MeasuredFigure, bool]]:
    """Return the figures that a claim names as they came out, and whether each decides.

    Parameters
    ----------
    claim : QuotedClaim
        Of the list.
    findings : dict
        By name of the experiment.

    Raises
    ------
    SpecError
        If there is no such experiment, or it has no such figure.
    """
    found = []
    for experiment, name, decides in claim.figures():
        if experiment not in findings:
            raise SpecError(f"{claim.id}: no experiment {experiment!r}; "
                            f"{nearest(experiment, findings)}")  # fmt: skip
        figures = {m.figure.name: m for m in findings[experiment].measured}
        if name not in figures:
            raise SpecError(f"{claim.id}: {experiment} has no figure {name!r}; "
                            f"{nearest(name, figures)}")  # fmt: skip
        found.append((figures[name], decides))
    return found


def verdict_of(claim: QuotedClaim, measured: list[tuple[MeasuredFigure, bool]]) -> str:
    """Return the verdict on a quoted claim.

    Parameters
    ----------
    claim : QuotedClaim
        Of the list.
    measured : list of (Measured, bool)
        See `measured_of`.

    Returns
    -------
    str
        One of `VERDICTS`: it holds if all figures that decide are reproduced and they test all
        of it; in part if some are, lie in our band or have at least the direction; it does not
        hold if none has.
    """
    if claim.outside is not None:
        return "not testable here"
    if claim.checked is not None:
        return "checked otherwise"
    verdicts = [m.verdict for m, decides in measured if decides]
    if claim.only is None and all(v == "reproduced" for v in verdicts):
        return "holds"
    some = any(v in ("reproduced", "in our band", "direction only") for v in verdicts)
    return "holds in part" if some else "does not hold"
