"""The batches of finished runs, and the serving-time estimator that learns from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from schedlab.policies.predictors.predictor import Floats
from schedlab.policies.predictors.serving_time import ServingTime, logarithms
from schedlab.sim.errors import SpecError
from schedlab.sim.record.columns import completed
from schedlab.sim.rng import stream

NUM_NEIGHBORS = 5
LEAST_BATCHES = 20


@dataclass(frozen=True)
class Batches:
    """Sealed batches that were run.

    Attributes
    ----------
    shape : ndarray of float64, shape (n, 3)
        Requests, longest prompt and largest predicted output, in tokens.
    serving_time_s : ndarray of float64, shape (n,)
        From the first request's seat to the last token.
    num_left_out : int
        Batches in which memory ran out: they were not run as one.
    """

    shape: Floats
    serving_time_s: Floats
    num_left_out: int


def read_batches(folder: Path) -> Batches:
    """Return the batches of a results folder.

    Sealed batches do not overlap, so a batch is whoever is served between two moments at which
    nobody is.

    Parameters
    ----------
    folder : Path
        What ``schedlab run`` wrote for one point of an experiment.

    Raises
    ------
    SpecError
        If the policy does not seal its batches, or there are too few of them.
    SchedlabError
        If the folder holds no result.
    """
    from schedlab.policies.registry import policy_class
    from schedlab.policies.static import Static
    from schedlab.sim.result import RunResult

    result = RunResult.load(folder)
    if not issubclass(policy_class(result.policy), Static):
        raise SpecError(
            f"{folder}: policy {result.policy} does not seal its batches; "
            "serving times are learned from a run of magnus, static or dynamic"
        )
    columns = {name: np.asarray(column) for name, column in result.requests.items()}
    served = completed(columns)
    if not served.any():
        raise SpecError(f"{folder}: 0 whole batches, at least {LEAST_BATCHES} needed")
    start, end = columns["first_scheduled_ns"][served], columns["last_token_ns"][served]
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    busy_until = np.maximum.accumulate(end)
    first = np.flatnonzero(np.r_[True, start[1:] >= busy_until[:-1]])
    prompt = columns["prompt_tokens"][served][order]
    predicted = _predicted(columns, folder)[served][order]
    preempted = np.add.reduceat(columns["num_preemptions"][served][order], first) > 0
    shape = np.column_stack(
        [
            np.diff(np.r_[first, len(start)]),
            np.maximum.reduceat(prompt, first),
            np.maximum.reduceat(predicted, first),
        ]
    ).astype(np.float64)
    time_s = (np.maximum.reduceat(end, first) - start[first]) / 1e9
    whole = ~preempted
    if whole.sum() < LEAST_BATCHES:
        raise SpecError(f"{folder}: {whole.sum()} whole batches, at least {LEAST_BATCHES} needed")
    return Batches(shape[whole], time_s[whole], int(preempted.sum()))


def _predicted(columns: dict[str, npt.NDArray[np.generic]], folder: Path) -> Floats:
    predicted = columns["predicted_tokens"].astype(np.float64)
    if np.isnan(predicted).any():
        raise SpecError(
            f"{folder}: requests carry no prediction, and serving times are told from predicted "
            "lengths; run the experiment with policy.predictor"
        )
    return predicted


def train_serving_time(batches: Batches, rows: npt.NDArray[np.int64]) -> ServingTime:
    """Return the estimator that remembers the batches `rows`."""
    seen = logarithms(batches.shape[rows])
    scale = np.maximum(seen.std(axis=0), 1e-6)
    return ServingTime(seen, scale, batches.serving_time_s[rows], NUM_NEIGHBORS)


def estimates(estimator: ServingTime, shapes: Floats) -> Floats:
    """Return the estimated time of each batch, in seconds."""
    return np.array([estimator.estimate_s(int(n), int(p), float(g)) for n, p, g in shapes])


def split(num_batches: int, share: float, seed: int) -> Sequence[npt.NDArray[np.int64]]:
    """Return rows to learn from and a random share of them all to test on.

    Not by time: the order in which batches are run follows from their lengths.
    """
    order = stream(seed, "split").permutation(num_batches)
    num_tested = max(1, round(share * num_batches))
    return np.sort(order[num_tested:]), np.sort(order[:num_tested])
