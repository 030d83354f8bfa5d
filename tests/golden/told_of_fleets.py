"""What a fleet tells its router, its autoscalers and its migrator each time it asks them."""

import hashlib
from collections import Counter
from dataclasses import replace
from typing import Any

from schedlab.policies.routers.router import Router
from schedlab.sim.cost.shape import BatchShape
from tests.golden import combined
from tests.property.test_fleet_failures import Restless, UpAndDown

NUMBERS = tuple(range(0, combined.FLEETS, 6))
_SHAPE = BatchShape(2, 30, 20, ((5, 7),))
_OF_ENGINES = (
    "index", "num_in_flight", "prompt_tokens_in_flight", "predicted_tokens_in_flight",
    "num_waiting", "num_running", "num_blocks", "block_size", "backlog_tokens", "used_blocks",
    "first_waiting_blocks", "waiting_blocks", "num_urgent",
)  # fmt: skip


class _Notes:
    def __init__(self) -> None:
        self.text = hashlib.sha256()
        self.count: Counter[str] = Counter()

    def __call__(self, what: str, told: Any) -> None:
        self.count[what] += 1
        self.text.update(f"{what} {told!r}\n".encode())


def _state(engine: Any) -> list[Any]:
    return [*(getattr(engine, name) for name in _OF_ENGINES), engine.estimate_step_ns(_SHAPE)]


class _Listening(Router):
    """Sends requests where their number says, and writes down all that it is told."""

    looks_at_caches = True

    def __init__(self, note: _Notes) -> None:
        self.note = note

    def route(self, request: Any, engines: Any) -> int:
        """Note every engine."""
        cached = [engine.cached_tokens(request) for engine in engines]
        self.note("route", (request.id, [_state(engine) for engine in engines], cached))
        return request.id % len(engines)

    def engine_is_gone(self, index: int) -> None:
        """Note that."""
        self.note("gone", index)


class _Moving(Restless):
    """Moves whom it may, and writes down who that could be."""

    def __init__(self, note: _Notes) -> None:
        self.note = note

    def pairs(self, candidates: Any) -> Any:
        """Note every candidate."""
        self.note("pairs", [(one.is_draining, _state(one.engine)) for one in candidates])
        return super().pairs(candidates)

    def victim(self, decoding: Any) -> int | None:
        """Note who decodes."""
        self.note("victim", [(s.id, s.num_computed_tokens, s.num_output_tokens) for s in decoding])
        return super().victim(decoding)


class _Scaling(UpAndDown):
    """Goes up and down, and writes down what it is told."""

    def __init__(self, note: _Notes, period: int) -> None:
        super().__init__(period)
        self.note = note

    def num_engines(self, pool: Any) -> int:
        """Note the pool."""
        came = [request.id for request in pool.came]
        engines = [_state(engine) for engine in pool.engines]
        self.note(
            "pool",
            (pool.now_s, pool.interval_s, pool.role, pool.num_engines, engines, came, pool.answers),
        )
        return super().num_engines(pool)


def told(number: str) -> dict[str, Any]:
    """Run a drawn fleet; a digest of what was told, how often of what, and what came of it."""
    note = _Notes()
    one = replace(
        combined.drawn_fleet(int(number)),
        make_router=lambda _: _Listening(note),
        make_migrator=lambda: _Moving(note),
        make_autoscaler=lambda period: _Scaling(note, period),
    )
    log = one.run()
    came = combined.digest(log, log.losses, log.transfers, log.moves, log.places)
    return {"told": note.text.hexdigest()[:12], "came": came, "counts": dict(note.count)}


CASES = {f"told of fleet {number}": (told, f"{number}") for number in NUMBERS}
