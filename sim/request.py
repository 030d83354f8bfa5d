"""A request as the server knows it, and the engine's view of its progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mypy_extensions import mypyc_attr

if TYPE_CHECKING:
    from schedlab.sim.core.decode_batch import DecodeBatch
    from schedlab.sim.kv.prompt import Prompt


LARGEST: Final = 1e15
"""The largest measure of anything; what policies multiply and round stays finite."""
SHORTEST_TARGET_MS: Final = 1e-6
"""A nanosecond: time is counted in these."""


class Slo(NamedTuple):
    """Latency targets of a request; `None` means no target in that dimension.

    Whoever reads them from outside holds them to `SHORTEST_TARGET_MS` and `LARGEST`.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None


class Refinement:
    """What a predictor says of an answer under way: it is asked again every so many tokens.

    It is asked with the state of the request, so that nobody learns what it will say later.

    Parameters
    ----------
    every_tokens : int
        Tokens of the answer after which it is asked again, >= 1.
    totals : sequence of float
        What it says of the whole answer, in tokens, once it has seen `every_tokens`, twice as
        many, and so on.
    """

    __slots__ = ("_totals", "every_tokens")

    def __init__(self, every_tokens: int, totals: Sequence[float]) -> None:
        self.every_tokens = every_tokens
        self._totals = totals

    def total_tokens(self, state: RequestState) -> float | None:
        """Return the prediction made last, or None if it was not asked again yet."""
        times = min(state.num_output_tokens // self.every_tokens, len(self._totals))
        return self._totals[times - 1] if times else None

    def tokens_until_next(self, state: RequestState) -> int:
        """Return after how many more tokens it is asked again."""
        return self.every_tokens - state.num_output_tokens % self.every_tokens


@mypyc_attr(acyclic=True)
@dataclass(init=False, eq=False)
class Request:
    """What a server can know when a request arrives. It has no true output length.

    Nobody writes to it; `dataclasses.replace` makes another. (Python could forbid it, but then
    making one takes as long as planning a step; that a policy does is found when it is tried. For
    the same reason the constructor is written out, so that it can be compiled.)

    Attributes
    ----------
    id : int
        Unique, in order of arrival.
    arrival_ns : int
        When the user sent it; all latencies count from here.
    prompt_tokens : int
        Prompt length, >= 1.
    max_tokens : int
        The most output tokens the user allows (declared, not the true length).
    priority : int
        Lower is more urgent, as in vLLM.
    slo : Slo or None
        Latency targets.
    application, session, tenant : str or None
        Where it comes from.
    predicted_tokens : float or None
        What a named predictor says of the output: a length in tokens, a bucket or a rank score
        (smaller = shorter). `None` without a predictor.
    prefix_hash_ids : tuple of int
        Chained block hashes of the prompt; equal ids mean equal prefix up to that block.
    prompt : str or None
        The text, where the trace has it.
    predicted_session_tokens : float or None
        What a named predictor says of the outputs of all requests of its session together.
    refinement : Refinement or None
        The predictor asked again while the answer is generated, if it can be.
    """

    id: int
    arrival_ns: int
    prompt_tokens: int
    max_tokens: int
    priority: int = 0
    slo: Slo | None = None
    application: str | None = None
    session: str | None = None
    tenant: str | None = None
    predicted_tokens: float | None = None
    prefix_hash_ids: tuple[int, ...] = ()
    prompt: str | None = None
    refinement: Refinement | None = None
    predicted_session_tokens: float | None = None

    def __init__(
        self,
        id: int,
        arrival_ns: int,
        prompt_tokens: int,
        max_tokens: int,
        priority: int = 0,
        slo: Slo | None = None,
        application: str | None = None,
        session: str | None = None,
        tenant: str | None = None,
        predicted_tokens: float | None = None,
        prefix_hash_ids: tuple[int, ...] = (),
        prompt: str | None = None,
        refinement: Refinement | None = None,
        predicted_session_tokens: float | None = None,
    ) -> None:
        self.id = id
        self.arrival_ns = arrival_ns
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.priority = priority
        self.slo = slo
        self.application = application
        self.session = session
        self.tenant = tenant
        self.predicted_tokens = predicted_tokens
        self.prefix_hash_ids = prefix_hash_ids
        self.prompt = prompt
        self.refinement = refinement
        self.predicted_session_tokens = predicted_session_tokens


class Turn(NamedTuple):
    """What only the client of a session knows of a request: what it waits for, what it leads to.

    A server is told the former when it comes, and the latter when its answer is there.
    """

    parents: tuple[int, ...] = ()
    """Requests of the session whose answers it needs; it is sent when it has the last of them.
    Without any it is sent when the session starts."""
    delay_ns: int = 0
    """Time that passes before it is sent: a user thinks, or a tool works."""
    answer_hash_ids: tuple[int, ...] = ()
    """Chained block hashes that go on behind `Request.prefix_hash_ids`: those of the blocks that
    its answer fills."""
    tool: str | None = None
    """The tool that its answer calls; None if it is for the user."""


@mypyc_attr(acyclic=True)
@dataclass(init=False)
class Arrival:
    """One line of a workload: a request, and what only the trace and the executor know of it.

    Nobody writes to it; `dataclasses.replace` makes another.
    """

    request: Request
    output_tokens: int
    """True output length, >= 1."""
    ready_ns: int
    """When the scheduler sees the request: arrival plus prediction time. Of a session, those of its
    start: the arrivals of later requests follow from the answers."""
    turn: Turn | None = None
    """Its place in its session; of a workload all have one or none has."""

    def __init__(
        self, request: Request, output_tokens: int, ready_ns: int, turn: Turn | None = None
    ) -> None:
        self.request = request
        self.output_tokens = output_tokens
        self.ready_ns = ready_ns
        self.turn = turn


class Status(IntEnum):
    """Where a request is in its life."""

    WAITING = 0
    """In the queue: new, or preempted and to be computed again."""
    RUNNING = 1
    """Has a seat and KV memory."""
    HELD = 2
    """Finished, but keeps seat and memory until its sealed batch ends."""
    FINISHED = 3
    REJECTED = 4


# Python 3.11 looks a member up by a function of its own: a third of a microsecond each.
WAITS: Final = Status.WAITING
RUNS: Final = Status.RUNNING
DONE: Final = Status.FINISHED


class Session:
    """What a server knows of a session: its past. Policies read it, and write to `noted` alone.

    Attributes
    ----------
    name : str
        `Request.session`.
    start_ns : int
        When its first request was sent.
    num_sent, num_answered, num_in_flight : int
        Requests so far; of these, answered; of these, neither answered nor rejected.
    last_answer_ns, last_gap_ns : int
        When the last answer was there, and the time that last passed without any request of the
        session, from an answer to the next request; -1 if never.
    attained_ns : int
        Service of its answered requests: the time for which they held their memory and seats.
    waited_ns : int
        Time that they spent in the queue, before they were admitted and after preemptions.
    critical_ns : int
        The longest chain of services of answered requests, each sent after the one before it was
        answered.
    generated_tokens : int
        Tokens of its answers.
    tool : str or None
        What the last answer calls; None if it is for the user.
    calls : dict of int to (str, int)
        Of its requests whose answers call a tool, by their ids: which, and when they were there.
    noted : Any
        What a policy has noted of it in its hooks, for all engines of a fleet; None if nothing.
    """

    __slots__ = (
        "attained_ns", "calls", "critical_ns", "generated_tokens", "last_answer_ns", "last_gap_ns",
        "name", "noted", "num_answered", "num_in_flight", "num_sent", "start_ns", "tool",
        "waited_ns",
    )  # fmt: skip

    def __init__(self, name: str, start_ns: int) -> None:
        self.name = name
        self.start_ns = start_ns
        self.num_sent = 0
        self.num_answered = 0
        self.num_in_flight = 0
        self.last_answer_ns = -1
        self.last_gap_ns = -1
        self.attained_ns = 0
        self.waited_ns = 0
        self.critical_ns = 0
        self.generated_tokens = 0
        self.tool: str | None = None
        self.calls: dict[int, tuple[str, int]] = {}
        self.noted: Any = None


class RequestState:
    """The engine's view of a request's progress. Policies read it and never write to it.

    While a request decodes with the others, its counters are stored relative to the number of
    steps the `DecodeBatch` has taken, so that a step costs nothing per request.

    Attributes
    ----------
    request : Request
        What was asked.
    status : Status
        Where it is in its life.
    swapped : bool
        Whether it waits with its computed tokens in host memory.
    num_preemptions, recomputed_tokens : int
        How often it was preempted, and how many computed tokens that threw away.
    cached_tokens, prefix_hit_tokens : int
        Tokens that it found in the prefix cache instead of computing them: over all admissions,
        and at the first.
    queued_ns, first_scheduled_ns, first_token_ns, last_token_ns : int
        When; -1 if not yet. `queued_ns` is when the engine took it in; `last_token_ns` is set
        when it finishes.
    prompt : Prompt or None
        What a prefix cache keeps of it: the names of its blocks, and what it found last.
    session : Session or None
        What is known of its session, if the workload is made of sessions.
    tool : str or None
        What its answer calls, when that is there; None if it is for the user.
    awaited_call : (str, int) or None
        The tool that the one answer calls which it needs, and how long after that it came, in ns;
        None if that is for the user, or it needs none, or several: who knows which took so long?
    served_ns : int
        How long it held a seat, up to when it last gave one up.
    critical_ns : int
        `Session.critical_ns` when it came.
    """

    __slots__ = (
        "_batch",
        "_computed",
        "_entry_ns",
        "_generated",
        "_seat",
        "_seated_ns",
        "_stint_start",
        "awaited_call",
        "cached_tokens",
        "critical_ns",
        "first_scheduled_ns",
        "first_token_ns",
        "id",
        "last_token_ns",
        "num_preemptions",
        "prefix_hit_tokens",
        "prompt",
        "queued_ns",
        "recomputed_tokens",
        "request",
        "served_ns",
        "session",
        "status",
        "swapped",
        "tool",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.id = request.id
        self.status: Status = WAITS
        self.swapped = False
        self.num_preemptions = 0
        self.recomputed_tokens = 0
        self.cached_tokens = 0
        self.prefix_hit_tokens = 0
        self.queued_ns = -1
        self.first_scheduled_ns = -1
        self.first_token_ns = -1
        self.last_token_ns = -1
        self.prompt: Prompt | None = None
        self.session: Session | None = None
        self.tool: str | None = None
        self.awaited_call: tuple[str, int] | None = None
        self.served_ns = 0
        self.critical_ns = 0
        self._batch: DecodeBatch | None = None
        self._computed = 0
        self._generated = 0
        self._entry_ns = -1
        self._seat = -1
        self._seated_ns = -1
        self._stint_start = 0

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose keys and values are in the cache."""
        batch = self._batch
        return self._computed if batch is None else self._computed + batch.steps

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        batch = self._batch
        return self._generated if batch is None else self._generated + batch.steps

    @property
    def spare_tokens(self) -> int:
        """Tokens beyond its context that its KV blocks were allocated for."""
        return 0

    @property
    def fresh_tokens(self) -> int:
        """Tokens of its context whose blocks get no name before it is scheduled again."""
        return 0

    @property
    def decode_tokens(self) -> int:
        """Tokens that it computes when it decodes next."""
        return 1

    @property
    def num_tokens(self) -> int:
        """Prompt plus generated tokens: what the cache must hold before the next token."""
        return self.request.prompt_tokens + self.num_output_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens still to compute before the next one comes out; 1 while decoding."""
        # Both counters are relative to the steps of the decode batch, or neither is.
        return self.request.prompt_tokens + self._generated - self._computed

    @property
    def is_decoding(self) -> bool:
        """Whether it runs and only its newest token is not in the cache yet."""
        # As `next_is_decode` and that as `num_uncomputed_tokens`, written out: many are asked.
        if self._batch is not None:
            return True
        generated = self._generated
        return (
            generated > 0
            and self.request.prompt_tokens + generated - self._computed == 1
            and self.status is RUNS
        )

    @property
    def is_complete(self) -> bool:
        """Whether its last token came out: not so of who leaves to go on in another engine."""
        return self.last_token_ns >= 0

    @property
    def next_is_decode(self) -> bool:
        """Whether only its newest token is to be computed, with or without a seat."""
        generated = self._generated
        return generated > 0 and self.request.prompt_tokens + generated - self._computed == 1

    def __repr__(self) -> str:
        return (
            f"<request {self.id} {self.status.name.lower()}: {self.num_computed_tokens} of "
            f"{self.num_tokens} tokens computed, {self.num_output_tokens} generated>"
        )


seat_number: Final[Callable[[RequestState], int]] = attrgetter("_seat")
"""Returns a request's place in the order of admission, in less time than Python takes for it."""
