"""Run one point of an experiment: the function that everything else calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from schedlab.experiments.running.backend import Backend, Task, open_backend
from schedlab.experiments.running.fence import fenced
from schedlab.experiments.running.fleet import Kind, engine_facts, resolve_fleet
from schedlab.experiments.running.point_hash import own_classes, own_parts
from schedlab.experiments.running.prediction import Predictions, predictions
from schedlab.experiments.running.provenance import provenance
from schedlab.experiments.running.resolved import Resolved
from schedlab.experiments.running.session_workload import require_sessions_possible
from schedlab.experiments.running.trial import Watched, try_policy
from schedlab.experiments.running.workload import load_workload
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.paths import relative_paths
from schedlab.experiments.specification.targets import check_targets
from schedlab.policies import registry
from schedlab.sim.core.plan_log import RecordedStep
from schedlab.sim.cost.cost_model import CostModel
from schedlab.sim.cost.limits import check_limits
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.errors import SpecError
from schedlab.sim.metrics.window import measured_window
from schedlab.sim.record.cluster_log import ClusterLog
from schedlab.sim.record.columns import (
    Column,
    Columns,
    Floats,
    Read,
    batches,
    held,
    pairs,
    whole_numbers,
    with_columns,
)
from schedlab.sim.record.copies import TierFacts, of_engines
from schedlab.sim.record.log import RunLog
from schedlab.sim.request import Arrival, Slo
from schedlab.sim.result import RunResult
from schedlab.sim.user_modules import import_own
from schedlab.sim.yaml_lines import KeyPath, dotted
from schedlab.traces.read_report import ReadReport
from schedlab.traces.trace import Text, Trace
from schedlab.traces.turns import session_starts
from schedlab.traces.workload import workload

if TYPE_CHECKING:
    from schedlab.experiments.running.backend import Log

Progress = Callable[[int, int], None]
"""Called with the number of requests finished and the number in all."""


def run(
    spec: ExperimentSpec,
    progress: Progress | None = None,
    record: list[RecordedStep] | None = None,
    opened: Callable[[Pricing], Backend] | None = None,
    cost_model: CostModel | None = None,
) -> RunResult:
    """Run one experiment, without sweep or replications, on the backend it names.

    On the simulated backend it is a pure function of the specification and of the files it
    names: the same input gives the same bytes.

    Parameters
    ----------
    spec : ExperimentSpec
        One point; see `schedlab.experiments.specification.sweep.points`.
    progress : callable, optional
        Told now and then how many requests are done.
    record : list, optional
        Filled with every step's decision and time; the run is then stepped one by one.
    opened : callable, optional
        Opens another backend than the specification's, e.g. one that goes by a recording.
    cost_model : CostModel, optional
        Prices steps instead of the specification's, e.g. a profile at the level of another time;
        the result says which did.

    Returns
    -------
    RunResult
        Requests, steps, metrics and provenance.

    Raises
    ------
    SpecError, TraceError
        If the specification or its trace is wrong, or the real backend cannot run here.
    PolicyError, Stalled
        If the policy misbehaves.
    """
    if spec.sweep or spec.replications > 1:
        raise SpecError("run() takes one point: expand the sweep with specification.sweep.points")
    kinds = resolve_fleet(spec, cost_model)
    policies = (registry.policy_class(kind.point.spec.policy.name) for kind in kinds)
    classes: dict[str, type] = {f"policy {cls.__name__}": cls for cls in policies}
    watched = set(classes.values())
    for path in own_classes(own_parts(spec)):
        module, _, name = path.partition(":")
        cls = getattr(import_own(module), name)
        if cls not in watched:
            classes[path] = cls
    with fenced(classes):
        return _run(spec, kinds, progress, record, opened)


def _run(
    spec: ExperimentSpec,
    kinds: Sequence[Kind],
    progress: Progress | None,
    record: list[RecordedStep] | None,
    opened: Callable[[Pricing], Backend] | None,
) -> RunResult:
    point, pricing = kinds[0].point, kinds[0].pricing
    trace = checked_workload(spec, min(kind.point.config.max_model_len for kind in kinds))
    prediction = predictions(spec, trace)
    arrivals = partial(_arrivals, kinds, trace, prediction)
    backend = open_backend(spec, kinds) if opened is None else opened(pricing)
    for kind in kinds:
        if _is_to_be_tried(kind.point.spec):
            _try(kind.point, arrivals)
    tell = None if progress is None else _reporter(progress, len(trace))
    strangers = _strangers(spec)
    num_watched = spec.engine.trial_requests if strangers else 0
    watched = Watched(arrivals(), num_watched, strangers)
    served = backend.serve(Task(spec, kinds, iter(watched), tell, record))
    watched.check()
    log = served.log
    described = backend.describe()
    if described is None:
        _check_limits(kinds, log)
    requests = log.requests()
    if point.frontend is not None:
        seen = point.frontend.columns(requests, pairs(log.token_counts()))
        requests = with_columns(requests, {name: held(column) for name, column in seen.items()})
    requests = with_columns(requests, _origins(requests, trace))
    places = log.places if isinstance(log, ClusterLog) else ()
    window = None
    if spec.measure is not None and not spec.measure.leaves_all:
        window = measured_window(requests, **spec.measure.model_dump())
    return RunResult(
        name=spec.name,
        policy=spec.policy.name,
        requests=requests,
        log=log,
        window=window,
        kv_capacity_tokens=point.config.num_blocks * point.config.block_size,
        num_engines=len(places) or sum(kind.num_engines for kind in kinds),
        engines=() if spec.cluster is None else engine_facts(kinds, places),
        **_copies(kinds, log),
        drafts=served.drafts,
        reject_reasons=log.reject_reasons,
        provenance={
            **provenance(spec, kinds),
            "real": relative_paths(described),
            "workload": _source(trace.report),
            "prediction": None if prediction is None else relative_paths(prediction.provenance),
            "num_plans": served.num_plans,
            "num_steps": log.num_steps,
            "extrapolated_steps": sum(kind.pricing.extrapolated_steps for kind in kinds),
            "extrapolated_by_feature": _by_feature(kinds),
        },
    )


def checked_workload(spec: ExperimentSpec, max_model_len: int) -> Trace:
    """Return the requests of one point, looked at beside what is to be done with them.

    Parameters
    ----------
    spec : ExperimentSpec
        One point.
    max_model_len : int
        Most tokens of a request.

    Raises
    ------
    SpecError
        If they have no targets, or are of sessions, where that does not go, or if nothing of them
        would be measured.
    TraceError
        As `load_workload`.
    """
    trace = load_workload(spec, max_model_len)
    check_targets(spec, trace.columns(), _refuse)
    if trace.turns is not None:
        require_sessions_possible(spec)
    elif spec.measure is not None and spec.workload.max_concurrency is None:
        times_ns = trace.require_arrivals()
        cut = spec.measure.model_dump()
        measured_window({"arrival_ns": times_ns, "finish_ns": times_ns}, **cut)
    return trace


def _source(report: ReadReport) -> list[str]:
    """Return what is told of where the workload comes from."""
    if report.path is not None:
        report = replace(report, path=str(relative_paths(report.path)))
    return report.lines()


def _copies(kinds: Sequence[Kind], log: Log) -> dict[str, Any]:
    """Return what a result says of tiers, those of the first kind of engines; nothing without."""
    config = kinds[0].point.config
    if not config.kv_tiers:
        return {}
    of_engine: tuple[int, ...] = ()
    if isinstance(log, ClusterLog):
        each = [kinds[place.pool] for place in log.places]
        each = each or [kind for kind in kinds for _ in range(kind.num_engines)]
        of_engine = tuple(kind.point.config.kv_block_bytes for kind in each)
        logs = [one.copies for one in log.of_engines]
        copies = of_engines([one.columns() for one in logs], log.engines)
        waits = of_engines([one.wait_columns() for one in logs], log.engines)
    else:
        assert isinstance(log, RunLog)
        copies, waits = log.copies.columns(), log.copies.wait_columns()
    return {
        "tiers": tuple(
            TierFacts(
                tier.name,
                tier.num_blocks,
                config.kv_block_bytes,
                config.block_size,
                of_engine if len(set(of_engine)) > 1 else (),
            )
            for tier in config.kv_tiers
        ),
        "copies": copies,
        "copy_waits": waits,
    }


def _refuse(path: KeyPath, message: str) -> NoReturn:
    raise SpecError(f"{dotted(path)}: {message}")


def _by_feature(kinds: Sequence[Kind]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for kind in kinds:
        for feature, count in kind.pricing.extrapolated_by_feature.items():
            counts[feature] = counts.get(feature, 0) + count
    return counts


def _arrivals(
    kinds: Sequence[Kind], trace: Trace, prediction: Predictions | None
) -> Iterable[Arrival]:
    point = kinds[0].point
    slo = point.spec.slo
    targets = Slo(slo.ttft_ms, slo.tpot_ms, slo.e2el_ms)
    delay_s = np.zeros(len(trace)) if prediction is None else prediction.delay_s
    if point.frontend is not None:
        arrival_ns = trace.require_arrivals()
        received_ns = point.frontend.received_ns(arrival_ns, trace.prompt_tokens)
        delay_s = delay_s + (received_ns - arrival_ns) / 1e9
    return workload(
        trace,
        max_model_len=min(kind.point.config.max_model_len for kind in kinds),
        predicted_tokens=None if prediction is None else prediction.predicted_tokens,
        predictor_latency_s=delay_s,
        refinements=None if prediction is None else prediction.refinements,
        predicted_session_tokens=_of_sessions(trace, prediction),
        slo=targets if targets != (None, None, None) else None,
        hash_block_tokens=next(
            (k.point.config.block_size for k in kinds if k.point.config.enable_prefix_caching), None
        ),
    )


def _of_sessions(trace: Trace, prediction: Predictions | None) -> Floats | None:
    """Return what is predicted of each request's session: of all its requests together."""
    if trace.turns is None or trace.session is None or prediction is None:
        return None
    starts = session_starts(trace.session)
    totals = np.add.reduceat(prediction.predicted_tokens, starts)
    return np.repeat(totals, np.diff(np.append(starts, len(trace))))


