"""Drafts of a run that were written down, to be replayed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from schedlab.sim.core.track import Outcome, verify_one_by_one
from schedlab.sim.errors import SpecError
from schedlab.sim.files import open_regular, write_text
from schedlab.sim.request import Request

Drafts = list[tuple[int, int]]
"""Of one request: (tokens drafted, tokens accepted), one verification after the other."""


class RecordedAcceptance:
    """Drafts as they were recorded.

    Parameters
    ----------
    path : Path
        JSON Lines, a request each: ``{"id": 0, "drafted": [4, 4, 0], "accepted": [2, 4, 0]}``, one
        number a verification, from the first token of the answer on.

    Raises
    ------
    SpecError
        If the file is missing or wrong; names the line.

    Notes
    -----
    What was recorded is told by the place in the answer, so that it also serves another schedule:
    who stands in the middle of a recorded draft finds what is left of it, and one that was cut
    short finds fewer tokens. Behind the end of the recording nothing is drafted.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._of_requests = read_drafts(path)

    def outcome(self, request: Request, output_tokens: int) -> Outcome:
        """Return what became of the drafts of a request.

        Raises
        ------
        SpecError
            If it was not recorded.
        """
        drafts = self._of_requests.get(request.id)
        if drafts is None:
            raise SpecError(f"{self._path}: no drafts of request {request.id} were recorded")
        return _Recorded(drafts)


class _Recorded:
    """What became of the drafts of one request, by place."""

    def __init__(self, drafts: Drafts) -> None:
        # By place: how many tokens were drafted from there on, and how many of them accepted.
        self._left: list[tuple[int, int]] = [(0, 0)]  # the first token comes out of the prompt
        for drafted, accepted in drafts:
            self._left += [(drafted - i, accepted - i) for i in range(accepted + 1)]

    def verify(self, place: int, most: int) -> tuple[int, int]:
        """Return what was drafted from a place on, `most` tokens at most; see `Outcome`."""
        if place >= len(self._left):
            return 0, 0
        drafted, accepted = self._left[place]
        return min(drafted, most), min(accepted, most)

    def verify_on(self, place: int, most: int, stop: int) -> tuple[bytes, bytes]:
        """Verify time after time; see `Outcome`."""
        return verify_one_by_one(self, place, most, stop)


def read_drafts(path: Path) -> dict[int, Drafts]:
    """Read the drafts of requests, by id.

    Raises
    ------
    SpecError
        If the file is missing or wrong; names the line.
    """
    found: dict[int, Drafts] = {}
    with open_regular(path) as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            request_id, drafts = _parse(where, line)
            if request_id in found:
                raise SpecError(f"{where}: request {request_id} is there twice")
            found[request_id] = drafts
    return found


def _parse(where: str, line: bytes) -> tuple[int, Drafts]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise SpecError(f"{where}: no JSON: {error}") from None
    if not isinstance(row, dict) or not isinstance(row.get("id"), int):
        raise SpecError(f'{where}: must be an object with "id", a whole number')
    for name in ("drafted", "accepted"):
        numbers = row.get(name)
        if not isinstance(numbers, list) or not all(type(n) is int and n >= 0 for n in numbers):
            raise SpecError(f'{where}: "{name}" must be a list of whole numbers >= 0')
    if len(row["drafted"]) != len(row["accepted"]):
        raise SpecError(f'{where}: "drafted" and "accepted" must be of one length')
    drafts = list(zip(row["drafted"], row["accepted"], strict=True))
    for drafted, accepted in drafts:
        if accepted > drafted:
            raise SpecError(f"{where}: {accepted} tokens accepted of {drafted} drafted")
    return row["id"], drafts


def write_drafts(path: Path, of_requests: Mapping[int, Iterable[tuple[int, int]]]) -> None:
    """Write the drafts of requests down, whole or not at all."""
    lines = []
    for request_id, drafts in sorted(of_requests.items()):
        rows = list(drafts)
        row = {
            "id": request_id,
            "drafted": [drafted for drafted, _ in rows],
            "accepted": [accepted for _, accepted in rows],
        }
        lines.append(json.dumps(row) + "\n")
    write_text(path, "".join(lines))
