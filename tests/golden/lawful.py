"""What `schedlab.testing` tries laws on: cases that are drawn, and whatever each law then asks."""

import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from schedlab.policies.continuous_batching import ContinuousBatching
from schedlab.policies.routers.router import Router
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.cost.pricing import Pricing
from schedlab.testing import laws
from schedlab.testing.cases import Case, _smaller, random_cases, smallest
from schedlab.testing.check import raise_first, verdicts
from schedlab.testing.cost_model import COST_MODEL_LAWS, check_cost_model, random_shape
from schedlab.testing.executor import EXECUTOR_LAWS, check_executor
from schedlab.testing.policy import POLICY_LAWS, check_policy
from schedlab.testing.reader import READER_LAWS, check_reader
from schedlab.testing.router import ROUTER_LAWS, check_router, fleet_cases
from schedlab.traces.readers import READERS

_AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2225670,879,55
"""


class _Heard:
    """Keeps what was asked as a digest and a count."""

    def __init__(self) -> None:
        self._text = hashlib.sha256()
        self._count: Counter[str] = Counter()

    def note(self, what: str, *facts: object) -> None:
        self._count[what] += 1
        self._text.update(f"{what} {facts!r}\n".encode())

    def told(self) -> list[Any]:
        return [self._text.hexdigest()[:12], dict(sorted(self._count.items()))]


def drawn(_: str) -> dict[str, Any]:
    """Draw cases and shapes, and make a case smaller as long as it has two long answers."""
    cases, shapes = _Heard(), _Heard()
    for case in (*random_cases(0, 60), *random_cases(7, 20), *fleet_cases(3, 12)):
        names = [(a.request.prefix_hash_ids, a.request.session) for a in case.workload]
        cases.note("case", str(case), names, case.limits.enable_prefix_caching)
    draw = random.Random(5)
    for _ in range(400):
        shapes.note("shape", repr(random_shape(draw)))
    large = max(random_cases(1, 12), key=lambda case: len(case.workload))
    tried: list[int] = []

    def fails(case: Case) -> bool:
        tried.append(len(case.workload))
        return sum(a.output_tokens > 5 for a in case.workload) > 1

    return {
        "cases": cases.told(), "shapes": shapes.told(),
        "smaller": [str(one) for one in _smaller(next(random_cases(2, 1)))][:3],
        "smallest": [str(smallest(large, fails)), len(tried), tried[:9]],
        "never smaller": [len(smallest(large, lambda case: False).workload), len(large.workload)],
    }  # fmt: skip


class _AskedCost(laws.LinearCost):
    def __init__(self, heard: _Heard) -> None:
        super().__init__()
        self._heard = heard

    def step_ns(self, shape: Any, k: int = 1) -> list[int]:
        self._heard.note("step_ns", repr(shape), k)
        return super().step_ns(shape, k)

    def describe(self) -> dict[str, object]:
        self._heard.note("describe")
        return super().describe()


def of_cost_models(law: str) -> list[Any]:
    """Let a law ask a cost model."""
    heard = _Heard()
    check_cost_model(_AskedCost(heard), only=law)
    check_cost_model(_AskedCost(heard), only=law, seed=2, num_shapes=30)
    return heard.told()


class _AskedPolicy(ContinuousBatching):
    """Notes when it plans for whom, and what it hears."""

    def __init__(self, heard: _Heard) -> None:
        super().__init__()
        self._heard = heard

    def plan(self, view: Any, builder: Any) -> Any:
        config = view.config
        self._heard.note(
            "plan", view.now_ns, [s.id for s in view.running], [s.id for s in view.waiting],
            config.fast_forward, config.check_horizon, config.kv_allocator,
        )  # fmt: skip
        return super().plan(view, builder)

    def on_arrival(self, state: Any, now_ns: int) -> None:
        self._heard.note("arrival", state.id, state.request.prompt_tokens, now_ns)

    def on_finish(self, state: Any, now_ns: int) -> None:
        self._heard.note("finish", state.id, state.num_output_tokens, now_ns)


def of_policies(law: str) -> list[Any]:
    """Let a law try a policy."""
    heard = _Heard()
    check_policy(lambda: _AskedPolicy(heard), only=law, num_cases=2)
    check_policy(lambda: _AskedPolicy(heard), only=law, seed=4, num_cases=1)
    return heard.told()


class _AskedRouter(Router):
    looks_at_engines = True

    def __init__(self, heard: _Heard) -> None:
        self._heard = heard

    def route(self, request: Any, engines: Any) -> int:
        seen = [(e.index, e.num_waiting, e.num_running) for e in engines]
        self._heard.note("route", request.id, request.prefix_hash_ids, request.session, seen)
        return self.least([e.num_waiting + e.num_running for e in engines])


class _BlindRouter(_AskedRouter):
    looks_at_engines = False

    def route(self, request: Any, engines: Any) -> int:
        self._heard.note("route", request.id, [e.index for e in engines])
        return int(request.id) % len(engines)


def of_routers(law: str) -> list[Any]:
    """Let a law try a router that looks, and one that does not."""
    heard = _Heard()
    for router in (_AskedRouter, _BlindRouter):
        check_router(lambda router=router: router(heard), only=law, cases=[*fleet_cases(1, 2)])
    return heard.told()


class _AskedExecutor(SimExecutor):
    def __init__(self, heard: _Heard, case: Case) -> None:
        super().__init__(Pricing(case.cost))
        self._heard = heard

    def execute(self, work: Any, max_steps: int, horizon_ns: int) -> Any:
        self._heard.note("execute", work.now_ns, max_steps, horizon_ns, work.shape.num_decodes)
        return super().execute(work, max_steps, horizon_ns)


def of_executors(law: str) -> list[Any]:
    """Let a law try an executor."""
    heard = _Heard()
    check_executor(lambda case: _AskedExecutor(heard, case), only=law, num_cases=2)
    check_executor(lambda case: _AskedExecutor(heard, case), only=law, seed=4, num_cases=1)
    return heard.told()


def of_readers(law: str) -> list[Any]:
    """Let a law try a reader."""
    heard, reader = _Heard(), READERS["azure"]

    def sniff(peek: Any) -> bool:
        heard.note("sniff", peek)
        return reader.sniff(peek)

    def chunks(path: Path, options: Any) -> Iterator[Any]:
        content = path.read_bytes() if path.suffix != ".gz" else path.name
        heard.note("chunks", path.name, content, options)
        yield from reader.chunks(path, options)

    with TemporaryDirectory() as folder:
        sample = Path(folder) / "sample.csv"
        sample.write_text(_AZURE, encoding="utf-8")
        check_reader(reader._replace(sniff=sniff, chunks=chunks), sample, only=law)
    return heard.told()


def broken(_: str) -> dict[str, Any]:
    """Break laws by assertion, by an error of ours and by one of Python; say so."""

    def odd(_: object, case: Case) -> None:
        """Say nothing.

        Or little.
        """
        laws.require(len(case.workload) < 3, "three are too many")

    def crash(_: object, case: Case) -> None:
        """Divide."""
        [1][len(case.workload)]

    def fine(_: object, case: Case) -> None:
        """Do nothing."""

    tried = {"odd": odd, "crash": crash, "fine": fine}
    found = verdicts("a stand-in", None, tried, [*random_cases(0, 6)])
    told = [re.sub(r"lawful.py:\d+", "lawful.py", str(one.broken)).splitlines() for one in found]
    only = verdicts("it", None, tried, [*random_cases(0, 2)], only="fine")
    raise_first(only)
    return {
        "told": told,
        "laws": [[one.law, one.meaning, one.broken is None] for one in (*found, *only)],
    }


_KINDS = {
    "cost models": (of_cost_models, COST_MODEL_LAWS), "policies": (of_policies, POLICY_LAWS),
    "routers": (of_routers, ROUTER_LAWS), "executors": (of_executors, EXECUTOR_LAWS),
    "readers": (of_readers, READER_LAWS),
}  # fmt: skip


def asked_by(kind: str) -> dict[str, Any]:
    """Return what each law of a kind asks."""
    of, known = _KINDS[kind]
    return {law: of(law) for law in known}


CASES = {
    "drawn for laws": (drawn, ""),
    "broken laws": (broken, ""),
    **{f"asked by laws of {kind}": (asked_by, kind) for kind in _KINDS},
}