def _origins(requests: Columns, trace: Trace) -> dict[str, Read]:
    """Return where each request comes from, as far as the trace says; empty where it does not."""
    rows = whole_numbers(requests, "id")

    def reader(told: Text) -> Read:
        def read(start: int, stop: int) -> Column:
            some = told[rows[start:stop]]
            return np.where(some == None, "", some).astype(str)  # noqa: E711

        return read

    columns = {name: getattr(trace, name) for name in ("tenant", "application", "session")}
    found = {name: reader(told) for name, told in columns.items() if told is not None}
    if trace.turns is not None:
        turns = trace.turns
        found["turn"] = held(turns.numbers()[rows])
        found["delay_ns"] = held(turns.delay_ns[rows])
        if turns.tool is not None:
            found["tool"] = reader(turns.tool)
    return found


def _is_to_be_tried(spec: ExperimentSpec) -> bool:
    """Whether the policy is a stranger's."""
    return ":" in spec.policy.name and spec.engine.trial_requests > 0


def _strangers(spec: ExperimentSpec) -> list[str]:
    """Return the classes of strangers that requests are shown to, beside the policy."""
    drafts = spec.engine.speculation
    parts = (None if part is None else part.model_dump() for part in (spec.cluster, drafts))
    return list(own_classes(list(parts)))


