"""Checks of a specification against what exists: policies, predictors, models, GPUs, traces."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel, PydanticUserError, TypeAdapter, ValidationError

from schedlab.experiments.specification.arrivals import Arrivals
from schedlab.experiments.specification.cluster import AutoscalerKeys, MigratorKeys
from schedlab.experiments.specification.deployment import deployment
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.key_errors import sentence
from schedlab.experiments.specification.lengths import LengthsSpec
from schedlab.experiments.specification.paths import is_preset, is_published
from schedlab.experiments.specification.pipeline import check_pipeline
from schedlab.experiments.specification.pools import engine_pools, pool_path
from schedlab.experiments.specification.sessions import DurationsSpec, SessionsSpec
from schedlab.experiments.specification.shipped import shipped_frontends, shipped_profiles
from schedlab.experiments.specification.workload import Workload
from schedlab.sim.errors import SpecError, TraceError, look_alike, nearest
from schedlab.sim.files import irregular
from schedlab.sim.yaml_lines import KeyPath

_LENGTHS = ("prompt_tokens", "output_tokens")
_NAMING = {"name", "process", "distribution"}
"""Keys that say whose knobs the others of their section are."""

Fail = Callable[[KeyPath, str], NoReturn]

_PUBLIC_TRACES = {
    "AzureLLMInferenceTrace": "the GitHub repository Azure/AzurePublicDataset, folder data",
    "conversation_trace": "the GitHub repository kvcache-ai/Mooncake, FAST25-release",
    "BurstGPT": "the GitHub repository HPMLL/BurstGPT, folder data or releases",
    "ShareGPT": "the Hugging Face dataset anon8231489123/ShareGPT_Vicuna_unfiltered",
}

PREDICTOR_ADVICE = (
    "add policy.predictor, such as {name: noisy, kendall_tau: 0.6}; with oracle, which knows every "
    "length, a policy looks better than it can be"
)


def check_names(spec: ExperimentSpec, fail: Fail) -> None:
    """Check that everything a specification names exists and takes the knobs it is given.

    Parameters
    ----------
    spec : ExperimentSpec
        A specification that fits the schema.
    fail : callable
        Called with the key at fault and what is wrong with it; must raise.
    """
    from schedlab.sim.hardware.models import model

    try:
        model(spec.model)
    except SpecError as error:
        fail(("model",), str(error))
    _check_engine(spec, fail)
    _check_shared_tier(spec, fail)
    _check_cluster(spec, fail)
    _check_frontend(spec, fail)
    _check_workload(spec, fail)
    _check_trace(spec, fail)


def _check_engine(spec: ExperimentSpec, fail: Fail) -> None:
    """Check what one kind of engine is of."""
    from schedlab.sim.hardware.gpus import gpu
    from schedlab.sim.hardware.memory import check_tensor_parallel
    from schedlab.sim.hardware.models import model
    from schedlab.sim.hardware.stage import stages

    try:
        gpu(spec.hardware)
    except SpecError as error:
        fail(("hardware",), str(error))
    try:
        check_tensor_parallel(model(spec.model), spec.engine.tensor_parallel_size)
    except SpecError as error:
        fail(("engine", "tensor_parallel_size"), str(error))
    try:
        stages(model(spec.model), spec.engine.pipeline_parallel_size)
    except SpecError as error:
        fail(("engine", "pipeline_parallel_size"), str(error))
    _check_cost_model(spec, fail)
    _check_policy(spec, fail)
    _check_speculation(spec, fail)
    check_pipeline(spec, fail)


def _check_speculation(spec: ExperimentSpec, fail: Fail) -> None:
    from schedlab.policies.speculation import registry
    from schedlab.sim.hardware.models import model
    from schedlab.sim.speculation.drafters import draft_model

    asked, path = spec.engine.speculation, ("engine", "speculation")
    if asked is None:
        return
    chosen = asked.draft_length
    try:
        known = list(registry.draft_length_class(chosen.name).knobs())
    except SpecError as error:
        fail((*path, "draft_length", "name"), str(error))
    _check_knobs((*path, "draft_length"), chosen.name, chosen, chosen.knobs, known, fail)
    try:
        registry.make(chosen.name, **chosen.knobs)
    except SpecError as error:
        fail((*path, "draft_length"), str(error))
    if asked.model is not None:
        try:
            draft_model(deployment(spec), model(asked.model))
        except SpecError as error:
            fail((*path, "model"), str(error))
    if asked.method == "ngram" and spec.engine.async_scheduling and spec.backend == "sim":
        profile = spec.engine.profile
        by = f" (profile {profile} switches it on, vLLM with such drafts off)" if profile else ""
        fail(
            ("engine", "async_scheduling"),
            "not with engine.speculation.method ngram, which looks for drafts in what has come "
            f"out and cannot be asked a step ahead; set it to false{by}",
        )
    if asked.acceptance is None and spec.backend == "sim":
        fail(
            path,
            "the simulation does not know which drafts are accepted; say, e.g., acceptance: 0.7",
        )


def _check_shared_tier(spec: ExperimentSpec, fail: Fail) -> None:
    asked = spec.engine.kv_offload
    if asked is None or spec.cluster is not None or spec.engine.data_parallel_size > 1:
        return
    if asked.tiers[-1].shared:
        fail(
            ("engine", "kv_offload", "tiers", len(asked.tiers) - 1, "shared"),
            "there is one engine; set cluster, e.g. cluster=4, or leave it out",
        )


def _check_cluster(spec: ExperimentSpec, fail: Fail) -> None:
    from schedlab.policies.routers import registry as routers

    if spec.cluster is None:
        return
    if spec.backend != "sim":
        fail(("cluster",), "only the simulation has several engines; backend must be sim")
    for name in spec.cluster.pools:
        if not re.fullmatch(r"[\w-]+", name):
            fail(("cluster", "pools"), f"{name!r} is no name: letters, digits, - and _ only")
    try:
        pools = engine_pools(spec)
    except SpecError as error:
        key, _, message = str(error).partition(": ")
        fail(tuple(key.split(".")), message)
    for pool in pools:
        path = pool_path(spec, pool.name)

        def fail_in_pool(key: KeyPath, message: str, path: KeyPath = path) -> NoReturn:
            fail((*path, *key), message)

        if pool.spec.engine.data_parallel_size > 1:
            fail_in_pool(
                ("engine", "data_parallel_size"),
                "must be 1 in a cluster, whose count says how many engines there are (engines that "
                "run every step together have no router but their own)",
            )
        has_stages = pool.spec.engine.pipeline_parallel_size > 1
        if has_stages and pool.role == "prefill" and spec.cluster.link.by_layer:
            fail_in_pool(
                ("engine", "pipeline_parallel_size"),
                "must be 1 with cluster.link.by_layer in a pool of role prefill: when each layer "
                "is computed is not simulated of stages",
            )
        failures = spec.cluster.failures
        if (
            has_stages
            and pool.spec.engine.async_scheduling
            and failures is not None
            and (failures.engines or failures.mtbf_s is not None)
        ):
            fail_in_pool(
                ("engine", "async_scheduling"),
                "must be false with pipeline_parallel_size > 1 and engines that die "
                "(cluster.failures): what is lost of a batch that is planned on is not simulated",
            )
        if path:
            _check_engine(pool.spec, fail_in_pool)
    for key in ("router", "decode_router"):
        chosen, where = getattr(spec.cluster, key), ("cluster", key)
        try:
            cls = routers.router_class(chosen.name)
        except SpecError as error:
            fail((*where, "name"), str(error))
        _check_knobs(where, chosen.name, chosen, chosen.knobs, list(cls.knobs()), fail)
        try:
            routers.make(chosen.name, spec.seed, **chosen.knobs)
        except SpecError as error:
            fail(where, str(error))
        if cls.needs_prediction and spec.policy.predictor is None:
            fail(where, f"{chosen.name} needs predictions; {PREDICTOR_ADVICE}")
    _check_migrator(("cluster", "migration"), spec.cluster.migration, fail)
    _check_autoscaler(("cluster", "autoscaler"), spec.cluster.autoscaler, fail)
    for name, kind in spec.cluster.pools.items():
        _check_autoscaler(("cluster", "pools", name, "autoscaler"), kind.autoscaler, fail)
    if spec.cluster.decode_router.staleness_ms:
        fail(("cluster", "decode_router", "staleness_ms"), "is that of cluster.router")


def _check_migrator(where: KeyPath, chosen: MigratorKeys | None, fail: Fail) -> None:
    from schedlab.policies.migrators import registry as migrators

    if chosen is None:
        return
    try:
        cls = migrators.migrator_class(chosen.name)
    except SpecError as error:
        fail((*where, "name"), str(error))
    _check_knobs(where, chosen.name, chosen, chosen.knobs, list(cls.knobs()), fail)
    try:
        migrators.make(chosen.name, **chosen.knobs)
    except SpecError as error:
        fail(where, str(error))


def _check_autoscaler(where: KeyPath, chosen: AutoscalerKeys | None, fail: Fail) -> None:
    from schedlab.policies.autoscalers import registry as autoscalers

    if chosen is None:
        return
    try:
        cls = autoscalers.autoscaler_class(chosen.name)
    except SpecError as error:
        fail((*where, "name"), str(error))
    _check_knobs(where, chosen.name, chosen, chosen.knobs, list(cls.knobs()), fail)
    try:
        made = autoscalers.make(chosen.name, **chosen.knobs)
    except SpecError as error:
        fail(where, str(error))
    for count in made.counts:
        if not chosen.min <= count <= chosen.max:
            fail(
                where,
                f"{chosen.name} asks for {count} engines: must be between min ({chosen.min}) and "
                f"max ({chosen.max})",
            )


def _check_cost_model(spec: ExperimentSpec, fail: Fail) -> None:
    from schedlab.sim.cost import registry

    chosen, path = spec.cost_model, ("cost_model",)
    profile = chosen.profile
    if profile is not None and not Path(profile).is_dir():
        analytic = [name for name in registry.names() if name not in registry.profile_files()]
        near = nearest(_profile_name(profile), [*analytic, *shipped_profiles()])
        fail(
            path,
            f"{profile} is no profile folder (schedlab calibrate measures one, schedlab profile "
            f"import reads another project's); {near}",
        )
    try:
        name = chosen.name or registry.kind_of(str(profile))
        knobs = registry.knobs(name)
    except SpecError as error:
        fail((*path, "name") if chosen.name else path, str(error))
    _check_knobs(path, name, chosen, chosen.given, list(knobs), fail)
    for knob, value in chosen.knobs.items():
        try:
            TypeAdapter(_kind_of(knobs[knob])).validate_python(value, strict=True)
        except ValidationError as error:
            fail((*path, knob), sentence(error.errors()[0]))
        except (PydanticUserError, NameError):  # of a kind that only the class knows
            pass
    missing = [n for n, p in knobs.items() if p.default is p.empty and n not in chosen.given]
    if missing:
        fail(path, f"{name} needs {missing[0]}")
    if profile is None:  # tables take a while to read; the run does
        try:
            registry.make(name, deployment(spec), **chosen.knobs)
        except SpecError as error:
            fail(path, str(error))


def _kind_of(knob: inspect.Parameter) -> Any:  # noqa: ANN401 - any kind
    """Return what a parameter says it is: anything, where it says nothing."""
    return Any if knob.annotation is knob.empty else knob.annotation


def _check_frontend(spec: ExperimentSpec, fail: Fail) -> None:
    chosen = spec.frontend
    if chosen is None:
        return
    if chosen.file is not None and (told := irregular(Path(chosen.file))):
        fail(("frontend",), told)
    if chosen.file is not None and not Path(chosen.file).is_file():
        hint = nearest(Path(chosen.file).name, shipped_frontends())
        fail(("frontend",), f"no such file: {chosen.file}; {hint}")
    try:
        chosen.frontend()
    except SpecError as error:
        fail(("frontend",), str(error))
    if spec.backend != "sim":
        fail(("frontend",), "only the simulation has one; backend must be sim")
    if spec.workload.max_concurrency is not None:
        fail(
            ("frontend",),
            "not in a closed loop (workload.max_concurrency): when a client has its answer is "
            "told after the run, and not what it sends then",
        )


def _profile_name(path: str) -> str:
    """Return the part of a path that may be meant as the name of a shipped profile."""
    parts = Path(path).parts
    begin = len(parts) - 1 - parts[::-1].index("profiles") if "profiles" in parts else -1
    return "/".join(parts[begin:])


def _check_policy(spec: ExperimentSpec, fail: Fail) -> None:
    from schedlab.policies import registry
    from schedlab.policies.predictors import registry as predictors

    policy, predictor = spec.policy, spec.policy.predictor
    try:
        cls = registry.policy_class(policy.name)
    except SpecError as error:
        fail(("policy", "name"), str(error))
    _check_knobs(("policy",), policy.name, policy, policy.knobs, list(cls.knobs()), fail)
    try:
        made = registry.make(policy.name, **policy.knobs)
    except SpecError as error:
        fail(("policy",), str(error))
    if predictor is None:
        if made.needs_prediction:  # of a wrapper, what it wraps
            fail(("policy",), f"{policy.name} needs predictions; {PREDICTOR_ADVICE}")
        return
    path: KeyPath = ("policy", "predictor")
    try:
        known = list(predictors.predictor_class(predictor.name).knobs())
    except SpecError as error:
        fail((*path, "name"), str(error))
    _check_knobs(path, predictor.name, predictor, predictor.knobs, known, fail)
    try:
        predictors.make(predictor.name, **predictor.knobs)
    except SpecError as error:
        fail(path, str(error))


def _check_knobs(
    path: KeyPath,
    name: str,
    section: BaseModel,
    given: Mapping[str, object],
    known: list[str],
    fail: Fail,
) -> None:
    """Refuse a knob that is not known; the section's own keys may have been meant, too."""
    own = type(section).model_fields.keys() - _NAMING
    for knob in given:
        if knob not in known:
            meant = look_alike(knob, sorted({*own, *known}))
            hint = f"did you mean {meant}?" if meant else nearest(knob, known)
            fail((*path, knob), f"{name} has no such knob; {hint}")


