"""Bugs planted by hand, one line each: what a person slips at and no rule of operators draws.

`slips.txt` lists them: the file, what is wrong, the line as it is, the line with the slip.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LIST = Path(__file__).with_name("slips.txt")
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Slip:
    """One wrong line.

    Attributes
    ----------
    path : str
        The file, from the root of the repository.
    why : str
        What is wrong.
    was, now : str
        The line as it is and as it would be, without indentation.
    """

    path: str
    why: str
    was: str
    now: str

    @property
    def line(self) -> int:
        """Where the line is now."""
        return self.place((ROOT / self.path).read_text(encoding="utf-8"))

    @property
    def change(self) -> str:
        """What is wrong, for people."""
        return self.why

    def place(self, source: str) -> int:
        """Return the number of the line in its file.

        Raises
        ------
        ValueError
            If it is not there, or more than once: the list is older than the file.
        """
        found = [i for i, line in enumerate(source.splitlines(), 1) if line.strip() == self.was]
        if len(found) != 1:
            raise ValueError(
                f"{LIST.name}: {self.path} has this line {len(found)} times, not once: {self.was}"
            )
        return found[0]

    def planted(self, source: str) -> str:
        """Return the file with the slip."""
        lines = source.splitlines()
        at = self.place(source) - 1
        lines[at] = lines[at].replace(self.was, self.now)
        return "\n".join(lines) + "\n"


def every_slip(text: str | None = None) -> list[Slip]:
    """Return the slips of the list, in its order.

    Raises
    ------
    ValueError
        If the list is not written as its head says; the message names the line.
    """
    if text is None:
        text = LIST.read_text(encoding="utf-8")
    _, *parts = f"\n{text}".split("\n@@ ")
    found = []
    for part in parts:
        head, was, now, *rest = [*part.splitlines(), "", ""]
        path, colon, why = head.partition(": ")
        if not (colon and was.startswith("-") and now.startswith("+")) or any(rest):
            raise ValueError(f"{LIST.name}: write '@@ file: what is wrong', '-' and '+': {head}")
        found.append(Slip(path, why, was[1:], now[1:]))
    return found
