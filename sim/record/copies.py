"""Copies of KV blocks between the GPU and lower tiers, and the steps that waited for some."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from schedlab.sim.record.columns import Ints

CopyTable = dict[str, Ints]


class TierFacts(NamedTuple):
    """What a tier is, of each engine."""

    name: str
    num_blocks: int
    block_bytes: int
    """On one GPU."""
    block_tokens: int
    engine_block_bytes: tuple[int, ...] = ()
    """Those of each engine, where they differ."""

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> TierFacts:
        """Read what `to_data` gave."""
        return cls(**{**data, "engine_block_bytes": tuple(data.get("engine_block_bytes", ()))})

    def to_data(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        data = self._asdict()
        if not self.engine_block_bytes:
            del data["engine_block_bytes"]
        return data


class _CopyRow(NamedTuple):
    """What is logged of a copy when it is issued."""

    id: int
    """The request that it is for, or that computed the blocks; -1 if they lost their place."""
    tier: int
    """The number of the lower of the two tiers, 0 = the nearest."""
    is_load: int
    """1 towards the GPU, 0 away from it."""
    is_swap: int
    """1 of a request that was preempted, 0 of a prefix."""
    num_blocks: int
    issued_ns: int
    start_ns: int
    """When the link was free for it, and what it copies was there."""
    done_ns: int
    used_blocks: int
    """Blocks of the tier that held something just after it was issued."""


_WAIT_COLUMNS = ("start_ns", "wait_ns")


class Copies:
    """Grows while an engine runs."""

    def __init__(self) -> None:
        self._rows = array("q")
        self._waits = array("q")

    def add(
        self, request_id: int, tier: int, is_load: bool, is_swap: bool, num_blocks: int,
        issued_ns: int, start_ns: int, done_ns: int, used_blocks: int,
    ) -> int:  # fmt: skip
        """Record a copy; return its row."""
        row = _CopyRow(
            request_id, tier, int(is_load), int(is_swap), num_blocks, issued_ns, start_ns, done_ns,
            used_blocks,
        )  # fmt: skip
        self._rows.extend(row)
        return len(self._rows) // len(row) - 1

    def took_place(self, row: int, start_ns: int, done_ns: int) -> None:
        """Record when a copy took place of which that was not known when it was issued."""
        first = row * len(_CopyRow._fields)
        self._rows[first + _CopyRow._fields.index("start_ns")] = start_ns
        self._rows[first + _CopyRow._fields.index("done_ns")] = done_ns

    def add_wait(self, start_ns: int, wait_ns: int) -> None:
        """Record that a step waited for copies before it computed anything."""
        self._waits.extend((start_ns, wait_ns))

    def columns(self) -> CopyTable:
        """Return one row a copy, in order of issue; times in ns."""
        return _columns(self._rows, _CopyRow._fields)

    def wait_columns(self) -> CopyTable:
        """Return one row a step that waited; times in ns."""
        return _columns(self._waits, _WAIT_COLUMNS)


def of_engines(tables: Sequence[CopyTable], engines: Sequence[int]) -> CopyTable:
    """Return the rows of several engines, one behind the other, with the column `engine`."""
    merged = {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
    sizes = [len(next(iter(table.values()))) for table in tables]
    merged["engine"] = np.repeat(np.array(engines, dtype=np.int64), sizes)
    return merged


def _columns(values: array[int], fields: Sequence[str]) -> CopyTable:
    rows = np.array(values, dtype=np.int64).reshape(-1, len(fields))
    return {name: np.ascontiguousarray(rows[:, i]) for i, name in enumerate(fields)}
