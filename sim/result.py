"""What a run leaves behind: its tables, its metrics, and where it came from."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from schedlab.sim.drive.frontend import Frontend
from schedlab.sim.errors import SchedlabError, SpecError
from schedlab.sim.files import write_text
from schedlab.sim.metrics.observation import Observation
from schedlab.sim.metrics.registry import (
    Value,
    every_fleet,
    every_run,
    every_session,
    every_tier,
    metric_named,
)
from schedlab.sim.metrics.window import Window
from schedlab.sim.record.columns import Columns, whole_numbers
from schedlab.sim.record.copies import Copies, CopyTable, TierFacts
from schedlab.sim.record.fleet import EngineFacts
from schedlab.sim.record.log import REQUEST_COLUMNS
from schedlab.sim.record.saved_log import (
    ResultLog,
    SavedLog,
    read_table,
    save_tables,
    write_table,
)
from schedlab.sim.record.sessions import has_sessions
from schedlab.sim.result_head import SCHEMA, read_head
from schedlab.sim.speculation.recording import Drafts, read_drafts, write_drafts
from schedlab.sim.text import json_value

Metrics = dict[str, float]
"""Flat and snake_case; counts are int. NaN where there is nothing to measure."""

_COPIES = "copies", "copy_waits"
_DRAFTS = "drafts.jsonl"
_VLLM_LATENCIES = tuple(
    f"{statistic}_{metric}_ms"
    for metric in ("ttft", "tpot", "itl", "e2el")
    for statistic in ("mean", "median", "std", "p99")
)


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
        One row a request, by id; columns as in `sim.record.log.RunLog.requests`.
    log : ResultLog
        Steps and token times.
    kv_capacity_tokens : int
        Size of the KV cache, of each engine; where they differ, of the first.
    num_engines : int
        Engines that shared the workload; of several, requests and steps have a column `engine`.
    engines : tuple of EngineFacts
        What they are, in order, if the experiment has a `cluster`.
    tiers : tuple of TierFacts
        Memory below the GPU's of each engine, the nearest first.
    copies, copy_waits : mapping of str to ndarray
        Copies to and from there, and the steps that waited for some; see `sim.record.copies`.
    drafts : mapping of int to list of (int, int)
        By request, tokens drafted and accepted of each verification: of a real backend, which
        alone knows them before it is told.
    reject_reasons : dict of int to str
        Why requests were turned away, by id.
    provenance : dict
        Spec hash, seed, versions, git commit, hardware, the cost model's description, counters.
        ``model``, ``backend``, ``request_rate``, ``burstiness`` and ``max_concurrency`` appear in
        `to_vllm_json` under vLLM's keys.
    window : Window or None
        The part of the run that the metrics are of; all of it if None. Requests and log are those
        of the whole run in any case.
    """

    name: str
    policy: str
    requests: Columns
    log: ResultLog
    kv_capacity_tokens: int
    reject_reasons: dict[int, str] = field(default_factory=dict)
    provenance: dict[str, object] = field(default_factory=dict)
    window: Window | None = None
    num_engines: int = 1
    engines: tuple[EngineFacts, ...] = ()
    tiers: tuple[TierFacts, ...] = ()
    copies: CopyTable = field(default_factory=Copies().columns)
    copy_waits: CopyTable = field(default_factory=Copies().wait_columns)
    drafts: Mapping[int, Drafts] = field(default_factory=dict)
    _metrics: Metrics | None = field(default=None, init=False, repr=False, compare=False)

    def observation(self) -> Observation:
        """Return the measured part of the run, which metrics are functions of."""
        return Observation(self)

    @property
    def frontend(self) -> Frontend | None:
        """What stood between clients and engine, as `provenance` says; None if nothing did."""
        figures = self.provenance.get("frontend")
        return Frontend(**figures) if isinstance(figures, dict) else None

    def metrics(self) -> Metrics:
        """Return the metrics that every run has, flat, in the order of result.json."""
        if self._metrics is None:
            run = self.observation()
            asked = every_run() + (every_fleet() if self.engines else [])
            if has_sessions(self.requests):
                asked += every_session()
            if self.tiers:
                asked += every_tier([facts.name for facts in self.tiers])
            self._metrics = {one.name: one.of(run) for one in asked}
        return dict(self._metrics)

    def metric(self, name: str, **parameters: Value) -> float:
        """Return any metric by its name, e.g. ``largest(latency=itl)`` or ``my_module:cost``.

        Raises
        ------
        SpecError
            If there is none of that name, or it does not take these parameters.
        """
        return float(metric_named(name, **parameters).of(self.observation()))

    def metrics_by(self, column: str) -> dict[float | str, Metrics]:
        """Return the metrics of each class, e.g. of each ``"tenant"`` or ``"priority"``.

        Parameters
        ----------
        column : str
            Column of `requests` whose values are the classes.

        Returns
        -------
        dict
            Value to metrics, without those of the engine that serves all classes together. Rates
            are over the time of all requests, so that classes add up.
        """
        run = self.observation()
        asked = [one for one in every_run() if one.about == "requests"]
        found: dict[float | str, Metrics] = {}
        for value in np.unique(run.requests[column]):
            part = run.only(run.column(column) == value)
            name = value if isinstance(value, str) else float(value)
            found[name] = {one.name: one.of(part) for one in asked}
        return found

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
            "schema": SCHEMA,
            "name": self.name,
            "policy": self.policy,
            "kv_capacity_tokens": self.kv_capacity_tokens,
            "reject_reasons": self.reject_reasons,
            "provenance": origin,
            "metrics": metrics,
        }
        if self.num_engines > 1:
            ours["num_engines"] = self.num_engines
        if self.engines:
            ours["engines"] = [facts.to_data() for facts in self.engines]
        if self.tiers:
            ours["tiers"] = [facts.to_data() for facts in self.tiers]
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

    def save(self, folder: Path, light: bool = False) -> None:
        """Write result.json and tables (requests, steps, preemptions, gaps, tokens, stints).

        Where requests are those of sessions, there is a table of sessions as well; where engines
        have tiers, one of copies and one of the steps that waited for some. Drafts of a real
        backend are in drafts.jsonl, which the simulation takes as ``acceptance: {recording: ..}``.

        Each file is written whole or not at all, result.json last. The same result gives the same
        bytes, up to ``date`` (set SOURCE_DATE_EPOCH to fix that, too). A light result is
        result.json alone.
        """
        folder = Path(folder)
        if not light:
            save_tables(folder, self.requests, self.log)
            if self.tiers:
                write_table(folder / "copies.parquet", [self.copies])
                write_table(folder / "copy_waits.parquet", [self.copy_waits])
            if self.drafts:
                write_drafts(folder / _DRAFTS, self.drafts)
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
        ours = read_head(path)
        table = folder / "requests.parquet"
        if not table.exists():
            raise SchedlabError(
                f"{table}: no such file; a light result has no tables: to get them, run it again "
                "without --light"
            )
        requests = read_table(table)
        missing = [name for name in REQUEST_COLUMNS if name not in requests]
        if missing:
            raise SchedlabError(f"{table}: column {missing[0]} is missing")
        try:
            tiers = tuple(TierFacts.from_data(facts) for facts in ours.get("tiers", ()))
            found = {name: _whole_table(folder / f"{name}.parquet") for name in _COPIES if tiers}
            return cls(
                name=str(ours["name"]),
                policy=str(ours["policy"]),
                requests=requests,
                log=SavedLog(folder),
                kv_capacity_tokens=int(ours["kv_capacity_tokens"]),
                reject_reasons={int(key): str(why) for key, why in ours["reject_reasons"].items()},
                provenance=dict(ours["provenance"]),
                window=_window(**ours["window"]) if "window" in ours else None,
                num_engines=int(ours.get("num_engines", 1)),
                engines=tuple(EngineFacts.from_data(facts) for facts in ours.get("engines", ())),
                tiers=tiers,
                drafts=read_drafts(folder / _DRAFTS) if (folder / _DRAFTS).is_file() else {},
                **found,
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise SchedlabError(f"{path}: not a whole schedlab result: {error!r}") from None


def _whole_table(path: Path) -> CopyTable:
    columns = read_table(path)
    return {name: whole_numbers(columns, name) for name in columns}


def _window(begin_ns: int, end_ns: int) -> Window:
    return Window(int(begin_ns), int(end_ns))


def _date() -> str:
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    try:
        return time.strftime("%Y%m%d-%H%M%S", time.gmtime(int(epoch) if epoch else None))
    except (ValueError, OverflowError, OSError):
        raise SpecError(f"SOURCE_DATE_EPOCH must be seconds since 1970, got {epoch!r}") from None
