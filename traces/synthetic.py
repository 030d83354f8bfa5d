"""Draw a synthetic trace: so many requests, arriving like this, as long as that."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from schedlab.sim.errors import SpecError
from schedlab.sim.rng import stream
from schedlab.traces.arrivals import PIECE_ROWS, Process, all_at_once, next_times, poisson, process
from schedlab.traces.lengths import Int64, LengthPairs, independent
from schedlab.traces.presets import preset as named_preset
from schedlab.traces.read_report import ReadReport
from schedlab.traces.trace import Trace

DEFAULT_PRESET = "azure-conv"


def synthesize(
    num_requests: int,
    *,
    preset: str = DEFAULT_PRESET,
    rate: float | None = None,
    arrivals: Process | None = None,
    lengths: LengthPairs | None = None,
    seed: int = 0,
) -> Trace:
    """Return a trace of `num_requests` requests drawn at random.

    Parameters
    ----------
    num_requests : int
        How many, >= 1. A shorter trace of the same seed is the beginning of a longer one.
    preset : str
        Name in `schedlab.traces.presets.PRESETS`; gives what the other arguments leave open.
    rate : float, optional
        Mean requests a second in place of the preset's, with the preset's kind of arrivals
        (Poisson where the preset sends all at once); ``inf`` sends all at once.
    arrivals : Process, optional
        An arrival process in place of the preset's (see `traces.arrivals`); it has its own rate
        and its own seed.
    lengths : LengthPairs, optional
        Prompt and output lengths in place of the preset's (see `schedlab.traces.lengths`).
    seed : int
        Seed of the experiment; the streams are ``"arrivals"`` and ``"lengths"``.

    Returns
    -------
    Trace
        Its report names preset, source, seed and what the preset leaves out.

    Raises
    ------
    SpecError
        If an argument is out of range, or both `rate` and `arrivals` are given.

    Examples
    --------
    >>> trace = synthesize(1000, preset="fixed", rate=4.0, seed=1)
    >>> len(trace), int(trace.prompt_tokens[0]), int(trace.output_tokens[0])
    (1000, 512, 128)
    """
    if isinstance(num_requests, bool) or not isinstance(num_requests, int) or num_requests < 1:
        raise SpecError(f"num_requests must be a whole number >= 1, got {num_requests!r}")
    if rate is not None and arrivals is not None:
        raise SpecError("give either rate or arrivals: an arrival process has its own rate")
    chosen = named_preset(preset)
    notes = [f"drawn with seed {seed}"]
    if arrivals is None:
        arrivals, told = _preset_arrivals(preset, rate, seed)
        notes.append(told)
    else:
        notes.append("arrivals from the process given")
    if lengths is None:
        lengths = independent(chosen.prompt, chosen.output)
        notes.append(f"lengths of preset {preset}: {chosen.source}")
        notes += chosen.notes
    else:
        notes.append("lengths from the distribution given")
    prompt_tokens, output_tokens = _lengths(lengths, num_requests, seed)
    return Trace(
        arrival_ns=next_times(arrivals, num_requests),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        report=ReadReport(
            format="synthetic",
            rows_read=num_requests,
            time_unit="ns",
            time_zero="the start of the process",
            tokens="drawn",
            notes=tuple(notes),
        ),
    )


def _lengths(draw: LengthPairs, num_requests: int, seed: int) -> tuple[Int64, Int64]:
    """Draw lengths; beside them only a piece is in memory."""
    rng = stream(seed, "lengths")
    prompt_tokens, output_tokens = (np.empty(num_requests, dtype=np.int64) for _ in range(2))
    for low in range(0, num_requests, PIECE_ROWS):
        piece = slice(low, min(low + PIECE_ROWS, num_requests))
        uniform = rng.random((piece.stop - low, 2))
        prompt_tokens[piece], output_tokens[piece] = draw(uniform)
    return prompt_tokens, output_tokens


def _preset_arrivals(name: str, rate: float | None, seed: int) -> tuple[Process, str]:
    """Return the preset's arrival process at the rate asked for, and what to say of it."""
    chosen = named_preset(name)
    if rate is not None and rate == math.inf:
        return all_at_once(), "all requests arrive at once"
    if chosen.process == "all_at_once":
        if rate is None:
            return all_at_once(), "all requests arrive at once"
        return poisson(rate, seed=seed), f"Poisson arrivals, {rate:g} req/s"
    wanted = chosen.rate if rate is None else rate
    parameters: dict[str, Any] = {"rate": wanted, **chosen.parameters}
    told = ", ".join(f"{key} {value:g}" for key, value in parameters.items() if key != "rate")
    told = f"{chosen.process} arrivals, {wanted:g} req/s" + (f" ({told})" if told else "")
    return process(chosen.process, seed=seed, **parameters), told
