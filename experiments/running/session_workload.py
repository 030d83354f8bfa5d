"""The sessions of an experiment: drawn, and when they start."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.sessions import DurationsSpec, SessionsSpec
from schedlab.sim.errors import SpecError
from schedlab.sim.rng import uniforms
from schedlab.traces.arrivals import Process
from schedlab.traces.durations import DURATIONS
from schedlab.traces.lengths import LENGTHS
from schedlab.traces.session_generator import FanOut, SessionShape, Tool, draw_sessions
from schedlab.traces.trace import Trace
from schedlab.traces.turns import session_starts


def session_shape(spec: SessionsSpec) -> SessionShape:
    """Return what `workload.sessions` says of sessions.

    Raises
    ------
    SpecError
        If the shares of what answers call add up to more than one, or a distribution refuses its
        parameters.
    """
    fan_out = spec.fan_out
    return SessionShape(
        turns=LENGTHS[spec.turns.distribution](**spec.turns.knobs),
        new_tokens=LENGTHS[spec.new_tokens.distribution](**spec.new_tokens.knobs),
        output_tokens=LENGTHS[spec.output_tokens.distribution](**spec.output_tokens.knobs),
        think=DURATIONS[spec.think_s.distribution](**spec.think_s.knobs),
        first_tokens=None
        if spec.first_tokens is None
        else LENGTHS[spec.first_tokens.distribution](**spec.first_tokens.knobs),
        tools={
            name: Tool(
                tool.share,
                DURATIONS[tool.seconds.distribution](**tool.seconds.knobs),
                LENGTHS[tool.tokens.distribution](**tool.tokens.knobs),
            )
            for name, tool in spec.tools.items()
        },
        fan_out=None
        if fan_out is None
        else FanOut(
            fan_out.share,
            LENGTHS[fan_out.width.distribution](**fan_out.width.knobs),
            LENGTHS[fan_out.tokens.distribution](**fan_out.tokens.knobs),
        ),
        max_calls=spec.max_calls,
        shared_tokens=spec.shared_prefix.tokens if spec.shared_prefix else 0,
        shared_groups=spec.shared_prefix.groups if spec.shared_prefix else 1,
    )


def drawn(spec: SessionsSpec, seed: int) -> Trace:
    """Draw the sessions that a specification asks for; without arrival times."""
    return draw_sessions(spec.count, session_shape(spec), seed)


def started(trace: Trace, draw: Process, note: str) -> Trace:
    """Return a trace whose sessions start at times drawn anew."""
    assert trace.session is not None
    starts = session_starts(trace.session)
    sizes = np.diff(np.append(starts, len(trace)))
    times_ns = np.asarray(draw(len(starts)), dtype=np.int64)
    report = trace.report.noted(f"starts of sessions drawn anew: {note}")
    return replace(trace, arrival_ns=np.repeat(times_ns, sizes), report=report)


def with_think_times(trace: Trace, think: DurationsSpec, seed: int) -> Trace:
    """Return a trace whose requests behind answers for the user come after times drawn anew.

    Raises
    ------
    SpecError
        If its requests do not wait for answers.
    """
    turns = trace.turns
    if turns is None:
        raise SpecError("workload.think_s: the requests of the workload do not wait for answers")
    rows = np.arange(len(trace), dtype=np.int64)
    drawn_s = DURATIONS[think.distribution](**think.knobs)(uniforms(seed, "think times", rows))
    has_needs = np.diff(turns.offsets) > 0
    if turns.tool is not None:
        last = rows - 1
        last[has_needs] = rows[has_needs] - turns.rows_back[turns.offsets[1:][has_needs] - 1]
        has_needs &= turns.tool[last] == None  # noqa: E711
    delay_ns = np.where(has_needs, np.rint(drawn_s * 1e9).astype(np.int64), turns.delay_ns)
    return replace(
        trace,
        turns=replace(turns, delay_ns=delay_ns),
        report=trace.report.noted("think times drawn anew"),
    )


def refuse_unfit(trace: Trace, given: list[str]) -> None:
    """Raise for the first key that contradicts sessions, or needs some.

    Raises
    ------
    SpecError
        Naming the key.
    """
    if trace.turns is None:
        if "session_rate" in given:
            raise SpecError(
                "workload.session_rate: the workload has no sessions; give request_rate, or "
                "follow_sessions: true where a trace names them"
            )
        return
    why = {
        "request_rate": "requests of sessions come when answers do; give session_rate",
        "resample": "requests of sessions cannot be drawn one by one",
        "classes": "not with sessions; give them a tenant in their file",
        "prompt_tokens": "prompts of sessions hold what was said before",
        "output_tokens": "prompts of sessions hold the answers before",
    }
    for key, reason in why.items():
        if key in given:
            raise SpecError(f"workload.{key}: {reason}")


def require_sessions_possible(spec: ExperimentSpec) -> None:
    """Refuse what needs to know beforehand when requests come.

    Raises
    ------
    SpecError
        Naming the key.
    """
    if spec.backend == "vllm":
        raise SpecError("backend: vllm does not wait for answers of sessions; use sim or real")
    if spec.frontend is not None:
        raise SpecError(
            "frontend: not with sessions: when a client has its answer is told after the run, and "
            "not what it sends then"
        )
    predictor = spec.policy.predictor
    if predictor is not None and predictor.knobs.get("one_at_a_time"):
        raise SpecError(
            "policy.predictor.one_at_a_time: when sessions send is not known beforehand, nor which "
            "predictions wait for each other"
        )