def _check_workload(spec: ExperimentSpec, fail: Fail) -> None:
    from schedlab.traces.arrivals import PROCESSES, process
    from schedlab.traces.durations import DURATIONS
    from schedlab.traces.lengths import LENGTHS
    from schedlab.traces.presets import preset
    from schedlab.traces.readers import reader_of

    workload = spec.workload
    if workload.load_test is not None:
        from schedlab.traces.load_tests import load_test

        try:
            load_test(workload.load_test.file, workload.load_test.run)
        except (SpecError, TraceError) as error:
            fail(("workload", "load_test"), str(error))
    if workload.format != "auto":
        try:
            reader_of(workload.format)
        except TraceError as error:
            fail(("workload", "format"), str(error))
    processes: dict[KeyPath, Arrivals | None] = {("workload", "arrivals"): workload.arrivals}
    places: list[tuple[KeyPath, LengthsSpec | None]] = [
        (("workload", key), getattr(workload, key)) for key in _LENGTHS
    ]
    for name, one in workload.classes.items():
        path: KeyPath = ("workload", "classes", name)
        processes[(*path, "arrivals")] = one.arrivals
        places += [((*path, key), getattr(one, key)) for key in _LENGTHS]
        if one.trace is not None:
            try:
                preset(one.trace)
            except SpecError as error:
                fail((*path, "trace"), f"{error} (a class takes its lengths from a preset)")
    if workload.sessions is not None:
        places += _session_lengths(workload.sessions)
    for path, arrivals in processes.items():
        if arrivals is None:
            continue
        name, knobs = arrivals.process, arrivals.knobs
        known = _parameters(PROCESSES[name]) if name in PROCESSES else []
        _check_knobs(path, name, arrivals, knobs, known, fail)
        if name in PROCESSES:
            try:
                process(name, **knobs)
            except (SpecError, TypeError, ValueError) as error:
                fail(path, str(error))
    for path, lengths in places:
        if lengths is not None:
            _check_distribution(path, lengths, LENGTHS, fail)
    for path, durations in _durations(workload):
        _check_distribution(path, durations, DURATIONS, fail)
    if workload.sessions is not None:
        called = sum(tool.share for tool in workload.sessions.tools.values())
        called += workload.sessions.fan_out.share if workload.sessions.fan_out else 0.0
        if called > 1.0:
            fail(
                ("workload", "sessions"),
                f"the shares of tools and fan_out add up to {called:g}, more than 1",
            )