def _try(point: Resolved, arrivals: Callable[[], Iterable[Arrival]]) -> None:
    spec = point.spec
    try_policy(
        spec.policy.name,
        partial(registry.make, spec.policy.name, **spec.policy.knobs),
        lambda: point.simulated_gpu(Pricing(point.cost_model, point.overhead)),
        point.config,
        arrivals,
        spec.engine.trial_requests,
        spec.workload.max_concurrency,
    )


def _check_limits(kinds: Sequence[Kind], log: Log) -> None:
    """Refuse a profile that is faster than its device; a nominal CPU has no datasheet."""
    of_engine = [pool for pool, kind in enumerate(kinds) for _ in range(kind.num_engines)]
    for pool, kind in enumerate(kinds):
        point = kind.point
        own = log
        if isinstance(log, ClusterLog):
            pools = [place.pool for place in log.places] or of_engine
            logs = zip(log.of_engines, log.engines, strict=True)
            own = ClusterLog([one for one, engine in logs if pools[engine] == pool])
        if point.cost_model.is_measured and point.deployment.gpu.name != "cpu":
            chosen = point.spec.cost_model
            for steps in batches(own.steps()):
                check_limits(steps, point.deployment, str(chosen.profile or chosen.name))


def _reporter(progress: Progress, num_requests: int) -> Callable[[int], None]:
    shown = 0

    def report(done: int) -> None:
        nonlocal shown
        if done - shown >= 200 or done == num_requests:
            shown = done
            progress(done, num_requests)

    return report
