"""What is written down while engines run: one row behind the other, of one engine or of several."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from librt.strings import BytesWriter

from schedlab.sim.record.segment_row import SEGMENT_COLUMNS
from schedlab.sim.record.spool import SpoolFile

if TYPE_CHECKING:
    from schedlab.sim.record.log import RunLog


class Rows:
    """Tables in memory, as bytes: a number after the other, in the order of their columns.

    Attributes
    ----------
    requests, targets, stints : BytesWriter
        Rows as `RunLog` describes them.
    segments, durations_ns, new_blocks : BytesWriter
        A row a run of steps, and two numbers a step.
    """

    __slots__ = ("durations_ns", "new_blocks", "requests", "segments", "stints", "targets")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.requests = BytesWriter()
        self.targets = BytesWriter()
        self.segments = BytesWriter()
        self.durations_ns = BytesWriter()
        self.new_blocks = BytesWriter()
        self.stints = BytesWriter()


class CommonRows(Rows):
    """Rows of all engines of a fleet as they come, until somebody asks for those of one.

    What an engine writes follows what another one wrote just now, which is still in the caches of
    the processor. Tables of their own would each end somewhere else, and grow one by one.

    Parameters
    ----------
    file : SpoolFile
        Where all of them go that do not fit in memory: a thousand engines have no thousand files
        open.

    Attributes
    ----------
    logs : list of RunLog
        Who writes here; each is known by its place.
    requests_of, segments_of, stints_of : BytesWriter
        Whose each row is: places, of 4 bytes.
    """

    __slots__ = ("file", "logs", "requests_of", "segments_of", "stints_of")

    def __init__(self, file: SpoolFile) -> None:
        super().__init__()
        self.file = file
        self.logs: list[RunLog] = []

    def clear(self) -> None:
        """Begin anew, with the same logs."""
        super().clear()
        self.requests_of = BytesWriter()
        self.segments_of = BytesWriter()
        self.stints_of = BytesWriter()

    def deal(self) -> None:
        """Give each log its rows."""
        owns = [log.own_rows for log in self.logs]
        of = _places(self.requests_of)
        _deal(self.requests, of, [own.requests for own in owns])
        _deal(self.targets, of, [own.targets for own in owns])
        of = _places(self.stints_of)
        _deal(self.stints, of, [own.stints for own in owns])
        of = _places(self.segments_of)
        _deal(self.segments, of, [own.segments for own in owns])
        segments = np.frombuffer(self.segments.getvalue(), dtype=np.int64)
        num_steps = segments[SEGMENT_COLUMNS.index("num_steps") :: len(SEGMENT_COLUMNS)]
        of = np.repeat(of, num_steps)
        _deal(self.durations_ns, of, [own.durations_ns for own in owns])
        _deal(self.new_blocks, of, [own.new_blocks for own in owns])
        self.clear()


def _places(rows: BytesWriter) -> npt.NDArray[np.int32]:
    return np.frombuffer(rows.getvalue(), dtype=np.int32)


def _deal(rows: BytesWriter, of: npt.NDArray[np.int32], to: list[BytesWriter]) -> None:
    """Append each row of a table to the table of whose it is."""
    if not len(of):
        return
    table = np.frombuffer(rows.getvalue(), dtype=np.int64).reshape(len(of), -1)
    order = np.argsort(of, kind="stable")
    ends = np.searchsorted(of[order], np.arange(len(to)), side="right").tolist()
    first = 0
    for own, end in zip(to, ends, strict=True):
        if end > first:
            own.write(table[order[first:end]].tobytes())
        first = end