def _check_distribution(
    path: KeyPath,
    chosen: LengthsSpec | DurationsSpec,
    known: Mapping[str, Callable[..., object]],
    fail: Fail,
) -> None:
    name, knobs = chosen.distribution, chosen.knobs
    if name not in known:
        fail((*path, "distribution"), f"unknown distribution {name!r}; {nearest(name, known)}")
    _check_knobs(path, name, chosen, knobs, _parameters(known[name]), fail)
    try:
        known[name](**knobs)
    except (SpecError, TypeError, ValueError) as error:
        fail(path, str(error))


def _session_lengths(sessions: SessionsSpec) -> list[tuple[KeyPath, LengthsSpec | None]]:
    path: KeyPath = ("workload", "sessions")
    keys = ("turns", "new_tokens", "first_tokens", "output_tokens")
    found: list[tuple[KeyPath, LengthsSpec | None]] = [
        ((*path, key), getattr(sessions, key)) for key in keys
    ]
    found += [((*path, "tools", name, "tokens"), t.tokens) for name, t in sessions.tools.items()]
    if (fan_out := sessions.fan_out) is not None:
        found += [((*path, "fan_out", key), getattr(fan_out, key)) for key in ("width", "tokens")]
    return found


def _durations(workload: Workload) -> list[tuple[KeyPath, DurationsSpec]]:
    found: list[tuple[KeyPath, DurationsSpec]] = []
    if workload.think_s is not None:
        found.append((("workload", "think_s"), workload.think_s))
    if workload.sessions is not None:
        path: KeyPath = ("workload", "sessions")
        found.append(((*path, "think_s"), workload.sessions.think_s))
        for name, tool in workload.sessions.tools.items():
            found.append(((*path, "tools", name, "seconds"), tool.seconds))
    return found


