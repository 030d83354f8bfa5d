"""How far MC-SF is from the best schedule that knowing everything beforehand would allow.

The model of Jaillet et al. 2025 (arXiv:2502.07115), section 2: time goes in rounds, a request that
starts in round p computes its prompt and first token there, one token in every round after, is
never interrupted, and holds its prompt and its tokens so far in memory. The optimum is an integer
program, solved to the end; the policy runs in the engine, with rounds that all take equally long.

`python -m tests.theory.hindsight_optimum` prints the ratios: for 12 instances of 8 requests,
1.036 on average and 1.080 at worst if all come at once (the paper: 1.005), 1.106 and 1.447 if
one comes a round (the paper: 1.047, with 40 to 60 requests). The fewer the requests, the more it is
worth to know who will come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from schedlab.policies import registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.cost.cost_model import CostModel
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.drive.simulation import simulate
from schedlab.sim.errors import SchedlabError
from schedlab.sim.request import Arrival, Request
from schedlab.sim.rng import stream

ROUND_NS = 1_000_000
NUM_INSTANCES = 12


class Job(NamedTuple):
    """A request: its round of arrival, and its tokens."""

    arrival: int
    prompt: int
    output: int


class Instance(NamedTuple):
    """Requests, and the tokens that memory holds."""

    jobs: tuple[Job, ...]
    memory: int


class EqualRounds(CostModel):
    """A cost model in which every step takes one round."""

    name = "equal rounds"

    def step_ns(self, shape: BatchShape, k: int = 1) -> list[int]:
        """Return k rounds."""
        return [ROUND_NS] * k

    def describe(self) -> dict[str, object]:
        """Return the name."""
        return {"name": self.name}


def synthetic(seed: int, at_once: bool, num_jobs: int) -> Instance:
    """Draw a small instance like those of the paper's section 5.1.

    Parameters
    ----------
    seed : int
        Of the instance.
    at_once : bool
        All arrive in round 0 (the paper's first model), or one a round on average (its second).
    num_jobs : int
        Requests; the paper has 40 to 60, which takes a commercial solver.

    Returns
    -------
    Instance
        Memory is uniform on 20-30 tokens (30-50 in the paper), prompts on 1-5, outputs on 1 to
        what memory leaves, as in the paper.
    """
    rng = stream(seed, "hindsight_optimum")
    memory = int(rng.integers(20, 31))
    gaps = rng.exponential(1.0, num_jobs)
    arrivals = np.zeros(num_jobs) if at_once else np.floor(np.cumsum(gaps))
    jobs = []
    for arrival in arrivals.astype(int).tolist():
        prompt = int(rng.integers(1, 6))
        jobs.append(Job(arrival, prompt, int(rng.integers(1, memory - prompt + 1))))
    return Instance(tuple(jobs), memory)


def least_total_latency(instance: Instance, horizon: int) -> int:
    """Return the least sum over requests of finish - arrival, in rounds.

    Parameters
    ----------
    instance : Instance
        What to schedule.
    horizon : int
        Rounds by which all can be done without losing anything, e.g. when another schedule with
        at most the optimal number of requests left is done.

    Returns
    -------
    int
        Of the integer program over x[i, p], "request i starts in round p": each starts once, and
        in every round the memory of those under way, ``prompt + rounds so far``, fits.

    Raises
    ------
    SchedlabError
        If the solver does not prove an optimum.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    starts = [
        (i, p)
        for i, job in enumerate(instance.jobs)
        for p in range(job.arrival, horizon - job.output + 1)
    ]
    cost = [p + instance.jobs[i].output - instance.jobs[i].arrival for i, p in starts]
    once: list[tuple[int, int, int]] = []
    held: list[tuple[int, int, int]] = []
    for column, (i, p) in enumerate(starts):
        job = instance.jobs[i]
        once.append((1, i, column))
        held += [(job.prompt + n, p + n - 1, column) for n in range(1, job.output + 1)]

    def matrix(entries: Sequence[tuple[int, int, int]], rows: int) -> csr_array:
        values, row, column = zip(*entries, strict=True)
        return csr_array((values, (row, column)), shape=(rows, len(starts)))

    found = milp(
        np.array(cost, dtype=float),
        integrality=np.ones(len(starts)),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(matrix(once, len(instance.jobs)), 1, 1),
            LinearConstraint(matrix(held, horizon), -np.inf, instance.memory),
        ],
        options={"mip_rel_gap": 0.0},
    )
    if found.status != 0:
        raise SchedlabError(f"no optimum within {horizon} rounds: {found.message}")
    return round(float(found.fun))


def total_latency(instance: Instance, policy: str, **knobs: float) -> tuple[int, int]:
    """Return the sum of latencies in rounds under a policy, and the round when all is done.

    Parameters
    ----------
    instance : Instance
        What to schedule; predictions are exact.
    policy : str
        A registered policy.
    **knobs : float
        Its knobs.
    """
    config = EngineConfig(
        num_blocks=instance.memory,
        block_size=1,
        max_model_len=instance.memory,
        max_num_seqs=len(instance.jobs),
    )
    engine = Engine(config, registry.make(policy, **knobs), SimExecutor(Pricing(EqualRounds())))
    arrivals = []
    for i, job in enumerate(instance.jobs):
        at_ns = job.arrival * ROUND_NS
        request = Request(
            i, at_ns, job.prompt, max_tokens=job.output, predicted_tokens=float(job.output)
        )
        arrivals.append(Arrival(request, job.output, at_ns))
    requests = simulate(engine, arrivals).requests()
    latency_ns = int(requests["finish_ns"].sum()) - int(requests["arrival_ns"].sum())
    return latency_ns // ROUND_NS, int(requests["finish_ns"].max()) // ROUND_NS


def ratio(seed: int, at_once: bool, num_jobs: int = 8) -> float:
    """Return the total latency of MC-SF over the least possible one, for a synthetic instance.

    Parameters
    ----------
    seed : int
        Of the instance.
    at_once, num_jobs : bool, int
        See `synthetic`.
    """
    instance = synthetic(seed, at_once, num_jobs)
    reached, done = total_latency(instance, "mc_sf", margin=0.0)
    # Finishing later than a whole working-off after the last arrival cannot pay.
    horizon = max(done, max(j.arrival for j in instance.jobs)) + max(
        j.output for j in instance.jobs
    )
    return reached / least_total_latency(instance, horizon)


def main() -> None:
    """Print mean and worst ratio for both models of arrivals."""
    for at_once, paper in ((True, 1.005), (False, 1.047)):
        ratios = [ratio(seed, at_once) for seed in range(NUM_INSTANCES)]
        print(
            f"{'all at once' if at_once else 'one a round'}: mean {np.mean(ratios):.3f}, "
            f"worst {max(ratios):.3f} over {NUM_INSTANCES} instances (paper: mean {paper})"
        )


if __name__ == "__main__":
    main()
