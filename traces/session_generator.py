"""Draw sessions: conversations with think times, agents that call tools and fan out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from schedlab.sim.errors import SpecError
from schedlab.sim.rng import uniforms
from schedlab.sim.sums import in_order
from schedlab.traces.durations import Durations
from schedlab.traces.lengths import Lengths
from schedlab.traces.read_report import ReadReport
from schedlab.traces.trace import Trace
from schedlab.traces.turns import Turns

Int64 = npt.NDArray[np.int64]
SUB_AGENTS = "sub_agents"
"""The tool of a call whose answer fans out."""


class Tool(NamedTuple):
    """What an answer may call."""

    share: float
    """Of the answers."""
    seconds: Durations
    """How long it works."""
    tokens: Lengths
    """What it adds to the next prompt."""


class FanOut(NamedTuple):
    """Answers that let several agents work side by side; another call joins what they say."""

    share: float
    """Of the answers."""
    width: Lengths
    """How many agents."""
    tokens: Lengths
    """What each is told beside all that was said."""


@dataclass(frozen=True)
class SessionShape:
    """What sessions look like; every number is drawn from a counter-based stream.

    Attributes
    ----------
    turns : callable
        What a user says in a session.
    new_tokens : callable
        What that adds to a prompt.
    output_tokens : callable
        Every answer.
    think : callable
        Time from an answer for the user to what the user says next.
    first_tokens : callable, optional
        New tokens of the first turn, where they are of another kind.
    tools : mapping of str to Tool
        What answers call; the next call follows when the tool is done.
    fan_out : FanOut, optional
        Answers that are worked on by several.
    max_calls : int
        Most calls one behind the other in a turn: the last one answers the user.
    shared_tokens, shared_groups : int
        A system prompt that all sessions of a group begin with, and how many groups.

    Raises
    ------
    SpecError
        If more than all answers call something.
    """

    turns: Lengths
    new_tokens: Lengths
    output_tokens: Lengths
    think: Durations
    first_tokens: Lengths | None = None
    tools: Mapping[str, Tool] = field(default_factory=dict)
    fan_out: FanOut | None = None
    max_calls: int = 16
    shared_tokens: int = 0
    shared_groups: int = 1

    def __post_init__(self) -> None:
        shares = in_order(tool.share for tool in self.tools.values())
        shares += self.fan_out.share if self.fan_out else 0.0
        if shares > 1.0:
            raise SpecError(f"the shares of tools and fan_out add up to {shares:g}, more than 1")


class _Rows:
    """The calls of all sessions, as they are drawn up."""

    def __init__(self) -> None:
        self.session: list[int] = []
        self.call: list[int] = []
        self.kind: list[str] = []
        self.tool: list[str | None] = []
        self.needs: list[list[int]] = []

    def add(self, session: int, call: int, kind: str, needs: Sequence[int]) -> int:
        self.session.append(session)
        self.call.append(call)
        self.kind.append(kind)
        self.tool.append(None)
        self.needs.append(list(needs))
        return len(self.session) - 1


_FIRST, _USER, _AGENT, _JOIN = "first", "user", "agent", "join"


def draw_sessions(num_sessions: int, shape: SessionShape, seed: int) -> Trace:
    """Return a trace of sessions without arrival times.

    Parameters
    ----------
    num_sessions : int
        How many, >= 1. Fewer of the same seed are the first of more.
    shape : SessionShape
        What they look like.
    seed : int
        Seed of the experiment.
    """
    sessions = np.arange(num_sessions, dtype=np.int64)
    num_turns = shape.turns(uniforms(seed, "session turns", sessions)).tolist()
    rows = _Rows()
    for session, turns in enumerate(num_turns):
        _draw_calls(rows, shape, seed, session, turns)
    return _trace(rows, shape, seed, num_sessions)


def _draw_calls(rows: _Rows, shape: SessionShape, seed: int, session: int, turns: int) -> None:
    """Draw who calls what in a session."""
    # The calls of a chain; those of sub-agents have numbers of their own behind them.
    most = turns * shape.max_calls * 2
    chosen: list[float] = []
    if shape.tools or shape.fan_out:
        chain = np.arange(most, dtype=np.int64)
        chosen = uniforms(seed, "session tools", np.full(most, session), chain).tolist()
    number, aside, last = 0, most, -1
    for turn in range(turns):
        kind = _USER if turn else _FIRST
        for left in range(shape.max_calls - 1, -1, -1):
            last = rows.add(session, number, kind, [last] if number else [])
            called = _called(shape, chosen[number]) if left and chosen else None
            number += 1
            rows.tool[last] = called
            if called is None:
                break
            kind = called
            if called == SUB_AGENTS:
                assert shape.fan_out is not None
                u = uniforms(seed, "session width", np.array([session]), np.array([number]))
                width = int(shape.fan_out.width(u)[0])
                agents = [rows.add(session, aside + i, _AGENT, [last]) for i in range(width)]
                aside += width
                last = rows.add(session, number, _JOIN, [last, *agents])
                number += 1
                break


def _called(shape: SessionShape, u: float) -> str | None:
    for name, tool in shape.tools.items():
        if u < tool.share:
            return name
        u -= tool.share
    return SUB_AGENTS if shape.fan_out is not None and u < shape.fan_out.share else None


def _trace(rows: _Rows, shape: SessionShape, seed: int, num_sessions: int) -> Trace:
    session, call = np.array(rows.session), np.array(rows.call)
    kind = np.array(rows.kind, dtype=object)
    output = shape.output_tokens(uniforms(seed, "session output", session, call))
    u_new = uniforms(seed, "session input", session, call)
    u_delay = uniforms(seed, "session delay", session, call)
    new = np.zeros(len(session), dtype=np.int64)
    delay_s = np.zeros(len(session))
    lengths = {
        _FIRST: shape.first_tokens or shape.new_tokens,
        _USER: shape.new_tokens,
        **{name: tool.tokens for name, tool in shape.tools.items()},
    }
    if shape.fan_out is not None:
        lengths |= {_AGENT: shape.fan_out.tokens, _JOIN: shape.fan_out.tokens}
    for name, length in lengths.items():
        new[kind == name] = length(u_new[kind == name])
    delays = {_USER: shape.think} | {name: tool.seconds for name, tool in shape.tools.items()}
    for name, seconds in delays.items():
        delay_s[kind == name] = seconds(u_delay[kind == name])
    shared = None
    if shape.shared_tokens:
        begins = np.flatnonzero(kind == _FIRST)
        new[begins] += shape.shared_tokens
        u_group = uniforms(seed, "session group", np.arange(num_sessions, dtype=np.int64))
        groups = (u_group * shape.shared_groups).astype(np.int64).tolist()
        shared = np.full(len(session), None, dtype=object)
        for row, group in zip(begins.tolist(), groups, strict=True):
            shared[row] = ((f"system {group}", shape.shared_tokens),)
    named = np.array([f"{number}" for number in range(num_sessions)], dtype=object)[session]
    return Trace(
        prompt_tokens=prompt_tokens(new, output, rows.needs),
        output_tokens=output,
        session=named,
        turns=Turns.from_rows(
            rows.needs,
            np.rint(delay_s * 1e9).astype(np.int64),
            np.array(rows.tool, dtype=object),
            shared,
        ),
        report=ReadReport(
            format="synthetic",
            rows_read=len(session),
            tokens="drawn",
            notes=(f"{num_sessions:,} sessions drawn with seed {seed}",),
        ),
    )


def prompt_tokens(new: Int64, output: Int64, needs: Sequence[Sequence[int]]) -> Int64:
    """Return the lengths of prompts that begin with what was said before.

    Parameters
    ----------
    new : ndarray of int64, shape (num_rows,)
        Tokens that each adds.
    output : ndarray of int64, shape (num_rows,)
        Answers.
    needs : sequence of sequence of int
        The rows that each needs: it begins with prompt and answer of the first, then the answers
        of the others.
    """
    answers, prompts = output.tolist(), new.tolist()
    for row, parents in enumerate(needs):
        if parents:
            prompts[row] += prompts[parents[0]] + sum([answers[parent] for parent in parents])
    return np.array(prompts, dtype=np.int64)
