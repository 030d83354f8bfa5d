"""Requests of several classes in one workload: tenants with lengths, targets, shared prefixes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from schedlab.sim.errors import TraceError
from schedlab.sim.rng import stream
from schedlab.traces.lengths import Lengths
from schedlab.traces.prefix_hashes import Int64, PrefixHashes
from schedlab.traces.trace import Trace

PREFIX_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficClass:
    """What tells the requests of a class from others; what is absent stays as it is.

    Attributes
    ----------
    share : float
        Weight of the class among all, > 0.
    priority : int or None
        Lower is more urgent.
    ttft_ms, tpot_ms, e2el_ms : float or None
        Latency targets of each request.
    prompt, output : Lengths or None
        Length distributions.
    prefix_tokens : int
        How many of its first prompt tokens a request has in common with its group; a shorter
        prompt has all but its last token in common.
    prefix_groups : int
        Groups, all equally likely.
    """

    share: float = 1.0
    priority: int | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None
    prompt: Lengths | None = None
    output: Lengths | None = None
    prefix_tokens: int = 0
    prefix_groups: int = 1


def in_classes(
    trace: Trace,
    classes: Mapping[str, TrafficClass],
    seed: int = 0,
    which: Int64 | None = None,
) -> Trace:
    """Return the trace with every request in a class, drawn at random by their shares.

    Parameters
    ----------
    trace : Trace
        Arrivals, and what the classes leave open.
    classes : mapping of str to TrafficClass
        By name; the name becomes the request's `tenant`.
    seed : int
        Seed of the experiment. The streams are ``"classes"`` and, for a class C, ``"lengths of C"``
        and ``"prefixes of C"``: the requests of a class do not change when another class does,
        as long as the shares stay.
    which : ndarray of int64, shape (num_requests,), optional
        Class of each request by number, instead of a draw by the shares.

    Returns
    -------
    Trace
        Without prompt texts and without prefix hashes of its own if lengths or shared prefixes are
        drawn; the report says so.

    Raises
    ------
    TraceError
        If there is no class, or a share is not positive.
    """
    if not classes or not all(math.isfinite(c.share) and c.share > 0 for c in classes.values()):
        raise TraceError("traffic classes need shares > 0, and there must be one at least")
    if which is None:
        shares = np.array([c.share for c in classes.values()])
        edges = np.cumsum(shares / shares.sum())[:-1]
        which = np.searchsorted(edges, stream(seed, "classes").random(len(trace)), side="right")
    of_class = {name: np.flatnonzero(which == i) for i, name in enumerate(classes)}
    columns: dict[str, Any] = {"tenant": np.array(list(classes), dtype=object)[which]}
    columns |= {name: getattr(trace, name).copy() for name in ("prompt_tokens", "output_tokens")}
    for name, rows in of_class.items():
        prompt, output = classes[name].prompt, classes[name].output
        if prompt is None and output is None:
            continue
        uniform = stream(seed, f"lengths of {name}").random((len(rows), 2))
        if prompt is not None:
            columns["prompt_tokens"][rows] = prompt(uniform[:, 0])
        if output is not None:
            columns["output_tokens"][rows] = output(uniform[:, 1])
    for column, of, factor in (
        ("priority", "priority", 1), ("slo_ttft_ms", "ttft_ms", 1.0),
        ("slo_tpot_ms", "tpot_ms", 1.0), ("deadline_s", "e2el_ms", 1e-3),
    ):  # fmt: skip
        stated = {name: getattr(c, of) for name, c in classes.items()}
        if any(value is not None for value in stated.values()):
            values = trace.filled(column).copy()
            for name, value in stated.items():
                if value is not None:
                    values[of_class[name]] = value * factor
            columns[column] = values
    counts = ", ".join(f"{name} {len(rows):,}" for name, rows in of_class.items())
    report = trace.report.noted(f"requests in classes: {counts}")
    if any(c.prompt is not None or c.prefix_tokens for c in classes.values()):
        if trace.prefix is not None or trace.prompt is not None:
            report = report.noted("texts and prefix hashes of the trace left out: classes redraw")
        columns |= {"prompt": None, "prefix": None}
        if any(c.prefix_tokens for c in classes.values()):
            columns["prefix"] = _prefixes(classes, of_class, columns["prompt_tokens"], seed)
    return replace(trace, **columns, report=report)


def _prefixes(
    classes: Mapping[str, TrafficClass],
    of_class: Mapping[str, Int64],
    prompt_tokens: Int64,
    seed: int,
) -> PrefixHashes:
    """Return the ids of the blocks that requests have in common with their group, and no others."""
    num_blocks: Int64 = np.zeros(len(prompt_tokens), dtype=np.int64)
    first_id: Int64 = np.zeros(len(prompt_tokens), dtype=np.int64)
    known = 0
    for name, rows in of_class.items():
        one = classes[name]
        blocks = one.prefix_tokens // PREFIX_BLOCK_TOKENS
        groups = stream(seed, f"prefixes of {name}").integers(one.prefix_groups, size=len(rows))
        in_common = np.minimum(one.prefix_tokens, prompt_tokens[rows] - 1)
        num_blocks[rows] = in_common // PREFIX_BLOCK_TOKENS
        first_id[rows] = known + groups * blocks
        known += one.prefix_groups * blocks
    offsets: npt.NDArray[np.int64] = np.zeros(len(prompt_tokens) + 1, dtype=np.int64)
    np.cumsum(num_blocks, out=offsets[1:])
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], num_blocks)
    return PrefixHashes(np.repeat(first_id, num_blocks) + within, offsets, PREFIX_BLOCK_TOKENS)
