"""Making room for requests at the expense of others."""

from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import merge
from itertools import chain
from typing import Any

from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import DONE, RequestState

Victim = Callable[[Sequence[RequestState]], RequestState]
Place = Callable[[RequestState], Any]


def grant_running_in_order(view: EngineView, builder: PlanBuilder, victim: Victim) -> None:
    """Schedule running requests one by one in the order of admission, preempting where needed.

    Whoever lacks memory takes it from a victim then and there. Tokens that the victim was granted
    already go back to the budget, for those behind; the request at hand gets no more for it. Who
    preempts itself ends the step, or leaves it to those behind with `serve_behind_preempted`.

    Parameters
    ----------
    view, builder : EngineView, PlanBuilder
        The engine, and its ledger.
    victim : callable
        Chooses among requests that hold memory, the latest admission first. Some of them may have
        finished just now (see `EngineView.seated`).

    Notes
    -----
    Source: vLLM V1, vllm/v1/core/sched/scheduler.py, schedule(), "First, schedule the RUNNING
    requests". Where memory suffices, this is `PlanBuilder.grant_running`.
    """
    if builder.grant_running():
        return
    seated = list(view.seated)
    place = 0
    while place < len(seated) and builder.tokens_left and builder.rows_left:
        state = seated[place]
        if state.status is DONE or state in view.in_pipeline:
            place += 1
            continue
        want = builder.tokens_left
        place += 1
        while not builder.grant(state, want):
            gone = victim(seated[::-1])
            index = seated.index(gone)
            del seated[index]
            place -= index < place
            builder.preempt(gone)
            if gone is state:
                if view.config.serve_behind_preempted:
                    break
                return


def grant_or_preempt(
    builder: PlanBuilder, state: RequestState, victims: list[RequestState]
) -> bool:
    """Grant a running request its tokens, preempting from the end of `victims` until they fit.

    Parameters
    ----------
    builder : PlanBuilder
        The ledger.
    state : RequestState
        A running request; its own turn in `victims` means that it is preempted itself.
    victims : list of RequestState
        Running requests not granted anything yet, `state` among them, the first to go last. Who
        is granted or preempted is taken out.

    Returns
    -------
    bool
        Whether it was granted; False also if the tokens or the rows of the step are used up.
    """
    while not builder.grant(state):
        if builder.tokens_left < 1 or builder.rows_left < 1:
            return False
        victim = victims.pop()
        builder.preempt(victim)
        if victim is state:
            return False
    victims.remove(state)
    return True


def grant_all_decodes(
    decodes: Collection[RequestState], builder: PlanBuilder, view: EngineView
) -> bool:
    """Grant all of some decodes a token or none; at O(1) where these are all that decode.

    Then the plan does not list them: `on_tokens` must not want to know who ran.
    """
    num_decodes = len(decodes)
    if num_decodes == view.num_decodes and not builder.preempted:
        if num_decodes > builder.tokens_left or num_decodes > builder.rows_left:
            return False
        return builder.grant_decodes()
    return builder.grant_all(decodes)


def grant_everyone(view: EngineView, builder: PlanBuilder, by_name: bool, place: Place) -> bool:
    """Grant all decodes a token and all prompts what is left of them, if all of that fits.

    Then it does not matter who comes first, and the plan is that of granting them in any order in
    which prompts keep theirs.

    Parameters
    ----------
    view, builder : EngineView, PlanBuilder
        The engine, and its ledger.
    by_name : bool
        Whether the plan must list the decodes, for who wants to know in `on_tokens` who ran.
    place : callable
        Where a request stands in the order of prompts; the queue is in this order.

    Returns
    -------
    bool
        False, with nothing granted, if something may not fit, or if decodes are paused, so that
        their places decide in which order they go on.
    """
    waiting, prefilling = view.waiting, view.prefilling
    if view.num_paused or view.config.kv_allocator != "paged":
        return False
    if not waiting.size and not prefilling:
        running = view.running
        num_tokens = len(running) * (1 + view.config.num_speculative_tokens)
        if len(running) > builder.rows_left or num_tokens > builder.tokens_left:
            return False
        return builder.grant_all(running) if by_name else builder.grant_decodes()
    if not everyone_fits(view, builder):
        return False
    if by_name:
        builder.grant_all(view.decoding)
    else:
        builder.grant_decodes()
    prompts: Iterable[RequestState] = waiting
    if prefilling:
        prompts = merge(sorted(prefilling, key=place), waiting, key=place)
    for state in prompts:
        builder.grant(state)
    return True


def everyone_fits(view: EngineView, builder: PlanBuilder) -> bool:
    """Whether a step surely has room for a token of each decode and what is left of each prompt."""
    config, waiting, prefilling = view.config, view.waiting, view.prefilling
    num_waiting, num_running = waiting.size, len(view.running)
    if num_waiting > builder.residents_left or num_waiting + num_running > builder.rows_left:
        return False
    drafts, size = config.num_speculative_tokens, config.block_size
    tokens_left, blocks = builder.tokens_left - num_running * (1 + drafts), 0
    for state in chain(prefilling, waiting):
        tokens_left -= state.num_uncomputed_tokens
        if tokens_left < 0 or state.swapped:
            return False
        blocks -= -state.num_tokens // size
    if config.kv_allocator != "paged" or tokens_left < 0:
        return False
    slots = 1 + (drafts + config.num_lookahead_tokens if drafts else 0)
    blocks += config.watermark_blocks + num_running * -(-slots // size)
    return blocks <= view.free_blocks


def latest_arrival(builder: PlanBuilder) -> RequestState:
    """Return the running request that arrived last."""
    return max(builder.running(), key=lambda s: (s.request.arrival_ns, s.id))
