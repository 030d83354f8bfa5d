"""Bugs planted by hand, a line or a few: what a person slips at and no rule of operators draws.

`slips.txt` lists them: the file, what is wrong, the lines as they are, the lines with the slip.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LIST = Path(__file__).with_name("slips.txt")
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Slip:
    """One wrong line, or a few that lie together.

    Attributes
    ----------
    path : str
        The file, from the root of the repository.
    why : str
        What is wrong.
    was, now : str
        The lines as they are and as they would be, no more of them, indented as beside the first.
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
        """Return the number of the first line in its file.

        Raises
        ------
        ValueError
            If it is not there, or more than once: the list is older than the file.
        """
        was = [line.strip() for line in self.was.splitlines()]
        lines = [line.strip() for line in source.splitlines()]
        found = [i for i in range(1, len(lines) + 1) if lines[i - 1 : i - 1 + len(was)] == was]
        if len(found) != 1:
            raise ValueError(
                f"{LIST.name}: {self.path} has this line {len(found)} times, not once: {self.was}"
            )
        return found[0]

    def planted(self, source: str) -> str:
        """Return the file with the slip, and all else in the line where it was."""
        lines = source.splitlines()
        at = self.place(source) - 1
        margin = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        now = [margin + line for line in self.now.splitlines()]
        num_lines = len(self.was.splitlines())
        lines[at : at + num_lines] = now + [""] * (num_lines - len(now))
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
        head, *changes = [line for line in part.splitlines() if line]
        path, colon, why = head.partition(": ")
        was = [line[1:] for line in changes if line[0] == "-"]
        now = [line[1:] for line in changes if line[0] == "+"]
        signs = "".join(line[0] for line in changes)
        if not (colon and was and now) or signs != "-" * len(was) + "+" * len(now):
            raise ValueError(f"{LIST.name}: write '@@ file: what is wrong', '-' and '+': {head}")
        if len(now) > len(was):
            raise ValueError(f"{LIST.name}: no more lines than there were: {head}")
        margin = len(was[0]) - len(was[0].lstrip())
        slip = (_without(margin, lines) for lines in (was, now))
        found.append(Slip(path, why, *slip))
    return found


def _without(margin: int, lines: list[str]) -> str:
    if any(line[:margin].strip() for line in lines):
        raise ValueError(f"{LIST.name}: indented less than the first line: {lines}")
    return "\n".join(line[margin:] for line in lines)
