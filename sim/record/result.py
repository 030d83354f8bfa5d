"""What a run leaves behind: its tables, its metrics, and where it came from."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from schedlab.sim.errors import SchedlabError
from schedlab.sim.files import replacing, write_text
from schedlab.sim.metrics.metrics import Columns, Metrics, Pairs, request_metrics, step_metrics
from schedlab.sim.metrics.weighted import Ints
from schedlab.sim.metrics.window import Window, arrived_inside, window_metrics
from schedlab.sim.record.steps import Steps

_SCHEMA = 1
_ROWS_PER_BATCH = 1_000_000

_VLLM_LATENCIES = tuple(
    f"{statistic}_{metric}_ms"
    for metric in ("ttft", "tpot", "itl", "e2el")
    for statistic in ("mean", "median", "std", "p99")
)


class RunLog(Protocol):
    """What a result needs of a log; `sim.record.log.RunLog` is the one the engine writes."""

    def steps(self) -> Columns:
        """Return one row a step; columns as in `schedlab.sim.record.steps.Steps`."""

    def preemptions(self) -> Columns:
        """Return one row a preemption: id, evicted_ns, resumed_ns."""

    def token_gaps(self) -> Pairs:
        """Return all gaps between tokens of one request as (gap in ns, how many)."""

    def token_counts(self) -> Pairs:
        """Return (time in ns, tokens that came out then)."""

    def token_times(self, request_id: int) -> Ints:
        """Return when each token of a request came out, in ns."""


@dataclass
class RunResult:
    """One run of one policy on one workload.

    Attributes
    ----------
    name : str
        Name of the experiment.
    policy : str
        Name of the policy.
    requests : mapping of str to ndarray
        One row a request, by id; columns as in `request_metrics`.
    log : RunLog
        Steps and token times.
    kv_capacity_tokens : int
        Size of the KV cache.
    reject_reasons : dict of int to str
        Why requests were turned away, by id.
    provenance : dict
        Spec hash, seed, versions, git commit, hardware, the cost model's description, counters.
        ``model``, ``backend``, ``request_rate``, ``burstiness`` and ``max_concurrency`` appear in
        `to_vllm_json` under vLLM's keys.
    window : Window or None
        The part of the run that the metrics are of; all of it if None. Requests and steps are
        those of the whole run in any case, the log's token gaps only of measured requests.
    """

    name: str
    policy: str
    requests: Columns
    log: RunLog
    kv_capacity_tokens: int
    reject_reasons: dict[int, str] = field(default_factory=dict)
    provenance: dict[str, object] = field(default_factory=dict)
    window: Window | None = None
    _metrics: Metrics | None = field(default=None, init=False, repr=False, compare=False)

    def metrics(self) -> Metrics:
        """Return all metrics, flat; see `request_metrics`, `step_metrics`, `window_metrics`."""
        log = self.log
        if self._metrics is None and self.window is not None:
            self._metrics = window_metrics(
                self.requests,
                log.steps(),
                log.token_gaps(),
                log.token_counts(),
                self.window,
                self.kv_capacity_tokens,
            )
        elif self._metrics is None:
            self._metrics = request_metrics(self.requests, log.token_gaps(), log.token_counts())
            self._metrics |= step_metrics(log.steps(), self.kv_capacity_tokens)
        return dict(self._metrics)

    def metrics_by(self, column: str) -> dict[float | str, Metrics]:
        """Return the request metrics of each class, e.g. of each ``"tenant"`` or ``"priority"``.

        Parameters
        ----------
        column : str
            Column of `requests` whose values are the classes.

        Returns
        -------
        dict
            Value to metrics, without ITL and `max_output_tokens_per_s`: those are pooled over
            requests when they are logged.
        """
        requests = self.requests
        if self.window is not None:
            requests = arrived_inside(requests, self.window)
        values = requests[column]
        return {
            value if isinstance(value, str) else float(value): request_metrics(
                {name: data[values == value] for name, data in requests.items()}
            )
            for value in np.unique(values)
        }

    def to_vllm_json(self) -> dict[str, object]:
        """Return what ``vllm bench serve --save-result`` writes, so that its plotters work.

        Returns
        -------
        dict
            vLLM's keys in vLLM's order; `None` where a key cannot apply (there is no endpoint, no
            tokenizer, no audio). Everything of ours is under ``"schedlab"``. Not-a-number becomes
            `None`, infinity the string ``"inf"`` as in vLLM. ``date`` is UTC: SOURCE_DATE_EPOCH if
            that is set, else now.
        """
        metrics = self.metrics()
        origin = self.provenance
        result: dict[str, object] = {
            "date": _date(),
            "endpoint_type": None,
            "backend": origin.get("backend"),
            "label": self.name,
            "model_id": origin.get("model"),
            "tokenizer_id": None,
            "num_prompts": metrics["num_requests"],
            "request_rate": origin.get("request_rate"),
            "burstiness": origin.get("burstiness"),
            "max_concurrency": origin.get("max_concurrency"),
            "duration": metrics["duration_s"],
            "completed": metrics["completed"],
            "failed": metrics["failed"],
        }
        for key in (
            "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput",
            "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
            "max_concurrent_requests",
        ):  # fmt: skip
            result[key] = metrics[key]
        result["rtfx"] = None
        for key in _VLLM_LATENCIES:
            result[key] = metrics[key]
        ours: dict[str, object] = {
            "schema": _SCHEMA,
            "name": self.name,
            "policy": self.policy,
            "kv_capacity_tokens": self.kv_capacity_tokens,
            "reject_reasons": self.reject_reasons,
            "provenance": origin,
            "metrics": metrics,
        }
        if self.window is not None:
            ours["window"] = self.window._asdict()
        result["schedlab"] = ours
        plain = json_value(result)
        assert isinstance(plain, dict)
        return plain

    def to_perfetto(self, path: Path, max_requests: int = 500, max_steps: int = 50_000) -> None:
        """Write a Chrome trace for ui.perfetto.dev; see `sim.record.perfetto.write_trace`."""
        from schedlab.sim.record.perfetto import write_trace

        write_trace(self, path, max_requests=max_requests, max_steps=max_steps)

    def save(self, folder: Path) -> None:
        """Write result.json and tables (requests, steps, preemptions, gaps, tokens; Parquet).

        Each file is written whole or not at all, result.json last. The same result gives the same
        bytes, up to ``date`` (set SOURCE_DATE_EPOCH to fix that, too).

        Notes
        -----
        gaps.parquet holds the pooled token gaps (gap_ns, count), tokens.parquet the token counts
        (time_ns, count); the token times of single requests are not kept.
        """
        folder = Path(folder)
        gaps, times = self.log.token_gaps(), self.log.token_counts()
        tables: dict[str, Iterable[Columns]] = {
            "requests": [self.requests],
            "steps": _pieces(self.log.steps()),
            "preemptions": [self.log.preemptions()],
            "gaps": [{"gap_ns": gaps[0], "count": gaps[1]}],
            "tokens": [{"time_ns": times[0], "count": times[1]}],
        }
        for name, batches in tables.items():
            _write_parquet(folder / f"{name}.parquet", batches)
        text = json.dumps(self.to_vllm_json(), indent=2, allow_nan=False)
        write_text(folder / "result.json", text + "\n")

    @classmethod
    def load(cls, folder: Path) -> RunResult:
        """Read what `save` wrote.

        Raises
        ------
        SchedlabError
            If a file is missing or is not ours.
        """
        folder = Path(folder)
        path = folder / "result.json"
        try:
            ours = json.loads(path.read_text(encoding="utf-8"))["schedlab"]
        except OSError as error:
            raise SchedlabError(f"{path}: cannot read result: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise SchedlabError(f"{path}: not a schedlab result") from error
        if ours.get("schema") != _SCHEMA:
            raise SchedlabError(
                f"{path}: result schema {ours.get('schema')!r}, this version reads {_SCHEMA}"
            )
        return cls(
            name=ours["name"],
            policy=ours["policy"],
            requests=_read_parquet(folder / "requests.parquet"),
            log=_SavedLog(folder),
            kv_capacity_tokens=ours["kv_capacity_tokens"],
            reject_reasons={int(key): why for key, why in ours["reject_reasons"].items()},
            provenance=ours["provenance"],
            window=Window(**ours["window"]) if "window" in ours else None,
        )


class _SavedLog:
    """A log on disk, read when asked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def steps(self) -> Columns:
        return _read_parquet(self._folder / "steps.parquet")

    def preemptions(self) -> Columns:
        return _read_parquet(self._folder / "preemptions.parquet")

    def token_gaps(self) -> Pairs:
        return self._pairs("gaps.parquet", "gap_ns")

    def token_counts(self) -> Pairs:
        return self._pairs("tokens.parquet", "time_ns")

    def token_times(self, request_id: int) -> Ints:
        raise SchedlabError(
            f"{self._folder}: token times of single requests (here {request_id}) are not saved; "
            "run the experiment again to get them"
        )

    def _pairs(self, name: str, key: str) -> Pairs:
        columns = _read_parquet(self._folder / name)
        return columns[key].astype(np.int64), columns["count"].astype(np.int64)


def _date() -> str:
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime(int(epoch) if epoch else None))


def json_value(value: object) -> object:
    """Return what JSON can hold: no numpy; NaN becomes None, infinity the string ``"inf"``."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [json_value(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value


def _pieces(steps: Columns) -> Iterable[Columns]:
    return steps.batches(_ROWS_PER_BATCH) if isinstance(steps, Steps) else [steps]


def _write_parquet(path: Path, batches: Iterable[Columns]) -> None:
    """Write the pieces of a table; only one of them is in memory at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with replacing(path) as temporary, ExitStack() as closing:
        writer = None
        for columns in batches:
            table = pa.table({name: np.ascontiguousarray(data) for name, data in columns.items()})
            if writer is None:
                schema = table.schema
                writer = closing.enter_context(
                    pq.ParquetWriter(temporary, schema, compression="zstd")
                )
            writer.write_table(table, row_group_size=_ROWS_PER_BATCH)


def _read_parquet(path: Path) -> Columns:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise SchedlabError(f"{path}: cannot read table: {error}") from error
    return {name: table[name].to_numpy() for name in table.column_names}
