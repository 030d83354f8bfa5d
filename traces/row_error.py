"""The error of one row, which a reader can turn into the error of one line."""

from schedlab.sim.errors import TraceError


class RowError(TraceError):
    """A value of one row is impossible.

    Attributes
    ----------
    row : int
        The row, counted from 0.
    problem : str
        What is wrong with it.
    """

    def __init__(self, origin: str, row: int, problem: str) -> None:
        super().__init__(f"{origin}: row {row}: {problem}")
        self.row = row
        self.problem = problem
