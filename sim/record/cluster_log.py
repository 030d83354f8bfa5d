"""The logs of several engines, read as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from schedlab.sim.record.columns import Columns, whole_numbers
from schedlab.sim.record.log import RunLog
from schedlab.sim.record.steps import Int64, StepTable, StoredSteps
from schedlab.sim.record.token_times import STINT_COLUMNS, TokenTimes

Table = dict[str, npt.NDArray[np.generic]]


class Transfer(NamedTuple):
    """The KV of a request that went from the engine of its prompt to that of its answer."""

    id: int
    prefill_engine: int
    ready_ns: int
    """When the prompt was computed."""
    start_ns: int
    """When there was room for it."""
    end_ns: int
    """When all of it was there."""
    num_bytes: int


class ClusterSteps(Mapping[str, Int64]):
    """The steps of all engines in order of their start; steps of different engines overlap.

    Columns are those of `StepTable`, and `engine`: the index of the engine that took the step.
    Counts and tokens of a row are those of its engine.

    Parameters
    ----------
    of_engines : sequence of StepTable or StoredSteps
        The steps of each engine.
    """

    def __init__(self, of_engines: Sequence[StepTable | StoredSteps]) -> None:
        self._of_engines = of_engines
        engine = np.repeat(np.arange(len(of_engines)), [steps.num_rows for steps in of_engines])
        start_ns = np.concatenate([steps["start_ns"] for steps in of_engines])
        self._order = np.lexsort((engine, start_ns))
        self._engine: Int64 = engine[self._order]

    def __len__(self) -> int:
        return len(self._of_engines[0]) + 1

    def __iter__(self) -> Iterator[str]:
        yield from self._of_engines[0]
        yield "engine"

    @property
    def num_rows(self) -> int:
        """Steps in the table."""
        return len(self._order)

    def __getitem__(self, name: str) -> Int64:
        """Return one column, shape (num_rows,).

        Raises
        ------
        KeyError
            If there is no such column.
        """
        if name == "engine":
            return self._engine
        column: Int64 = np.concatenate([steps[name] for steps in self._of_engines])[self._order]
        return column

    def rows(self, start: int, stop: int) -> Table:
        """Return some of the steps; each engine's own follow each other, so it is asked for few."""
        engine = self._engine[start:stop]
        found: Table = {name: np.empty(len(engine), dtype=np.int64) for name in self}
        found["engine"] = engine
        for number, steps in enumerate(self._of_engines):
            first = int(np.count_nonzero(self._engine[:start] == number))
            here = engine == number
            part = steps.rows(first, first + int(np.count_nonzero(here)))
            for name in steps:
                found[name][here] = part[name]
        return found


class ClusterLog:
    """What happened on several engines that shared a workload; reads as the log of one does.

    Parameters
    ----------
    of_engines : sequence of RunLog
        Their logs. Each request is in one of them: that of the engine which answered it.
    transfers : sequence of Transfer
        KV that went from engine to engine.
    """

    def __init__(self, of_engines: Sequence[RunLog], transfers: Sequence[Transfer] = ()) -> None:
        self.of_engines = of_engines
        self.transfers = transfers

    @property
    def reject_reasons(self) -> dict[int, str]:
        """Why requests were turned away, by id."""
        return {id_: why for log in self.of_engines for id_, why in log.reject_reasons.items()}

    @property
    def num_steps(self) -> int:
        """Steps run by all engines; one that they take together counts once for each."""
        return sum(log.num_steps for log in self.of_engines)

    def requests(self) -> Table:
        """Return one row a request, by id, with the column `engine`: where it was answered.

        Where KV went from engine to engine also `prefill_engine`, `transfer_start_ns`,
        `transfer_end_ns` and `transferred_bytes`; -1, and 0 bytes, of requests whose KV did not.
        """
        tables = [dict(log.requests()) for log in self.of_engines]
        for engine, table in enumerate(tables):
            table["engine"] = np.full(len(table["id"]), engine, dtype=np.int64)
        merged = {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
        order = np.argsort(merged["id"], kind="stable")
        table = {name: column[order] for name, column in merged.items()}
        return table | self._moved(table["id"]) if self.transfers else table

    def _moved(self, ids: npt.NDArray[np.generic]) -> Table:
        rows = np.array(self.transfers, dtype=np.int64)
        place = np.searchsorted(ids, rows[:, 0])
        columns = {"prefill_engine": 1, "transfer_start_ns": 3, "transfer_end_ns": 4}
        found: Table = {}
        for name, i in columns.items():
            column = np.full(len(ids), -1, dtype=np.int64)
            column[place] = rows[:, i]
            found[name] = column
        found["transferred_bytes"] = np.zeros(len(ids), dtype=np.int64)
        found["transferred_bytes"][place] = rows[:, 5]
        return found

    def steps(self) -> ClusterSteps:
        """Return one row a step of an engine."""
        return ClusterSteps([log.steps() for log in self.of_engines])

    def token_gaps(self, ids: Int64 | None = None) -> Columns:
        """Return all gaps between tokens of the same request; see `TokenTimes.gaps`."""
        return self.token_times_of_all().gaps(ids)

    def token_counts(self, ids: Int64 | None = None) -> Columns:
        """Return time_ns and count, the tokens that came out then: a row a step with any.

        With `ids` only of those requests.
        """
        if ids is not None:
            return self.token_times_of_all().counts(ids)
        counts = [log.token_counts() for log in self.of_engines]
        time_ns = np.concatenate([table["time_ns"] for table in counts])
        order = np.argsort(time_ns, kind="stable")
        count = np.concatenate([table["count"] for table in counts])
        return {"time_ns": time_ns[order], "count": count[order]}

    def token_times(self, request_id: int) -> Int64:
        """Return when each token of a request came out, in ns."""
        return self.token_times_of_all().of(request_id)

    def token_times_of_all(self) -> TokenTimes:
        """Return when all tokens came out; decode steps are counted engine by engine."""
        stints: list[Int64] = []
        bursts: list[Int64] = []
        decodes_before = 0
        for log in self.of_engines:
            # First and last decode of a stint are counted over the steps of its own engine.
            shift = np.array([0, 0, decodes_before, decodes_before])
            of_engine = log.token_times_of_all()
            table = of_engine.stints()
            columns = [whole_numbers(table, name) for name in STINT_COLUMNS]
            stints.append(np.column_stack(columns) + shift)
            decodes_before += int(np.count_nonzero(log.steps()["num_decodes"]))
            if of_engine.bursts is not None:
                bursts.append(of_engine.bursts)
        tokens = np.concatenate(bursts) if bursts else None
        return TokenTimes.of_steps(np.concatenate(stints), self.steps(), tokens)

    def preemptions(self) -> dict[str, Int64]:
        """Return one row a preemption, by request id and time; columns as of `RunLog`."""
        tables = [log.preemptions() for log in self.of_engines]
        merged = {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
        order = np.argsort(merged["id"], kind="stable")
        return {name: column[order] for name, column in merged.items()}
