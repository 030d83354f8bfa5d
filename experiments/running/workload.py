"""The requests of an experiment: which trace, which arrivals, which lengths."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from schedlab.experiments.running.session_workload import (
    drawn,
    refuse_unfit,
    started,
    with_think_times,
)
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.lengths import LengthsSpec
from schedlab.experiments.specification.paths import is_preset, is_published
from schedlab.experiments.specification.traffic_class import TrafficClassSpec
from schedlab.experiments.specification.workload import Workload
from schedlab.sim.errors import SpecError
from schedlab.sim.rng import stream
from schedlab.traces import traffic_classes
from schedlab.traces.arrivals import all_at_once, gamma, next_times, process
from schedlab.traces.lengths import LENGTHS
from schedlab.traces.presets import preset
from schedlab.traces.trace import Trace

Int64 = npt.NDArray[np.int64]


def load_workload(spec: ExperimentSpec, max_model_len: int) -> Trace:
    """Return the requests of one run, with arrival times, in columns.

    Parameters
    ----------
    spec : ExperimentSpec
        One point.
    max_model_len : int
        Longest sequence of the engine, in tokens; what `too_long` refers to unless
        `max_total_tokens` is given.

    Returns
    -------
    Trace
        Its report says what was read, dropped, clipped and drawn.

    Raises
    ------
    TraceError
        If the file cannot be read, or has no arrival times and none are drawn.
    SpecError
        If the keys do not fit each other.
    """
    workload = spec.workload
    trace = _source(workload, spec.seed)
    refuse_unfit(trace, [key for key in type(workload).model_fields if getattr(workload, key)])
    if workload.think_s is not None:
        trace = with_think_times(trace, workload.think_s, spec.seed)
    trace = _lengths(spec, trace)
    which = None
    if any(one.has_arrivals for one in workload.classes.values()):
        trace, which = _arrivals_of_classes(workload, trace, spec.seed)
    else:
        trace = _arrivals(workload, trace, spec.seed)
    if workload.classes:
        classes = {name: _traffic_class(one) for name, one in workload.classes.items()}
        trace = traffic_classes.in_classes(trace, classes, spec.seed, which)
    limit = workload.max_total_tokens
    if workload.too_long == "reject":
        if limit is not None and limit < max_model_len:
            raise SpecError(
                "workload.max_total_tokens: says what to do with requests that are longer, so "
                "workload.too_long must be drop or clip_prompt (the engine itself rejects what "
                "exceeds engine.max_model_len)"
            )
        return trace
    return trace.fit(min(limit or max_model_len, max_model_len), workload.too_long)


def _source(workload: Workload, seed: int) -> Trace:
    """Read or draw the rows."""
    if workload.sessions is not None:
        trace = drawn(workload.sessions, seed)
        return trace if workload.num_requests is None else trace.head(workload.num_requests)
    if workload.load_test is not None:
        from schedlab.traces.load_test_requests import load_test_requests
        from schedlab.traces.load_tests import load_test

        test = load_test(workload.load_test.file, workload.load_test.run)
        trace = load_test_requests(test, seed)
        return trace if workload.num_requests is None else trace.head(workload.num_requests)
    if workload.trace is None or is_preset(workload.trace):
        from schedlab.traces.synthetic import DEFAULT_PRESET, synthesize

        assert workload.num_requests is not None
        preset = workload.trace or DEFAULT_PRESET
        return synthesize(workload.num_requests, preset=preset, seed=seed)
    from schedlab.traces.published import published
    from schedlab.traces.readers import read

    found = is_published(workload.trace)
    path = published(workload.trace).fetched() if found else Path(workload.trace)
    # Readers name the row at fault; where there is text only, they need a tokenizer.
    trace = read(
        path,
        format=workload.format,
        tokenizer=workload.tokenizer,
        sessions=workload.follow_sessions,
    )
    if workload.slice is not None:
        trace = trace.slice(*workload.slice)
    wanted = workload.num_requests
    if wanted is None:
        return trace
    if workload.resample:
        rows = stream(seed, "rows").integers(len(trace), size=wanted)
        trace = replace(trace, arrival_ns=None).take(rows)
        return replace(trace, report=trace.report.noted(f"{wanted:,} rows drawn at random"))
    if wanted > len(trace):
        raise SpecError(
            f"workload.num_requests: {wanted:,} asked for, but {workload.trace} has "
            f"{len(trace):,} (resample: true draws rows with replacement)"
        )
    return trace.head(wanted)


def is_too_short(error: str) -> bool:
    """Say whether a point ended with this error since its trace has not so many requests."""
    return re.match(r"workload\.num_requests: [\d,]+ asked for, but ", error) is not None


def _lengths(spec: ExperimentSpec, trace: Trace) -> Trace:
    """Replace lengths by drawn ones, where the specification says so."""
    prompt, output = spec.workload.prompt_tokens, spec.workload.output_tokens
    if prompt is None and output is None:
        return trace
    uniform = stream(spec.seed, "lengths").random((len(trace), 2))
    columns: dict[str, Any] = {}
    if prompt is not None:
        columns["prompt_tokens"] = _distribution(prompt)(uniform[:, 0])
        columns["prefix"] = None
        columns["prompt"] = None
    if output is not None:
        columns["output_tokens"] = _distribution(output)(uniform[:, 1])
    names = " and ".join(name for name in columns if name.endswith("tokens"))
    return replace(trace, **columns, report=trace.report.noted(f"{names} drawn anew"))


def _arrivals_of_classes(workload: Workload, trace: Trace, seed: int) -> tuple[Trace, Int64]:
    """Draw each class's arrivals, and keep the first so many of all together."""
    times = []
    for name, one in workload.classes.items():
        own_seed = int(stream(seed, f"arrivals of {name}").integers(2**31))
        if one.arrivals is not None:
            draw = process(one.arrivals.process, seed=own_seed, **one.arrivals.knobs)
        else:
            assert one.request_rate is not None
            draw = gamma(one.request_rate, 1.0, seed=own_seed)
        times.append(next_times(draw, len(trace)))
    together = np.concatenate(times)
    first = np.argsort(together, kind="stable")[: len(trace)]
    report = trace.report.noted("arrivals drawn anew: a process for each class")
    arrived = replace(trace, arrival_ns=together[first], report=report)
    return arrived, first // len(trace)


