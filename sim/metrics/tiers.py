"""What is copied to and from memory below the GPU's, what that saves, and who waits for it.

Told of runs whose engines have tiers. Copies for requests count if those are measured, others if
they were issued meanwhile. Bytes are those of one GPU of each engine.
"""

from __future__ import annotations

import numpy as np

from schedlab.sim.errors import SpecError, nearest
from schedlab.sim.metrics.observation import Observation
from schedlab.sim.metrics.registry import register
from schedlab.sim.metrics.weighted import ratio
from schedlab.sim.record.columns import Ints, whole_numbers
from schedlab.sim.record.copies import CopyTable

_NS_PER_S = 1e9


@register(about="tiers", better="higher", label="tokens loaded from tiers")
def tier_hit_tokens(run: Observation, tier: str = "all") -> int:
    """Return the tokens of prefixes that were loaded from a tier, or from all."""
    loads = _copies(run, tier, is_load=1, is_swap=0)
    return int(loads["num_blocks"].sum()) * _block_tokens(run)


@register(about="tiers", better="higher", label="prompt tokens loaded from tiers")
def tier_hit_share(run: Observation, tier: str = "all") -> float:
    """Return the tokens loaded from a tier, or from all, over prompt tokens of requests."""
    return ratio(
        tier_hit_tokens(run, tier), int(whole_numbers(run.requests, "prompt_tokens").sum())
    )


@register(about="tiers", better="neither")
def loaded_bytes(run: Observation, tier: str = "all") -> int:
    """Return the bytes copied from a tier, or from all, towards the GPU."""
    return _bytes(run, tier, is_load=1)


@register(about="tiers", better="neither")
def stored_bytes(run: Observation, tier: str = "all") -> int:
    """Return the bytes copied to a tier, or to all."""
    return _bytes(run, tier, is_load=0)


@register(about="tiers", better="neither", unit="")
def num_waits_for_load(run: Observation) -> int:
    """Return how often a request waited for its KV to be loaded."""
    return len(_load_waits_s(run))


@register(about="tiers", label="mean wait for a load")
def mean_load_wait_s(run: Observation) -> float:
    """Return the mean time from the admission of a request until its KV is loaded."""
    waits_s = _load_waits_s(run)
    return float(waits_s.mean()) if len(waits_s) else float("nan")


@register(about="tiers", label="P99 wait for a load")
def p99_load_wait_s(run: Observation) -> float:
    """Return the 99th percentile of the time from admission until KV is loaded."""
    waits_s = _load_waits_s(run)
    return float(np.percentile(waits_s, 99)) if len(waits_s) else float("nan")


@register(about="tiers", label="steps' wait for copies")
def copy_wait_s(run: Observation) -> float:
    """Return the time that steps waited for blocks that were still being copied away.

    It is part of their time.
    """
    table = run.copy_waits
    return float(table["wait_ns"][_inside(run, table["start_ns"])].sum()) / _NS_PER_S


@register(about="tiers", better="neither")
def tier_peak_share(run: Observation, tier: str = "all") -> float:
    """Return the most that was used of a tier, of the first by default, in any engine.

    As of the copies that were issued: what a request that comes back leaves counts until the next.
    """
    if not run.tiers:
        return float("nan")
    place = _place(run, tier) or 0
    used = _copies(run, run.tiers[place].name)["used_blocks"]
    return ratio(int(used.max(initial=0)), run.tiers[place].num_blocks)


def _place(run: Observation, tier: str) -> int | None:
    names = [facts.name for facts in run.tiers]
    if tier == "all":
        return None
    if tier not in names:
        raise SpecError(f"tier: no {tier!r}; {nearest(tier, names)}")
    return names.index(tier)


def _block_tokens(run: Observation) -> int:
    return run.tiers[0].block_tokens if run.tiers else 0


def _inside(run: Observation, times_ns: Ints) -> np.ndarray:
    if run.window is None:
        return np.ones(len(times_ns), dtype=bool)
    return run.window.holds(times_ns)


def _copies(run: Observation, tier: str, **kind: int) -> CopyTable:
    """Return the copies that are measured, of a tier and of a kind."""
    table = run.copies
    place, ids = _place(run, tier), table["id"]
    chosen = np.isin(ids, whole_numbers(run.requests, "id"))
    chosen |= (ids < 0) & _inside(run, table["issued_ns"])
    if place is not None:
        chosen &= table["tier"] == place
    for name, value in kind.items():
        chosen &= table[name] == value
    return {name: column[chosen] for name, column in table.items()}


def _bytes(run: Observation, tier: str, is_load: int) -> int:
    if not run.tiers:
        return 0
    copies, facts = _copies(run, tier, is_load=is_load), run.tiers[0]
    of_engine = np.array(facts.engine_block_bytes, dtype=np.int64)
    block_bytes = of_engine[copies["engine"]] if len(of_engine) else facts.block_bytes
    return int((copies["num_blocks"] * block_bytes).sum())


def _load_waits_s(run: Observation) -> np.ndarray:
    """Return how long each load took from its issue, all its parts together."""
    loads = _copies(run, "all", is_load=1)
    if not len(loads["id"]):
        return np.zeros(0)
    order = np.lexsort((loads["issued_ns"], loads["id"]))
    ids, issued_ns, done_ns = (loads[name][order] for name in ("id", "issued_ns", "done_ns"))
    new = (ids[1:] != ids[:-1]) | (issued_ns[1:] != issued_ns[:-1])
    first = np.flatnonzero(np.append(True, new))
    return (np.maximum.reduceat(done_ns, first) - issued_ns[first]) / _NS_PER_S
