"""Which of several engines a request goes to, as the driver asks it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from schedlab.sim.drive.engine_state import EngineState
from schedlab.sim.errors import PolicyError
from schedlab.sim.own_code import FAULTS, raised, short, whole
from schedlab.sim.request import Request


class Router(Protocol):
    """Chooses an engine for each request, once, when it arrives."""

    looks_at_engines: bool
    """Whether it looks at more than the indices of the engines; who does not knows all its choices
    before anything runs."""
    looks_at_caches: bool
    """Whether it asks for `cached_tokens`."""

    def route(self, request: Request, engines: Sequence[EngineState]) -> int:
        """Return the place in `engines` of the one that `request` goes to.

        Parameters
        ----------
        request : Request
            What a server knows of it when it arrives; its true length is not known.
        engines : sequence of EngineState
            All engines that can take it; those that are down are not among them.
        """

    def engine_is_gone(self, index: int) -> None:
        """Learn that an engine died, with its cache; one that starts there later is fresh."""


def chosen(router: Router, request: Request, states: Sequence[EngineState]) -> int:
    """Ask a router for the index of an engine, and check its answer.

    Raises
    ------
    PolicyError
        If it fails, or names no engine that is up.
    """
    try:
        # What a router returns may be anything; the compiled core must not check it here.
        ask: Callable[[Request, Sequence[EngineState]], object] = router.route
        answer = ask(request, states)
    except FAULTS as error:
        raise PolicyError(
            f"{_of(router, request)}: route() raised {raised(error, type(router))}"
        ) from error
    place = whole(answer)
    if place is None:
        raise PolicyError(
            f"{_of(router, request)}: route() returned {short(answer)}, which is no whole number"
        )
    if not 0 <= place < len(states):
        raise PolicyError(
            f"{_of(router, request)}: route() returned {short(place)}, and there are engines 0 to "
            f"{len(states) - 1}{_who(states)}"
        )
    each: Sequence[Any] = states  # which need not be more than their indices
    index: int = each[place].index
    return index


def tell_gone(router: Router, index: int) -> None:
    """Tell a router that an engine died.

    Raises
    ------
    PolicyError
        If it fails.
    """
    try:
        router.engine_is_gone(index)
    except FAULTS as error:
        raise PolicyError(
            f"router {type(router).__name__}: engine_is_gone() of engine {index} raised "
            f"{raised(error, type(router))}"
        ) from error


def _who(states: Sequence[Any]) -> str:
    indices = [state.index for state in states]
    if indices == list(range(len(indices))):
        return ""
    return f" in its list: places of engines {', '.join(map(str, indices))}, the others are down"


def _of(router: Router, request: Request) -> str:
    return f"router {type(router).__name__}, request {request.id}"
