"""Check laws one after the other, and say which is broken, by what, and how to see it again."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from schedlab.sim.errors import SchedlabError, described, nearest
from schedlab.testing.cases import Case, smallest

T = TypeVar("T")
Law = Callable[[T, Case], None]
"""Called with what is checked and a case; raises whatever comes up if the law does not hold."""
FAULTS = (Exception, SystemExit, GeneratorExit)
"""What may come up. Whoever ends the process keeps no law; only Ctrl-C is the user's own."""


class LawBroken(AssertionError):  # noqa: N818 - it reads as a sentence
    """What was checked breaks a law.

    Attributes
    ----------
    law : str
        Its name, to be given as `only`.
    reason : str
        What happened, in one line or more.
    case : Case or None
        The smallest workload found that shows it.
    """

    def __init__(
        self, subject: str, law: str, meaning: str, reason: str, case: Case | None
    ) -> None:
        self.law = law
        self.reason = reason
        self.case = case
        text = f"{subject} breaks the law {law!r} ({meaning}):\n  {reason}"
        if case is not None:
            requests = "request" if len(case.workload) == 1 else "requests"
            text += (
                f"\nsmallest workload found, {len(case.workload)} {requests}; repeat with "
                f"only={law!r}, cases=[case], where\ncase = {case}"
            )
        super().__init__(text)


class Verdict(NamedTuple):
    """What came of one law: `broken` is None if it holds."""

    law: str
    meaning: str
    broken: LawBroken | None


def verdicts(
    subject: str,
    make: T,
    laws: Mapping[str, Law[T]],
    cases: Sequence[Case],
    only: str | Iterable[str] | None = None,
) -> list[Verdict]:
    """Check laws over all cases.

    Parameters
    ----------
    subject : str
        What a message calls the thing that is checked.
    make : object
        What a law gets: a function that gives a fresh one, for all that have state.
    laws : mapping of str to callable
        By name; the first line of its docstring says what it means.
    cases : sequence of Case
        The workloads, in the order to try.
    only : str or iterable of str, optional
        Names of the laws to check; all by default.

    Raises
    ------
    ValueError
        If there is no such law; names the nearest.
    """
    chosen = list(laws) if only is None else [only] if isinstance(only, str) else list(only)
    for name in chosen:
        if name not in laws:
            raise ValueError(f"there is no law {name!r}; {nearest(name, laws)}")
    found = []
    for name in chosen:
        law = laws[name]
        meaning = (law.__doc__ or "").partition("\n")[0].rstrip(".")
        found.append(
            Verdict(name, meaning, _first_broken(subject, make, name, meaning, law, cases))
        )
    return found


def raise_first(found: Iterable[Verdict]) -> None:
    """Raise `LawBroken` of the first law that does not hold, if there is one."""
    for verdict in found:
        if verdict.broken is not None:
            raise verdict.broken


def _first_broken(
    subject: str, make: T, name: str, meaning: str, law: Law[T], cases: Sequence[Case]
) -> LawBroken | None:
    def error_of(case: Case) -> BaseException | None:
        try:
            law(make, case)
        except FAULTS as error:
            if _is_told_to_end(error):
                raise
            return error
        return None

    for case in cases:
        error = error_of(case)
        if error is not None:
            small = smallest(case, _fails_like(error, error_of))
            error = error_of(small) or error
            broken = LawBroken(subject, name, meaning, _in_words(error), small)
            broken.__cause__ = error
            return broken
    return None


def _is_told_to_end(error: BaseException) -> bool:
    """Return whether a signal that a command of ours honours ended the process."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    where = str(frame.f_globals.get("__name__"))
    return isinstance(error, SystemExit) and where.startswith("schedlab.experiments.")


def _fails_like(
    error: BaseException, error_of: Callable[[Case], BaseException | None]
) -> Callable[[Case], bool]:
    """Return whether a case gives the same kind of error: another fault must not be shown."""
    return lambda case: type(error_of(case)) is type(error)


def _in_words(error: BaseException) -> str:
    if isinstance(error, AssertionError):
        return str(error)
    if isinstance(error, SchedlabError):
        return f"{type(error).__name__}: {error}"
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{described(error)} in {at.name}() ({Path(at.filename).name}:{at.lineno})"
