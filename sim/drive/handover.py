"""Prompts computed on some engines, answers on others: what goes from the ones to the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import simpy

from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.drive.engine_state import EngineState, LiveState, note_sent
from schedlab.sim.drive.instant import FOLLOWS, at
from schedlab.sim.drive.links import Link, Links
from schedlab.sim.drive.router import Router, chosen
from schedlab.sim.drive.server import Server
from schedlab.sim.record.cluster_log import Transfer
from schedlab.sim.request import Arrival, RequestState

Role = Literal["mixed", "prefill", "decode"]


@dataclass(frozen=True)
class Disaggregation:
    """Which engines do what, and what joins them.

    Attributes
    ----------
    roles : sequence of {"mixed", "prefill", "decode"}
        Of each engine: serves requests whole, computes their prompts, or goes on from there.
    router : Router
        Says which engine goes on with a request whose prompt is computed.
    link : Link
        What joins the engines.
    kv_bytes_per_token : int
        Size of the keys and values of a token, over all devices of an engine.
    num_devices : sequence of int
        Of each engine.
    """

    roles: Sequence[Role]
    router: Router
    link: Link
    kv_bytes_per_token: int
    num_devices: Sequence[int]


@dataclass(eq=False)
class _Delivery:
    """A request between two engines."""

    state: RequestState
    arrival: Arrival
    sender: int
    receiver: int
    ready_ns: int


class Handover:
    """Requests on their way from the engines that compute prompts to those that go on.

    When a prompt is computed a router chooses the engine that goes on. There requests queue for a
    seat and for memory (of the prompt and the next token), first come, first served, behind those
    of its own that were preempted. Who has both is sent its KV, all of it, after the whole prompt;
    until then the sender holds it. Then it decodes with the others.

    Parameters
    ----------
    clock : simpy.Environment
        The time, in ns.
    engines : sequence of Engine
        All.
    servers : sequence of Server
        What drives each.
    live : sequence of LiveState
        Each as it is now.
    known : callable
        Returns what routers know of each.
    plan : Disaggregation
        Who does what.

    Attributes
    ----------
    takes_requests : list of int
        Engines that new requests can be sent to.
    transfers : list of Transfer
        What was delivered so far.
    """

    def __init__(
        self,
        clock: simpy.Environment,
        engines: Sequence[Engine],
        servers: Sequence[Server],
        live: Sequence[LiveState],
        known: Callable[[], Sequence[EngineState]],
        plan: Disaggregation,
    ) -> None:
        self._clock = clock
        self._engines = engines
        self._servers = servers
        self._live = live
        self._known = known
        self._plan = plan
        self._links = Links(clock, plan.link)
        self._expected: dict[int, Arrival] = {}
        self._prompts_done: list[_Delivery] = []
        self._to_settle: set[int] = set()
        self._queues: dict[int, deque[_Delivery]] = {}
        self.takes_requests: list[int] = []
        self.transfers: list[Transfer] = []
        for index, (engine, role) in enumerate(zip(engines, plan.roles, strict=True)):
            if role == "decode":
                self._queues[index] = deque()
            else:
                self.takes_requests.append(index)
            if role == "prefill":
                engine.requests.hands_over = partial(self._prompt_is_done, index)
                assert isinstance(engine.executor, SimExecutor)
                engine.executor.most_tokens = 1

    def expect(self, arrival: Arrival, sender: int) -> None:
        """Learn all of a request, its true length too, and where its prompt is computed."""
        if self._plan.roles[sender] == "prefill":
            self._expected[arrival.request.id] = arrival

    def _prompt_is_done(self, sender: int, state: RequestState, now_ns: int) -> bool:
        """Let a request go on elsewhere, unless it has all its tokens."""
        arrival = self._expected.pop(state.id)
        if min(arrival.output_tokens, state.request.max_tokens) == 1:
            return False
        delivery = _Delivery(state, arrival, sender, -1, now_ns)
        self._prompts_done.append(delivery)
        return True

    def settle_soon(self, index: int) -> None:
        """Look, after all steps that end at this instant, who goes on, and who of an engine can."""
        if not self._to_settle:
            at(self._clock, 0, FOLLOWS, self._settle)
        self._to_settle.add(index)

    def _settle(self, _: simpy.Event) -> None:
        changed, self._to_settle = self._to_settle, set()
        for delivery in sorted(self._prompts_done, key=lambda delivery: delivery.state.id):
            self._choose_receiver(delivery)
            changed.add(delivery.receiver)
        self._prompts_done.clear()
        for index in sorted(changed & self._queues.keys()):
            queue = self._queues[index]
            while queue and self._has_room(index, queue[0]):
                self._begin(queue.popleft())

    def _choose_receiver(self, delivery: _Delivery) -> None:
        request, known = delivery.state.request, self._known()
        receivers = [known[index] for index in self._queues]
        delivery.receiver = chosen(self._plan.router, request, receivers)
        self._live[delivery.sender].count(request, -1)
        note_sent(request, self._live[delivery.receiver], known[delivery.receiver])
        self._queues[delivery.receiver].append(delivery)

    def _has_room(self, index: int, delivery: _Delivery) -> bool:
        engine = self._engines[index]
        requests, config = engine.requests, engine.config
        if requests.num_waiting or requests.num_seated >= config.most_resident:
            return False
        need = -(-(delivery.state.request.prompt_tokens + 1) // config.block_size)
        free_blocks = config.num_blocks - self._live[index].used_blocks
        # As at any admission, an engine with nobody else need not keep free blocks.
        keep = config.watermark_blocks if requests.num_seated else 0
        return need <= free_blocks - keep

    def _begin(self, delivery: _Delivery) -> None:
        """Take seat and memory, and let the KV be sent."""
        self._servers[delivery.receiver].interrupt()
        delivery.state = _as_received(delivery.state)
        engine = self._engines[delivery.receiver]
        now_ns = int(self._clock.now)
        engine.requests.reserve(delivery.state, delivery.arrival, now_ns)
        num_bytes = delivery.state.request.prompt_tokens * self._plan.kv_bytes_per_token
        devices = self._plan.num_devices
        self._links.send(
            delivery.sender,
            delivery.receiver,
            num_bytes,
            min(devices[delivery.sender], devices[delivery.receiver]),
            partial(self._is_delivered, delivery, now_ns, num_bytes),
        )

    def _is_delivered(self, delivery: _Delivery, start_ns: int, num_bytes: int) -> None:
        now_ns, state = int(self._clock.now), delivery.state
        for index in (delivery.sender, delivery.receiver):
            self._servers[index].interrupt()
        self._engines[delivery.sender].requests.delivered(state.id)
        self._engines[delivery.receiver].requests.arrive(state)
        for index in (delivery.sender, delivery.receiver):
            self._servers[index].wake()
        self.transfers.append(
            Transfer(state.id, delivery.sender, delivery.ready_ns, start_ns, now_ns, num_bytes)
        )


def _as_received(sent: RequestState) -> RequestState:
    """Return a request as the engine has it that goes on: with all that happened so far."""
    state = RequestState(sent.request)
    state.queued_ns = sent.queued_ns
    state.first_scheduled_ns = sent.first_scheduled_ns
    state.first_token_ns = sent.first_token_ns
    state.num_preemptions = sent.num_preemptions
    state.recomputed_tokens = sent.recomputed_tokens
    state.cached_tokens = sent.cached_tokens
    state.prefix_hit_tokens = sent.prefix_hit_tokens
    state.session = sent.session
    state.critical_ns = sent.critical_ns
    state.served_ns = sent.served_ns
    return state
