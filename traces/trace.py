"""A workload in columns: when requests arrive and how long they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from schedlab.sim.errors import TraceError
from schedlab.sim.request import LARGEST, SHORTEST_TARGET_MS
from schedlab.traces.prefix_hashes import PrefixHashes
from schedlab.traces.read_report import ReadReport, merged
from schedlab.traces.row_error import RowError
from schedlab.traces.turns import Turns

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
Text = npt.NDArray[np.object_]

_INTEGERS = ("arrival_ns", "prompt_tokens", "output_tokens", "max_tokens", "priority")
_TARGETS = {"deadline_s": 1000.0, "slo_ttft_ms": 1.0, "slo_tpot_ms": 1.0}
"""How many milliseconds one of it is."""
_TARGET_BOUNDS = f"must be {SHORTEST_TARGET_MS:g} to {LARGEST:g} ms"
_TEXTS = ("application", "session", "tenant", "prompt")
_ABSENT: dict[str, object] = {"max_tokens": 0, "priority": 0}


@dataclass(frozen=True, eq=False, kw_only=True)
class Trace:
    """An immutable columnar trace, one row a request, in order of arrival.

    Every column has shape (num_requests,). Columns that a source does not have are `None`.

    Attributes
    ----------
    prompt_tokens, output_tokens : ndarray of int64
        Lengths, each >= 1. The output length is the truth, which no policy may see.
    arrival_ns : ndarray of int64 or None
        Arrival times from the start of the trace, not decreasing; `None` for a trace of lengths.
    max_tokens : ndarray of int64 or None
        Output limit that the user declared; 0 where none was.
    priority : ndarray of int64 or None
        Lower is more urgent, as in vLLM.
    deadline_s : ndarray of float64 or None
        Seconds from arrival in which the last token is due; NaN where there is no deadline.
    slo_ttft_ms, slo_tpot_ms : ndarray of float64 or None
        Latency targets of a request; NaN where there is none.
    application, session, tenant, prompt : ndarray of object (str or None) or None
        Where the request comes from, and its text.
    prefix : PrefixHashes or None
        Chained block ids of the prompts.
    turns : Turns or None
        Which requests wait for the answers of others. Then those of a session lie together, and
        arrival times are those of its start.
    report : ReadReport
        Where the trace comes from and what was done to it.

    Raises
    ------
    TraceError
        If the trace is empty, columns differ in length, or a value is impossible; the message
        names the row, counted from 0.
    """

    prompt_tokens: Int64
    output_tokens: Int64
    arrival_ns: Int64 | None = None
    max_tokens: Int64 | None = None
    priority: Int64 | None = None
    deadline_s: Float64 | None = None
    slo_ttft_ms: Float64 | None = None
    slo_tpot_ms: Float64 | None = None
    application: Text | None = None
    session: Text | None = None
    tenant: Text | None = None
    prompt: Text | None = None
    prefix: PrefixHashes | None = None
    turns: Turns | None = None
    report: ReadReport = field(default_factory=ReadReport)

    def __post_init__(self) -> None:
        origin = self.report.path or "trace"
        num_rows = len(self.prompt_tokens)
        if num_rows == 0:
            raise TraceError(f"{origin}: no requests")
        for name, column in self.columns().items():
            if len(column) != num_rows:
                raise TraceError(f"{origin}: {name} has {len(column)} rows, expected {num_rows}")
            if not isinstance(column, PrefixHashes | Turns):
                object.__setattr__(self, name, _frozen(column, name, origin))
        for name in ("prompt_tokens", "output_tokens"):
            _require(getattr(self, name) >= 1, name, "must be >= 1", self, origin)
        if self.max_tokens is not None:
            _require(self.max_tokens >= 0, "max_tokens", "must be >= 0", self, origin)
        for name, unit_ms in _TARGETS.items():
            if (target := getattr(self, name)) is not None:
                absent = np.isnan(target)
                _require(absent | (target > 0), name, "must be > 0", self, origin)
                shortest, longest = SHORTEST_TARGET_MS / unit_ms, LARGEST / unit_ms
                measured = (target >= shortest) & (target <= longest)
                _require(absent | measured, name, _TARGET_BOUNDS, self, origin)
        if self.prefix is not None:
            self._check_prefix(self.prefix, origin)
        if self.arrival_ns is not None:
            _require(self.arrival_ns >= 0, "arrival_ns", "must be >= 0", self, origin)
            rising = np.diff(self.arrival_ns, prepend=0) >= 0
            _require(rising, "arrival_ns", "is earlier than the row before it", self, origin)
        if self.turns is not None:
            self.turns.check(self.session, self.arrival_ns, origin)

    def _check_prefix(self, prefix: PrefixHashes, origin: str) -> None:
        """Raise for the first row that has more blocks than its prompt can fill."""
        num_blocks = np.diff(prefix.offsets)
        over = (num_blocks - 1) * prefix.block_tokens >= self.prompt_tokens
        if over.any():
            row = int(np.argmax(over))
            blocks = f"{num_blocks[row]} prefix hash blocks of {prefix.block_tokens} tokens"
            raise RowError(origin, row, f"{blocks} for {self.prompt_tokens[row]} prompt tokens")

    def columns(self) -> dict[str, Any]:
        """Return the columns that are present, by name (`report` is none)."""
        pairs = ((f.name, getattr(self, f.name)) for f in fields(self) if f.name != "report")
        return {name: column for name, column in pairs if column is not None}

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    @property
    def duration_s(self) -> float:
        """Time from the first arrival to the last, in seconds; 0 for a trace of lengths."""
        if self.arrival_ns is None:
            return 0.0
        return int(self.arrival_ns[-1] - self.arrival_ns[0]) / 1e9

    def take(self, indices: npt.ArrayLike) -> Trace:
        """Return the rows `indices` (integers, or a boolean mask).

        Raises
        ------
        TraceError
            If no row is left, an index is out of range, or the arrivals would run backwards.
        """
        wanted = np.asarray(indices)
        if wanted.dtype == bool:
            wanted = np.flatnonzero(wanted)
        if len(wanted) and not -len(self) <= wanted.min() <= wanted.max() < len(self):
            raise TraceError(f"row index out of range for a trace of {len(self)} requests")
        wanted = np.asarray(wanted, dtype=np.int64) % len(self)
        parts: dict[str, Any] = {
            name: column.take(wanted)
            if isinstance(column, PrefixHashes | Turns)
            else column[wanted]
            for name, column in self.columns().items()
        }
        return replace(self, **parts)

    def head(self, num_requests: int) -> Trace:
        """Return the first `num_requests` rows, or all if there are fewer."""
        if num_requests < 1:
            raise TraceError(f"head needs >= 1 request, got {num_requests}")
        return self.take(np.arange(min(num_requests, len(self))))

    def slice(self, start_s: float = 0.0, end_s: float = math.inf) -> Trace:
        """Return the requests with ``start_s <= arrival < end_s``; `start_s` becomes time 0.

        Raises
        ------
        TraceError
            If the trace has no times or no request falls into the interval.
        """
        arrival_ns = self.require_arrivals()
        if not start_s < end_s or start_s < 0 or math.isinf(start_s):
            raise TraceError(f"slice needs 0 <= start_s < end_s, got {start_s} and {end_s}")
        first, last = (
            len(self) if t_s * 1e9 >= 2**63 else int(np.searchsorted(arrival_ns, round(t_s * 1e9)))
            for t_s in (start_s, end_s)
        )
        if first == last:
            raise TraceError(
                f"no request arrives in {start_s:g}..{end_s:g} s; the trace covers "
                f"{arrival_ns[0] / 1e9:g}..{arrival_ns[-1] / 1e9:g} s"
            )
        start_ns = round(start_s * 1e9)
        kept = self.take(np.arange(first, last))
        report = self.report.noted(f"cut to {start_s:g}..{end_s:g} s, {start_s:g} s became 0")
        return replace(kept, arrival_ns=arrival_ns[first:last] - start_ns, report=report)

    def scale(self, rate_factor: float) -> Trace:
        """Return the trace with arrivals `rate_factor` times as frequent.

        A factor of 2 halves every gap (double load); 0.5 doubles them. Lengths, deadlines and
        latency targets stay.

        Raises
        ------
        TraceError
            If the trace has no times or the factor is not a positive number.
        """
        arrival_ns = self.require_arrivals()
        if not (math.isfinite(rate_factor) and rate_factor > 0):
            raise TraceError(f"rate_factor must be a positive number, got {rate_factor}")
        scaled = np.rint(arrival_ns / rate_factor)
        if scaled[-1] >= 2**63:
            raise TraceError(f"rate_factor {rate_factor} stretches the trace beyond 292 years")
        report = self.report.noted(f"arrival rate multiplied by {rate_factor:g}")
        return replace(self, arrival_ns=scaled.astype(np.int64), report=report)

    def fit(self, max_total_tokens: int, too_long: Literal["drop", "clip_prompt"]) -> Trace:
        """Return the trace with no request longer than `max_total_tokens`, and say how many were.

        Parameters
        ----------
        max_total_tokens : int
            Most prompt plus output tokens of a request, e.g. `max_model_len`.
        too_long : {"drop", "clip_prompt"}
            Leave such rows out, or shorten their prompts (Vidur's rule), never below 1 token;
            what clipping cannot make fit is dropped. Clipped rows lose their prompt text.

        Raises
        ------
        TraceError
            If no row is left or an argument makes no sense.
        """
        if max_total_tokens < 2:
            raise TraceError(f"max_total_tokens must be >= 2, got {max_total_tokens}")
        if too_long not in ("drop", "clip_prompt"):
            raise TraceError(f"too_long must be 'drop' or 'clip_prompt', got {too_long!r}")
        if self.turns is not None and too_long == "clip_prompt":
            raise TraceError("clip_prompt: the prompts of sessions hold what was said before them")
        limit = max_total_tokens - self.output_tokens
        over = self.prompt_tokens > limit
        if not over.any():
            return self
        keep = limit >= 1 if too_long == "clip_prompt" else ~over
        reason = f"longer than {max_total_tokens} tokens"
        if self.turns is not None:
            keep = self.turns.without(over)
            reason += ", or later in the session of one"
        if not keep.any():
            raise TraceError(f"no request fits in {max_total_tokens} tokens")
        kept = replace(self, report=self.report.dropped(reason, int((~keep).sum()))).take(keep)
        if too_long == "drop":
            return kept
        return kept._clipped(limit[keep], over[keep])

    def _clipped(self, limit: Int64, over: npt.NDArray[np.bool_]) -> Trace:
        """Shorten the prompts that are `over` to `limit`, with their blocks and texts."""
        prompt_tokens = np.minimum(self.prompt_tokens, limit)
        prefix, prompt = self.prefix, self.prompt
        if prefix is not None:
            prefix = prefix.with_block_tokens(prefix.block_tokens, prompt_tokens)
        if prompt is not None:
            prompt = prompt.copy()
            prompt[over] = None
        note = f"{int(over.sum())} prompts clipped to fit"
        report = self.report.noted(note)
        return replace(
            self, prompt_tokens=prompt_tokens, prefix=prefix, prompt=prompt, report=report
        )

    def require_arrivals(self) -> Int64:
        """Return `arrival_ns`.

        Raises
        ------
        TraceError
            If this is a trace of lengths only.
        """
        if self.arrival_ns is None:
            origin = self.report.path or "this trace"
            raise TraceError(
                f"{origin} has lengths but no arrival times: set a request rate "
                "(workload.request_rate) or an arrival process (see schedlab.traces.arrivals)"
            )
        return self.arrival_ns

    @classmethod
    def concat(cls, traces: Sequence[Trace]) -> Trace:
        """Return the rows of all `traces`, one after another, times unchanged.

        A column that only some of them have is filled with its "absent" value.

        Raises
        ------
        TraceError
            If there is nothing to join, only some have arrival times, only some have prefix
            hashes, or the times would run backwards.
        """
        if not traces:
            raise TraceError("no requests")
        if len(traces) == 1:
            return traces[0]
        names = {name for trace in traces for name in trace.columns()}
        for name in ("arrival_ns", "prefix", "turns"):
            if name in names and any(getattr(trace, name) is None for trace in traces):
                raise TraceError(f"cannot join traces with and without {name}")
        joined: dict[str, Any] = {
            name: np.concatenate([trace.filled(name) for trace in traces])
            for name in names - {"prefix", "turns"}
        }
        if "turns" in names:
            joined["turns"] = Turns.concat([t.turns for t in traces if t.turns])
        if "prefix" in names:
            joined["prefix"] = PrefixHashes.concat([t.prefix for t in traces if t.prefix])
        return cls(**joined, report=merged(trace.report for trace in traces))

    def filled(self, name: str) -> npt.NDArray[Any]:
        """Return the column `name`, made of "absent" values if the trace lacks it."""
        column: npt.NDArray[Any] | None = getattr(self, name)
        if column is not None:
            return column
        absent = np.nan if name in _TARGETS else _ABSENT.get(name)
        return np.full(len(self), absent, dtype=object if name in _TEXTS else None)


def _frozen(column: npt.ArrayLike, name: str, origin: str) -> npt.NDArray[Any]:
    """Return a read-only view of `column` in its proper dtype."""
    values: npt.NDArray[Any] = np.asarray(column)
    if name in _INTEGERS and values.dtype.kind == "f":
        bad = np.flatnonzero(~np.isfinite(values) | (values != np.floor(values)))
        if len(bad):
            problem = f"{name} is {values[bad[0]]}, expected a whole number"
            raise RowError(origin, int(bad[0]), problem)
    elif name in _INTEGERS and values.dtype.kind not in "iu":
        raise TraceError(f"{origin}: {name} must be integers, got {values.dtype}")
    dtype = np.int64 if name in _INTEGERS else np.float64 if name in _TARGETS else object
    frozen = values.astype(dtype, copy=False).view()
    frozen.flags.writeable = False
    return frozen


def _require(holds: npt.NDArray[np.bool_], name: str, rule: str, trace: Trace, origin: str) -> None:
    """Raise for the first row where the rule does not hold."""
    if not holds.all():
        row = int(np.argmin(holds))
        raise RowError(origin, row, f"{name} {rule}, got {getattr(trace, name)[row]}")