def _traffic_class(one: TrafficClassSpec) -> traffic_classes.TrafficClass:
    prompt, output = one.prompt_tokens, one.output_tokens
    source = preset(one.trace) if one.trace else None
    shared = one.shared_prefix
    return traffic_classes.TrafficClass(
        share=one.share or 1.0,
        priority=one.priority,
        **one.slo.model_dump(),
        prompt=_distribution(prompt) if prompt else source.prompt if source else None,
        output=_distribution(output) if output else source.output if source else None,
        prefix_tokens=shared.tokens if shared else 0,
        prefix_groups=shared.groups if shared else 1,
    )


def _distribution(lengths: LengthsSpec) -> Any:  # noqa: ANN401 - a length distribution
    return LENGTHS[lengths.distribution](**lengths.knobs)


def _arrivals(workload: Workload, trace: Trace, seed: int) -> Trace:
    """Draw arrival times anew, or scale those of the trace."""
    arrivals = workload.arrivals
    rate = workload.request_rate if trace.turns is None else workload.session_rate
    if rate is not None:
        shape = workload.burstiness or 1.0
        draw = all_at_once() if math.isinf(rate) else gamma(rate, shape, seed=seed)
        kind = "Poisson" if shape == 1.0 else f"gamma (burstiness {shape:g})"
        what = "req/s" if trace.turns is None else "sessions/s"
        note = "all at once" if math.isinf(rate) else f"{kind}, {rate:g} {what}"
    elif arrivals is None or arrivals.process == "replay":
        if workload.resample:
            raise SpecError(
                "workload.resample: rows are drawn without the times they came at; give "
                "workload.request_rate, or workload.arrivals another process than replay"
            )
        trace.require_arrivals()
        return trace if workload.rate_scale is None else trace.scale(workload.rate_scale)
    elif arrivals.process == "closed_loop":
        if workload.max_concurrency is None:
            raise SpecError("workload.arrivals: closed_loop needs workload.max_concurrency")
        draw, note = all_at_once(), f"closed loop of {workload.max_concurrency}"
    else:
        draw = process(arrivals.process, seed=seed, **arrivals.knobs)
        note = arrivals.process
    if trace.turns is not None:
        return started(trace, draw, note)
    return replace(
        trace,
        arrival_ns=next_times(draw, len(trace)),
        report=trace.report.noted(f"arrivals drawn anew: {note}"),
    )
