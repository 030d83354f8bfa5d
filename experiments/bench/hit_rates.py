"""Hit rates of prefix caches behind routers: ``python -m schedlab.experiments.bench.hit_rates``.

The requests of a trace at its own times, on fleets of several sizes. Beside the rates stand the
bounds of any router in front of caches that evict nothing: see `bounds`.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from schedlab.experiments.running.fleet import resolve_fleet
from schedlab.experiments.running.run import run
from schedlab.experiments.running.workload import load_workload
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.fields import Data
from schedlab.experiments.specification.loading import make_spec
from schedlab.sim.request import Request
from schedlab.sim.text import markdown_table
from schedlab.traces.workload import workload

FLEETS = (1, 4, 16)
ROUTERS: dict[str, str | Data] = {
    "random": "random",
    "round_robin": "round_robin",
    "least_outstanding_requests": "least_outstanding_requests",
    "prefix_aware": "prefix_aware",
    "prefix_aware, precise": {"name": "prefix_aware", "precise": True},
    "llm_d": "llm_d",
    "llm_d, precise": {"name": "llm_d", "precise": True},
    "preble": "preble",
    "lmetric": "lmetric",
    "dynamo": "dynamo",
}
_BLOCK_TOKENS = 512
_UNBOUNDED_BLOCKS = 2_000_000


def bounds(requests: Iterable[Request], num_engines: int, block_size: int) -> tuple[int, int]:
    """Return the least and the most prompt tokens that caches without eviction can hit.

    Parameters
    ----------
    requests : iterable of Request
        In order; each is computed before the next one comes.
    num_engines : int
        Engines with a cache each; whichever serves which request.
    block_size : int
        Tokens of a block.

    Returns
    -------
    least, most : int
        A block can be found if its prompt has a token behind it. An engine misses a name once, then
        has it: of the times that a name can be found all are hits but one for each engine, which is
        the least (nobody shares); and the first one ever is a miss wherever it goes, which is the
        most (all share one cache). With one engine the two are the same number.
    """
    least = most = 0
    times: Counter[int] = Counter()  # that a name could have been found
    seen: set[int] = set()
    for request in requests:
        ids = request.prefix_hash_ids
        for name in ids[: (request.prompt_tokens - 1) // block_size]:
            most += name in seen
            times[name] += 1
        seen.update(ids)
    least = sum(max(count - num_engines, 0) for count in times.values())
    return least * block_size, most * block_size


def fleet(
    trace: Path, num_requests: int, num_engines: int, router: str | Data, *, evicts: bool
) -> ExperimentSpec:
    """Return an experiment with the first requests of a trace, at its times, on a fleet.

    Parameters
    ----------
    trace : Path
        A trace whose prompts have names of blocks.
    num_requests : int
        Its first so many.
    num_engines : int
        Engines that share them.
    router : str or mapping
        As the key of a cluster.
    evicts : bool
        Whether caches are as large as the memory of an H100 leaves room for, and not unbounded.
    """
    engine: dict[str, Any] = {
        "enable_prefix_caching": True, "block_size": _BLOCK_TOKENS, "max_model_len": 131_072,
    }  # fmt: skip
    if not evicts:
        engine["num_gpu_blocks_override"] = _UNBOUNDED_BLOCKS
    return make_spec(
        {
            "name": "hit-rates", "model": "llama-3.1-8b", "hardware": "h100-80gb",
            "engine": engine,
            "workload": {"trace": str(trace), "num_requests": num_requests},
            "cluster": {"count": num_engines, "router": router},
        }
    )  # fmt: skip


def requests_of(spec: ExperimentSpec) -> list[Request]:
    """Return the requests of an experiment, in order."""
    config = resolve_fleet(spec)[0].point.config
    trace = load_workload(spec, config.max_model_len)
    return [one.request for one in workload(trace, max_model_len=config.max_model_len)]


def table(
    trace: Path, num_requests: int, fleets: Sequence[int], routers: Mapping[str, str | Data]
) -> list[str]:
    """Return the hit rates of some routers before fleets of some sizes as Markdown.

    Parameters
    ----------
    trace, num_requests
        As for `fleet`.
    fleets : sequence of int
        Engines of each.
    routers : mapping of str to object
        Name to the key of a cluster.
    """
    requests = requests_of(fleet(trace, num_requests, 1, "random", evicts=False))
    total = sum(request.prompt_tokens for request in requests)
    ends = [bounds(requests, num, _BLOCK_TOKENS) for num in fleets]
    rows = [
        ["*nobody shares*", *(f"{least / total:.1%}" for least, _ in ends), *[""] * len(fleets)]
    ]
    for name, router in routers.items():
        shares = [  # of all prompts, as the bounds are: also of those that were turned away
            run(fleet(trace, num_requests, num, router, evicts=evicts))
            .requests["prefix_hit_tokens"]
            .sum()
            / total
            for evicts in (False, True)
            for num in fleets
        ]
        rows.append([name, *(f"{share:.1%}" for share in shares)])
        print(name, *rows[-1][1:], file=sys.stderr, flush=True)
    rows.append(["*all share*", *(f"{most / total:.1%}" for _, most in ends), *[""] * len(fleets)])
    header = ("router", *(f"{n}, unbounded" for n in fleets), *(f"{n}" for n in fleets))
    return markdown_table(header, rows, right=range(1, len(header)))


def main(argv: list[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description="Hit rates of prefix caches behind routers.")
    parser.add_argument("trace", type=Path, help="a trace with names of blocks, e.g. Mooncake's")
    parser.add_argument("--num-requests", type=int, default=2000)
    parser.add_argument("--engines", type=int, nargs="+", default=FLEETS)
    parser.add_argument("--routers", nargs="+", choices=list(ROUTERS), default=list(ROUTERS))
    options = parser.parse_args(argv)
    routers = {name: ROUTERS[name] for name in options.routers}
    print("\n".join(table(options.trace, options.num_requests, options.engines, routers)))


if __name__ == "__main__":
    main()
