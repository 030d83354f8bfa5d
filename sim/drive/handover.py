"""Prompts computed on some engines, answers on others: what goes from the ones to the others."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import TYPE_CHECKING

from schedlab.sim.core import reception
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.core.track import slots_ahead
from schedlab.sim.drive.clock import COMES, Event
from schedlab.sim.drive.disaggregation import Disaggregation
from schedlab.sim.drive.engine_state import note_sent
from schedlab.sim.drive.links import Links, Moving
from schedlab.sim.drive.local_prefill import LocalPrefill
from schedlab.sim.drive.members import Member
from schedlab.sim.drive.retries import as_received, catch_up
from schedlab.sim.drive.router import chosen, tell_gone
from schedlab.sim.drive.server import Server
from schedlab.sim.kv.prefix import PrefixCachingKVCache
from schedlab.sim.record.cluster_log import Transfer
from schedlab.sim.request import RequestState

if TYPE_CHECKING:
    from schedlab.sim.core.step import Segment
    from schedlab.sim.drive.fleet import Fleet


@dataclass(eq=False)
class _Delivery:
    """A request between two engines."""

    sent: RequestState
    sender: Member
    ready_ns: int
    """When the prompt is computed."""
    num_tokens: int
    """Whose KV goes."""
    last_tokens: int
    """Those of them whose layers are computed one after the other until then."""
    is_computed: bool
    counted_by: Member | None
    """Whose requests it is one of, as routers see it."""
    receiver: Member | None = None
    """Who goes on; None while nobody can."""
    received: RequestState | None = None
    """The request there, once it has seat and memory."""
    moving: Moving | None = None


class Handover:
    """Requests on their way from the engines that compute prompts to those that go on.

    When a prompt is computed a router chooses the engine that goes on. There requests queue for a
    seat and for memory (of the prompt and the next token), first come, first served, behind those
    of its own that were preempted. Who has both is sent its KV after the whole prompt, all of it
    that the prefix cache there does not hold; until then the sender holds it. Then it decodes with
    the others, or first computes its last prompt token again. If the engine that goes on dies
    before it has the KV another one is chosen; if the sender does the KV is lost.

    Where KV is sent layer by layer, all this happens when the first layer of the last chunk of a
    prompt is computed, and what has room by then is sent while the others are. See Notes.

    Parameters
    ----------
    fleet : Fleet
        All engines.
    links : Links
        What joins them.
    plan : Disaggregation
        Who goes on.

    Attributes
    ----------
    transfers : list of Transfer
        What was delivered so far.

    Notes
    -----
    The ``n`` layers of a step of ``c`` seconds are computed one every ``c / n``. A link that is
    alone and takes ``s`` seconds for all the KV, ``l`` of them for that of the last layer, begins
    as late as it can without ever having to wait for a layer: then it ends, as it would if it
    began as soon as it can, ``max(l, s - (c - c / n))`` after the prompt if all is of one chunk.
    Links that are shared end later, but not later than if all was sent after the prompt.
    """

    def __init__(self, fleet: Fleet, links: Links, plan: Disaggregation) -> None:
        self._fleet = fleet
        self._links = links
        self._router = plan.router
        self._plan = plan
        self._local = LocalPrefill(fleet, plan)
        self._under_way: dict[int, _Delivery] = {}
        self._unplaced: list[_Delivery] = []
        self._queues: dict[int, deque[_Delivery]] = {}
        self.transfers: list[Transfer] = []
        for member in fleet.members:
            self.started(member)

    @property
    def is_moving(self) -> bool:
        """Whether KV is on its way, or waits for an engine to come."""
        return bool(self._unplaced) or any(
            delivery.moving is not None for delivery in self._under_way.values()
        )

    # -- what becomes of engines -------------------------------------------------------------------

    def started(self, member: Member) -> None:
        """Let a fresh engine hand over, or take over who waits for one."""
        if member.role == "decode":
            self._queues[member.index] = deque()
            # What is there of a prompt is seen when its KV is to come, whatever step runs then.
            if isinstance(member.engine.kv, PrefixCachingKVCache):
                member.engine.cache_is_watched = True
            if self._plan.first_token == "transfer":
                member.engine.log.tells_by_step = False
            elif self._plan.first_token == "decode":
                # With drafts a batch of decodes has more tokens of each, and graphs take no other.
                executor = member.engine.executor
                assert isinstance(executor, SimExecutor)
                drafts = member.engine.config.num_speculative_tokens
                executor.decodes_single_tokens = not drafts
            self._fleet.settle_soon(member)
        elif member.role == "prefill":
            member.engine.requests.hands_over = partial(self._prompt_is_done, member)
            if self._plan.first_token != "prefill":
                member.engine.requests.drops_token = self._is_told_elsewhere
                member.engine.log.tells_by_step = False
            if self._links.joins.num_layers > 1:
                assert isinstance(member.server, Server)
                member.server.on_begun = partial(self._prompts_begin, member)
            assert isinstance(member.engine.executor, SimExecutor)
            member.engine.executor.most_tokens = 1

    def died(self, member: Member) -> list[RequestState]:
        """Give up what was held there, and choose anew for those that were to go on there."""
        tell_gone(self._router, member.index)
        self._local.died(member)
        lost = []
        for delivery in list(self._under_way.values()):
            if delivery.sender is member:
                self._call_off(delivery)
                if delivery.is_computed:  # else the engine has it still
                    lost.append(delivery.sent)
            elif delivery.receiver is member:
                if delivery.moving is not None:
                    self._links.cancel(delivery.moving)
                delivery.counted_by = delivery.receiver = None
                delivery.received = delivery.moving = None
                self._unplaced.append(delivery)
        self._queues.pop(member.index, None)
        self._fleet.settle_soon(member)
        return lost

    def _call_off(self, delivery: _Delivery) -> None:
        """Undo what was done for a request whose KV is lost."""
        del self._under_way[delivery.sent.id]
        receiver = delivery.receiver
        if receiver is None:
            self._unplaced.remove(delivery)
            return
        receiver.live.count(delivery.sent.request, -1)
        if delivery.received is None:
            self._queues[receiver.index].remove(delivery)
            receiver.live.unqueue(delivery.sent)
        else:
            assert delivery.moving is not None
            self._links.cancel(delivery.moving)
            receiver.server.interrupt()
            reception.call_off(receiver.engine.requests, delivery.received)
            receiver.server.wake()
        self._fleet.settle_soon(receiver)

    # -- requests ----------------------------------------------------------------------------------

    def _prompts_begin(self, sender: Member, segment: Segment) -> None:
        """Look again at prompts that this step completes, when their first layer is computed."""
        if any(state.num_uncomputed_tokens == n for state, n in segment.plan.chunks):
            num_layers = self._links.joins.num_layers
            first_ns = ceil((segment.end_ns - segment.start_ns) / num_layers)
            done = partial(self._first_layer_is_done, sender, segment)
            self._fleet.clock.at(first_ns, COMES, done)

    def _first_layer_is_done(self, sender: Member, segment: Segment, _: Event) -> None:
        if not sender.is_up or sender.live.segment is not segment:
            return  # the engine died
        executor = sender.engine.executor
        assert isinstance(executor, SimExecutor)
        for state, n in segment.plan.chunks:
            if executor.has_whole(state.request):
                continue  # it was kept, and is computed again
            if state.num_uncomputed_tokens == n and self._goes_on(state, 1):
                tokens = state.num_computed_tokens + n
                self._add(_Delivery(state, sender, segment.end_ns, tokens, n, False, sender))
        self._fleet.settle_soon(sender)

    def _prompt_is_done(self, sender: Member, state: RequestState, now_ns: int) -> bool:
        """Let a request go on elsewhere, unless it has all its tokens."""
        if not self._goes_on(state, 0):
            return False
        delivery = self._under_way.get(state.id)
        if delivery is None:
            tokens = state.num_computed_tokens
            self._add(_Delivery(state, sender, now_ns, tokens, 0, True, sender))
            return True
        delivery.is_computed = True
        if delivery.received is not None:
            catch_up(delivery.received, state)
            delivery.received._seated_ns = now_ns
        return True

    def _goes_on(self, state: RequestState, more_tokens: int) -> bool:
        """Whether a request has not all its tokens, when so many more came out."""
        if self._plan.first_token == "decode":
            return True  # none of the answer comes out there
        output_tokens = self._fleet.arrivals[state.id].output_tokens
        most = min(output_tokens, state.request.max_tokens)
        return state.num_output_tokens + more_tokens < most

    def _is_told_elsewhere(self, state: RequestState) -> bool:
        """Whether the token that a request has got is told where it goes on, if it does."""
        return self._goes_on(state, 0)

    def _add(self, delivery: _Delivery) -> None:
        self._under_way[delivery.sent.id] = delivery
        self._unplaced.append(delivery)

    def settle(self, changed: set[int]) -> None:
        """Look who goes on where, and who of an engine can."""
        if self._unplaced:
            changed = changed | self._place()
        for index in sorted(changed & self._queues.keys()):
            queue, receiver = self._queues[index], self._fleet.members[index]
            while queue and self._fits(receiver, queue[0]):
                delivery = queue.popleft()
                receiver.live.unqueue(delivery.sent)
                self._begin(delivery, receiver)

    def _place(self) -> set[int]:
        """Let the router choose for those without an engine to go on; return the chosen ones."""
        receivers = self._fleet.serving("decode")
        keeps = self._plan.keeps_when_full
        chosen_ones = set()
        unplaced, self._unplaced = self._unplaced, []
        if not receivers and not keeps:
            for delivery in unplaced:
                if not self._local.has_promised(delivery.sent.id):
                    self._wait_or_give_up(delivery)
            unplaced = [one for one in unplaced if self._local.has_promised(one.sent.id)]
        for delivery in sorted(unplaced, key=lambda delivery: delivery.sent.id):
            request = delivery.sent.request
            receiver = self._promised(delivery)
            if receiver is None:
                among = receivers
                if keeps:
                    among = [member for member in receivers if self._has_room(member, delivery)]
                    if not among:
                        if not self._keep(delivery):
                            self._unplaced.append(delivery)
                        continue
                index = chosen(self._router, request, [member.known for member in among])
                receiver = self._fleet.members[index]
                note_sent(request, receiver.live, receiver.known)
            if delivery.counted_by is not None:
                delivery.counted_by.live.count(request, -1)
            delivery.receiver = delivery.counted_by = receiver
            if keeps:
                self._begin(delivery, receiver)  # the next one finds this room taken
            else:
                self._queues[receiver.index].append(delivery)
                receiver.live.queue(delivery.sent)
                chosen_ones.add(receiver.index)
        return chosen_ones

    def _promised(self, delivery: _Delivery) -> Member | None:
        """Return the engine that was chosen when a request came, if one was and can go on."""
        receiver = self._local.take(delivery.sent.id)
        if receiver is None or not self._plan.keeps_when_full:
            return receiver
        if self._has_room(receiver, delivery):
            return receiver
        self._local.uncount(delivery.sent.id, receiver)
        return None

    def _has_room(self, receiver: Member, delivery: _Delivery) -> bool:
        return not self._queues[receiver.index] and self._fits(receiver, delivery)

    def _fits(self, receiver: Member, delivery: _Delivery) -> bool:
        kv, tokens = receiver.engine.kv, self._computed_tokens(delivery)
        if isinstance(kv, PrefixCachingKVCache):
            return has_room(receiver, tokens, kv.find(delivery.sent).blocks_in_use)
        return has_room(receiver, tokens)

    def _computed_tokens(self, delivery: _Delivery) -> int:
        """Count the tokens that need not be computed where a request goes on."""
        return delivery.num_tokens - (self._plan.first_token == "decode")

    def _keep(self, delivery: _Delivery) -> bool:
        """Let a request go on where its prompt was computed; return whether it has a seat there."""
        state, sender = delivery.sent, delivery.sender
        if not delivery.is_computed:
            del self._under_way[state.id]  # it is looked at again when it is
            return True
        requests = sender.engine.requests
        if requests.num_seated >= sender.engine.config.most_resident:
            return False  # it was on its way to an engine that died, and others came
        del self._under_way[state.id]
        sender.server.interrupt()
        arrival = self._fleet.arrivals[state.id]
        reception.take_back(requests, state, arrival, self._fleet.now_ns)
        if delivery.counted_by is None:
            note_sent(state.request, sender.live, sender.known)
        sender.server.wake()
        return True

    def _wait_or_give_up(self, delivery: _Delivery) -> None:
        """Let a request wait for an engine to go on, if one will ever be there."""
        if self._fleet.expects("decode"):
            self._unplaced.append(delivery)
            return
        del self._under_way[delivery.sent.id]
        sender = delivery.sender
        if not delivery.is_computed:
            return  # it is tried again, and given up if need be, when it is
        if delivery.counted_by is not None:
            delivery.counted_by.live.count(delivery.sent.request, -1)
        sender.server.interrupt()
        sender.engine.requests.delivered(delivery.sent.id)
        sender.server.wake()
        self._fleet.retries.fail(delivery.sent, "no engine is left that could go on", sender)

    def _begin(self, delivery: _Delivery, receiver: Member) -> None:
        """Take seat and memory, and let the KV be sent."""
        receiver.server.interrupt()
        state = delivery.received = as_received(delivery.sent, receiver.engine.config)
        now_ns, tokens, sender = self._fleet.now_ns, delivery.num_tokens, delivery.sender
        arrival = self._fleet.arrivals[state.id]
        computed_tokens = self._computed_tokens(delivery)
        requests = receiver.engine.requests
        tokens -= reception.reserve(requests, state, arrival, computed_tokens, now_ns)
        receiver.live.has_changed(receiver.live.segment)
        links = self._links
        last_layer_tokens = min(delivery.last_tokens, tokens) / links.joins.num_layers
        last_layer_ns = links.kv_alone_ns(sender, receiver, last_layer_tokens)
        end_ns = delivery.ready_ns + last_layer_ns
        wait_ns = ceil(end_ns - now_ns - links.kv_alone_ns(sender, receiver, tokens))
        done = partial(self._is_delivered, delivery, now_ns)
        # Nothing of the overhead is hidden behind layers that are not computed yet.
        wait_ns = max(wait_ns, 0) + self._plan.overhead_ns
        delivery.moving = links.send_kv(sender, receiver, tokens, done, wait_ns)

    def _is_delivered(self, delivery: _Delivery, start_ns: int) -> None:
        sender, receiver, state = delivery.sender, delivery.receiver, delivery.received
        assert receiver is not None
        assert state is not None
        assert delivery.moving is not None
        del self._under_way[state.id]
        for member in (sender, receiver):
            member.server.interrupt()
        sender.engine.requests.delivered(state.id)
        if self._plan.first_token == "transfer":
            reception.tell_token(receiver.engine.requests, state, self._fleet.now_ns)
        reception.arrive(receiver.engine.requests, state, self._fleet.now_ns)
        for member in (sender, receiver):
            member.server.wake()
        self.transfers.append(
            Transfer(
                state.id,
                sender.index,
                delivery.ready_ns,
                start_ns,
                self._fleet.now_ns,
                delivery.moving.num_bytes,
            )
        )


def has_room(receiver: Member, num_tokens: int, shared_blocks: int = 0) -> bool:
    """Whether a request finds a seat and memory for its KV and the next token, before all others.

    It does not while requests wait there that were preempted. Blocks that it shares with others
    take no memory.
    """
    requests, config = receiver.engine.requests, receiver.engine.config
    if requests.num_waiting or requests.num_seated >= config.most_resident:
        return False
    end = num_tokens + 1
    need = -(-(end + slots_ahead(config, end)) // config.block_size) - shared_blocks
    free_blocks = config.num_blocks - receiver.live.used_blocks
    # As at any admission, an engine with nobody else need not keep free blocks.
    keep = config.watermark_blocks if requests.num_seated else 0
    return need <= free_blocks - keep