def _parameters(function: Callable[..., object]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "seed"]


def _check_trace(spec: ExperimentSpec, fail: Fail) -> None:
    from schedlab.traces.presets import preset
    from schedlab.traces.published import PUBLISHED, published

    trace = spec.workload.trace
    if trace is None:
        return
    if is_published(trace):
        try:
            published(trace).fetched()
        except TraceError as error:
            fail(("workload", "trace"), str(error))
        return
    if is_preset(trace):
        try:
            preset(trace)
        except SpecError as error:
            fail(
                ("workload", "trace"),
                f"{error}; the path of a file has a folder or a suffix, and schedlab trace fetch "
                "--list shows the traces of others",
            )
        if spec.workload.num_requests is None:
            fail(("workload",), f"num_requests is required with the preset {trace}")
        return
    path = Path(trace)
    if path.is_dir():
        fail(("workload", "trace"), f"{path} is a folder, and a trace is a file")
    if told := irregular(path):
        fail(("workload", "trace"), told)
    if not path.is_file():
        source = next((s for stem, s in _PUBLIC_TRACES.items() if path.name.startswith(stem)), "")
        if unset := re.search(r"\$\{?([A-Za-z_]\w*)", trace):
            fail(("workload", "trace"), f"the environment variable {unset[1]} is not set: {trace}")
        hint = f"; download it from {source} and give its path as workload.trace" if source else ""
        upstream = (one.name for one in PUBLISHED.values() if one.url.endswith(f"/{path.name}"))
        if name := next(upstream, None):
            hint += f", or: schedlab trace fetch {name}, and workload.trace: {name}"
        fail(("workload", "trace"), f"no such file: {path}{hint}")
    if spec.workload.format == "auto":
        state = path.stat()
        if why := _unknown_format(path, state.st_mtime_ns, state.st_size):
            fail(("workload", "trace"), why)


@lru_cache
def _unknown_format(path: Path, _mtime_ns: int, _num_bytes: int) -> str:
    """Say why nothing reads a file; nothing if something does. Known while it stays as it is."""
    from schedlab.traces.readers import detect_format

    try:
        detect_format(path)
    except TraceError as error:
        return str(error)
    return ""
