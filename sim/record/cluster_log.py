"""The logs of several engines, read as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from schedlab.sim.record.columns import Columns, whole_numbers
from schedlab.sim.record.fleet import Span
from schedlab.sim.record.log import RunLog
from schedlab.sim.record.steps import Int64, StepTable, StoredSteps
from schedlab.sim.record.token_times import (
    MICRO_BATCH,
    STINT_COLUMNS,
    TokenTimes,
    decodes_before,
    one_a_step,
)

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


class Move(NamedTuple):
    """A request that went from engine to engine while it decoded."""

    id: int
    from_engine: int
    to_engine: int
    start_ns: int
    """When the first of its KV was sent."""
    stop_ns: int
    """When it stopped, for the last of it."""
    end_ns: int
    """When all of it was there."""
    num_bytes: int
    num_stages: int


class Place(NamedTuple):
    """One engine of a fleet whose engines come and go."""

    pool: int
    paid: tuple[Span, ...]
    """When its devices were there."""
    served: tuple[Span, ...]
    """When it was up."""


class Loss(NamedTuple):
    """A request that lost its engine, which died."""

    id: int
    engine: int
    at_ns: int
    lost_tokens: int
    """Computed tokens whose keys and values are gone."""


class ClusterSteps(Mapping[str, Int64]):
    """The steps of all engines in order of their start; steps of different engines overlap.

    Columns are those of `StepTable`, and `engine`: the index of the engine that took the step.
    Counts and tokens of a row are those of its engine; 0 in what only others of them have: drafts,
    stages of a pipeline. Micro-batches of an engine that was replaced are counted on.

    Parameters
    ----------
    of_logs : sequence of StepTable or StoredSteps
        Steps that were logged together.
    engines : sequence of int
        Which engine took them.
    """

    def __init__(self, of_logs: Sequence[StepTable | StoredSteps], engines: Sequence[int]) -> None:
        self._of_logs = of_logs
        self._names_of = [tuple(steps) for steps in of_logs]
        self._names = tuple(dict.fromkeys([name for names in self._names_of for name in names]))
        log = np.repeat(np.arange(len(of_logs)), [steps.num_rows for steps in of_logs])
        start_ns = np.concatenate([steps["start_ns"] for steps in of_logs])
        self._order = np.lexsort((log, start_ns))
        self._log: Int64 = log[self._order]
        self._engine: Int64 = np.array(engines, dtype=np.int64)[self._log]
        self._micro_batches_before = [0] * len(of_logs)
        if MICRO_BATCH in self._names:
            used = dict.fromkeys(engines, 0)
            for i, (steps, engine) in enumerate(zip(of_logs, engines, strict=True)):
                self._micro_batches_before[i] = used[engine]
                if MICRO_BATCH in steps:
                    used[engine] += len(decodes_before(steps)) - 1

    def __len__(self) -> int:
        return len(self._names) + 1

    def __iter__(self) -> Iterator[str]:
        yield from self._names
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
        if name not in self._names:
            raise KeyError(name)
        columns = [
            steps[name] if name in names else np.zeros(steps.num_rows, dtype=np.int64)
            for steps, names in zip(self._of_logs, self._names_of, strict=True)
        ]
        if name == MICRO_BATCH:
            columns = [self._counted_on(number, column) for number, column in enumerate(columns)]
        column: Int64 = np.concatenate(columns)[self._order]
        return column

    def _counted_on(self, number: int, micro_batches: Int64) -> Int64:
        """Count the micro-batches of a log from those of the logs before it on."""
        before = self._micro_batches_before[number]
        return np.where(micro_batches < 0, micro_batches, micro_batches + before)

    def rows(self, start: int, stop: int) -> Table:
        """Return some of the steps; those of a log follow each other, so it is asked for few."""
        log = self._log[start:stop]
        found: Table = {name: np.zeros(len(log), dtype=np.int64) for name in self}
        found["engine"] = self._engine[start:stop]
        for number, steps in enumerate(self._of_logs):
            first = int(np.count_nonzero(self._log[:start] == number))
            here = log == number
            part = steps.rows(first, first + int(np.count_nonzero(here)))
            for name in steps:
                column = part[name]
                found[name][here] = (
                    self._counted_on(number, column) if name == MICRO_BATCH else column
                )
        return found


class ClusterLog:
    """What happened on several engines that shared a workload; reads as the log of one does.

    Parameters
    ----------
    of_engines : sequence of RunLog
        Their logs, by engine; of one that died and was replaced one after the other. Each request
        is in one of them: that of the engine which answered it, or turned it away.
    transfers : sequence of Transfer
        KV of prompts that went from engine to engine.
    moves : sequence of Move
        Requests that went from engine to engine while they decoded.
    losses : sequence of Loss
        Requests that lost their engine.
    engines : sequence of int, optional
        Which engine each log is of; each of its own, if not given.
    places : sequence of Place
        What each engine was and when it was there; empty if all were there all the time.
    queued_ns : mapping of int to int, optional
        Request that lost its engine to when that engine took it in, which scheduled it first: the
        log that it is in says when the last one did.
    tells_prefill_ends : bool
        Whether first tokens are told where requests go on, and not when their prompts are computed.
    """

    def __init__(
        self,
        of_engines: Sequence[RunLog],
        transfers: Sequence[Transfer] = (),
        moves: Sequence[Move] = (),
        losses: Sequence[Loss] = (),
        engines: Sequence[int] | None = None,
        places: Sequence[Place] = (),
        queued_ns: Mapping[int, int] | None = None,
        tells_prefill_ends: bool = False,
    ) -> None:
        self.of_engines = of_engines
        self.transfers = transfers
        self.moves = moves
        self.losses = losses
        self.engines = range(len(of_engines)) if engines is None else engines
        self.places = places
        self.queued_ns = queued_ns or {}
        self._tells_prefill_ends = tells_prefill_ends

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

        Where KV of prompts went from engine to engine also `prefill_engine`, `transfer_start_ns`,
        `transfer_end_ns` and `transferred_bytes` (the last time that it did); -1, and 0 bytes, of
        requests whose KV did not; and `prefill_end_ns`, when their prompts were computed, where
        that is not when their first tokens came out. Where engines died also `num_losses`, how
        often the request lost its engine, and `lost_tokens`, what it had in memory then. Where
        requests moved while they decoded also `num_moves`, `moved_bytes` and `moved_stop_ns`, for
        how long it stopped.
        """
        tables = [dict(log.requests()) for log in self.of_engines]
        for engine, table in zip(self.engines, tables, strict=True):
            table["engine"] = np.full(len(table["id"]), engine, dtype=np.int64)
        merged = {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
        order = np.argsort(merged["id"], kind="stable")
        table = {name: column[order] for name, column in merged.items()}
        if self.transfers:
            table |= self._moved(table["id"])
        if self.moves:
            table |= self._migrated(table["id"])
        if self.losses:
            table |= self._lost(table["id"])
        if self.queued_ns:
            place = np.searchsorted(table["id"], list(self.queued_ns))
            table["queued_ns"][place] = list(self.queued_ns.values())
        return table

    def _migrated(self, ids: npt.NDArray[np.generic]) -> Table:
        rows = np.array(self.moves, dtype=np.int64)
        place = np.searchsorted(ids, rows[:, 0])
        values = {
            "num_moves": np.ones(len(rows), dtype=np.int64),
            "moved_bytes": rows[:, 6],
            "moved_stop_ns": rows[:, 5] - rows[:, 4],
        }
        found: Table = {}
        for name, value in values.items():
            column = np.zeros(len(ids), dtype=np.int64)
            np.add.at(column, place, value)
            found[name] = column
        return found

    def _lost(self, ids: npt.NDArray[np.generic]) -> Table:
        rows = np.array(self.losses, dtype=np.int64)
        place = np.searchsorted(ids, rows[:, 0])
        found = {name: np.zeros(len(ids), dtype=np.int64) for name in ("num_losses", "lost_tokens")}
        np.add.at(found["num_losses"], place, 1)
        np.add.at(found["lost_tokens"], place, rows[:, 3])
        return {**found}

    def _moved(self, ids: npt.NDArray[np.generic]) -> Table:
        rows = np.array(self.transfers, dtype=np.int64)
        place = np.searchsorted(ids, rows[:, 0])
        columns = {"prefill_engine": 1, "transfer_start_ns": 3, "transfer_end_ns": 4}
        if self._tells_prefill_ends:
            columns["prefill_end_ns"] = 2
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
        return ClusterSteps([log.steps() for log in self.of_engines], self.engines)

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
        bursts: list[Int64 | None] = []
        decodes_before = 0
        for log in self.of_engines:
            # First and last decode of a stint are counted over the steps of its own engine.
            shift = np.array([0, 0, decodes_before, decodes_before])
            of_engine = log.token_times_of_all()
            table = of_engine.stints()
            columns = [whole_numbers(table, name) for name in STINT_COLUMNS]
            stints.append(np.column_stack(columns) + shift)
            decodes_before += int(np.count_nonzero(log.steps()["num_decodes"]))
            bursts.append(of_engine.bursts)
        tokens = None
        if any(of_one is not None for of_one in bursts):
            tokens = np.concatenate([
                one_a_step(rows) if of_one is None else of_one
                for rows, of_one in zip(stints, bursts, strict=True)
            ])  # fmt: skip
        times = TokenTimes.of_steps(np.concatenate(stints), self.steps(), tokens)
        # Else requests go from one engine to one behind it, if at all.
        return times.in_order_of_time() if self.places else times

    def preemptions(self) -> dict[str, Int64]:
        """Return one row a preemption, by request id and time; columns as of `RunLog`."""
        tables = [log.preemptions() for log in self.of_engines]
        merged = {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
        order = np.argsort(merged["id"], kind="stable")
        return {name: column[order] for name, column in merged.items()}
