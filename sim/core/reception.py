"""Requests whose KV comes from another engine: their seats and memory until it is there."""

from __future__ import annotations

from schedlab.sim.core.departures import Departures
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.core.track import SpeculatingState
from schedlab.sim.kv.prefix import PrefixCachingKVCache
from schedlab.sim.request import DONE, RUNS, Arrival, RequestState


def reserve(
    requests: Departures, state: RequestState, arrival: Arrival, num_tokens: int, now_ns: int
) -> int:
    """Give a seat, and memory that is there, to a request whose KV comes from elsewhere.

    What the prefix cache holds of it is there already; the rest is found by others when it is.

    Parameters
    ----------
    requests : Departures
        Those of the engine where it goes on.
    state : RequestState
        New here; tokens of its answer came out elsewhere.
    arrival : Arrival
        The request, with its true output length.
    num_tokens : int
        How much of it is computed.
    now_ns : int
        The time.

    Returns
    -------
    int
        How many of these tokens the prefix cache holds.
    """
    kv, cached_tokens = requests.kv, 0
    if isinstance(kv, PrefixCachingKVCache):
        hit = kv.lookup(state)
        cached_tokens = hit.tokens
        has_room = kv.reserve(state, num_tokens - cached_tokens, 0, hit)
    else:
        has_room = kv.allocate(state, num_tokens)
    assert has_room, "memory is reserved only where it is free"
    requests.executor.add(state.request, arrival.output_tokens)
    if arrival.turn is not None:
        requests.turns[state.id] = arrival.turn
    state.status = RUNS
    state._seated_ns = now_ns
    state._computed = num_tokens
    requests.resident_tokens += num_tokens
    requests.is_plain = False
    requests.fetching[state.id] = state
    requests.num_arrived += 1
    requests.num_events += 1
    return cached_tokens


def extend(requests: Departures, state: RequestState, num_tokens: int) -> None:
    """Take memory that is there for more KV of a request that `reserve` let in."""
    has_room = requests.kv.allocate(state, num_tokens)
    assert has_room, "memory is reserved only where it is free"
    state._computed += num_tokens
    requests.resident_tokens += num_tokens
    requests.num_events += 1


def call_off(requests: Departures, state: RequestState) -> None:
    """Take back `reserve`: the KV does not come."""
    del requests.fetching[state.id]
    state.status = DONE
    requests.num_handed_over += 1
    requests.num_events += 1
    requests.release(state)
    requests.executor.remove(state)


def take_back(requests: Departures, state: RequestState, arrival: Arrival, now_ns: int) -> None:
    """Let a request go on here after all that was handed over, from the next plan on.

    Parameters
    ----------
    requests : Departures
        Those of the engine that handed it over; there is a seat.
    state : RequestState
        It, with its KV.
    arrival : Arrival
        The request, with its true output length.
    now_ns : int
        The time.
    """
    executor = requests.executor
    assert isinstance(executor, SimExecutor)
    del requests.handed_over[state.id]
    requests.num_handed_over -= 1
    executor.add_whole(state.request, arrival.output_tokens)
    state.status = RUNS
    state._entry_ns = -1
    state._seated_ns = now_ns
    requests.is_plain = False
    requests.fetching[state.id] = state
    arrive(requests, state, now_ns)


def tell_token(requests: Departures, state: RequestState, now_ns: int) -> None:
    """Tell of the token that came with the KV of a request: it was computed with its prompt."""
    state._generated += 1
    if state.first_token_ns < 0:
        state.first_token_ns = now_ns
    steps = requests.decodes.numbered_from + requests.decodes.steps
    requests.log.add_stint(state.id, now_ns, steps, steps)


def arrive(requests: Departures, state: RequestState, now_ns: int) -> None:
    """Let a request run whose KV has come, from the next plan on."""
    if isinstance(requests.kv, PrefixCachingKVCache):
        requests.kv.name_prompt(state, state._computed)
    requests.arrived.append(state)
    requests.num_events += 1
    if requests.hooks.on_arrival is not None:
        requests.hooks.on_arrival(state, now_ns)


def seat_arrived(requests: Departures) -> None:
    """Let those run whose KV has come."""
    for state in requests.arrived:
        del requests.fetching[state.id]
        state._seat = requests.num_seats_given
        requests.num_seats_given += 1
        requests.running[state.id] = state
        if not state.is_decoding:  # its last prompt token is computed again
            requests.prefilling[state.id] = state
            continue
        requests.paused[state.id] = state
        if isinstance(state, SpeculatingState):
            requests.num_turnovers += 1
            requests.draft(state, 0)  # what the last engine drafted does not come with it
    requests.arrived.clear()
