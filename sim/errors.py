"""The errors a run can end with. Each message names who is at fault and what to do."""

import difflib
import re
from collections.abc import Iterable

MAX_LISTED = 60
"""A message lists no more names than this; the tables of models and of policies still fit."""

_LONGEST_WORD_CHARS = 200
_LONG_WORD = re.compile(rf"\S{{{_LONGEST_WORD_CHARS + 1},}}")


class SchedlabError(Exception):
    """Base of every error that is meant to be read by a user, not debugged.

    A word of a message that is too long to be read, such as a quoted value of a damaged file, is
    cut.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(_LONG_WORD.sub(_cut, str(message)))


def _cut(word: re.Match[str]) -> str:
    return f"{word[0][:60]}... ({len(word[0]):,} characters)"


class PolicyError(SchedlabError):
    """A policy raised, or returned something that is no plan."""


class InfeasiblePlan(PolicyError):  # noqa: N818
    """A policy asked for what the engine cannot do: unknown request, no memory, over budget."""


class PolicyLied(PolicyError):  # noqa: N818
    """A policy broke its skip-ahead promise, or planned twice and did not agree with itself."""


class Stalled(SchedlabError):  # noqa: N818
    """Nothing can happen any more although requests wait, or work is thrown away for ever."""


class TraceError(SchedlabError):
    """A trace file cannot be read as what it claims to be."""


class SpecError(SchedlabError):
    """An experiment specification is wrong; the message names file, line and key."""


def described(error: BaseException) -> str:
    """Return the type of an exception and what it says, on one line.

    Examples
    --------
    >>> described(KeyError("a"))
    "KeyError: 'a'"
    """
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def look_alike(word: object, choices: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the choice that looks most like a word, whatever the case of their letters.

    Parameters
    ----------
    word : object
        What was written.
    choices : iterable of str
        What could have been written.
    cutoff : float
        Likeness asked for, 0 to 1, as `difflib.SequenceMatcher.ratio` measures it.

    Returns
    -------
    str or None
        None if no choice looks like it.

    Examples
    --------
    >>> look_alike("Max_num_seq", ["max_num_seqs", "block_size"])
    'max_num_seqs'
    """
    by_folded = {choice.casefold(): choice for choice in choices}
    near = difflib.get_close_matches(str(word).casefold(), by_folded, n=1, cutoff=cutoff)
    return by_folded[near[0]] if near else None


def nearest(word: object, choices: Iterable[str]) -> str:
    """Return how to go on after a wrong name: the nearest choice, or all if they are few.

    Parameters
    ----------
    word : object
        What was written.
    choices : iterable of str
        What could have been written.

    Returns
    -------
    str
        The end of a message, without a full stop.

    Examples
    --------
    >>> nearest("fcsf", ["fcfs", "sjf"])
    'did you mean fcfs?'
    >>> nearest("lottery", ["fcfs", "sjf"])
    'choose from fcfs, sjf'
    >>> nearest("lottery", [])
    'there are none'
    """
    known = sorted(choices)
    if not known:
        return "there are none"
    if near := look_alike(word, known):
        return f"did you mean {near}?"
    if len(known) > MAX_LISTED:
        return f"none of the {len(known)} names there are is like it"
    return f"choose from {', '.join(known)}"
