"""What functions and objects return, asked one by one for small drawn values.

A run asks few of them for what is empty, alone, equal or just at an edge. Here each function whose
parameters can be drawn by their annotations is asked for such values, and so are the methods of
each class, several one after the other; a digest is kept of all that they return, of what they
refuse and in which words of ours, and of what an object says of itself in the end. Nothing is known
here of any of them, so what is new is asked, too.

``python -m tests.golden.called sim.drive.frontend.Frontend`` prints every question and its answer.
"""

import collections.abc as abc
import dataclasses
import dis
import hashlib
import importlib
import inspect
import json
import math
import pkgutil
import random
import re
import signal
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from pydantic import BaseModel, ValidationError

import schedlab.experiments
import schedlab.policies
import schedlab.sim
import schedlab.testing
import schedlab.traces
from schedlab.experiments.running.run import run
from schedlab.experiments.search.bracket import Bracket, Probe
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.loading import make_spec
from schedlab.sim.config import EngineConfig
from schedlab.sim.cost.cost_model import CostModel
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.cost.step_spread import StepSpread
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.gpus import Gpu, gpu
from schedlab.sim.hardware.model_shape import ModelShape
from schedlab.sim.hardware.models import model
from schedlab.sim.metrics.observation import Observation
from schedlab.sim.record.log import REQUEST_COLUMNS
from schedlab.sim.request import Arrival, Request, RequestState, Slo
from schedlab.sim.result import RunResult
from schedlab.traces.prefix_hashes import PrefixHashes
from schedlab.traces.trace import Trace
from tests import laws
from tests.golden import whole
from tests.golden.every_field import EveryField
from tests.golden.rounding import rounded

QUESTIONS = 60
OBJECTS, CALLS = 20, 10
_DEEPEST = 3
_NUMPY = re.compile(r"np\.\w+\(([^()]*)\)")
"""How newer versions of NumPy write a number."""
_LONGEST_S = 5.0
"""CPU seconds for all answers of one function or class; the longest takes a fifth of one."""

_INTS = (0, 0, 1, 1, 2, 3, 4, 5, 7, 8, 16, 50, 100, -1)
_FLOATS = (0.0, 0.0, 0.1, 0.5, 1.0, 1.0, 1.5, 2.0, 3.0, 10.0, 100.0, -1.0)
_TEXTS = ("", "a", "b", "bf16", "fp8", "fp32", "recompute", "1.5", "2 x")
_EXPERIMENTS = (2, 3, 4, 7, 9, 16, 55)
"""Of `whole`, those whose results are asked."""
_PATHS = tuple(Path("/dev/null") / name for name in ("a.csv", "a.jsonl", "b.yaml", "b.json", "c"))
"""Below what is no folder, where nothing can be read or written: names for what is said of files,
and nobody's files."""
_COLUMNS = (
    *REQUEST_COLUMNS, "engine", "micro_batch", "start_ns", "end_ns", "num_decodes",
    "prefill_tokens", "num_prefills", "num_running", "num_waiting", "kv_tokens", "session", "turn",
    "decode_context_sum_tokens", "swapped_bytes", "overhead_ns", "received_ns", "gap_ns", "count",
)  # fmt: skip


class _EndlessError(BaseException):
    """An answer takes longer than any should; no refusal, which is an `Exception`."""


class UndrawableError(Exception):
    """A parameter is of a type that nothing here can draw."""


# -- what is drawn -----------------------------------------------------------------------------


def _request(draw: random.Random) -> Request:
    return _arrival(draw).request


def _arrival(draw: random.Random) -> Arrival:
    prompt, output = draw.choice((1, 4, 7, 16, 33)), draw.choice((1, 2, 5, 9))
    slo = Slo(draw.choice((None, 0.004)), draw.choice((None, 0.0015)), draw.choice((None, 0.05)))
    return laws.arrival(
        draw.randrange(6), draw.choice((0, 400, 1_010, 30_000)), prompt, output,
        tenant=draw.choice("abc"), priority=draw.choice((-1, 0, 2)),
        predicted_tokens=output * draw.choice((0.5, 1.0, 1.3)), slo=draw.choice((None, slo)),
        max_tokens=draw.choice((1 << 20, output, max(output - 1, 1))),
        prefix_hash_ids=tuple(range(draw.choice((0, 40)), 99))[: prompt // 4],
    )  # fmt: skip


def _config(draw: random.Random) -> EngineConfig:
    return EngineConfig(
        num_blocks=draw.choice((30, 40)), max_model_len=100, block_size=4,
        max_num_seqs=draw.choice((1, 3, 5)), max_num_batched_tokens=draw.choice((17, 120)),
        swap_space_blocks=draw.choice((0, 9)), enable_prefix_caching=draw.choice((False, True)),
        watermark=draw.choice((0.0, 0.1)),
    )  # fmt: skip


def _deployment(draw: random.Random) -> Deployment:
    return Deployment(
        _shape(draw), _gpu(draw), tensor_parallel_size=draw.choice((1, 2)),
        pipeline_parallel_size=draw.choice((1, 1, 4)), data_parallel_size=draw.choice((1, 1, 3)),
        kv_cache_dtype=draw.choice(("auto", "fp8")), weight_dtype=draw.choice(("auto", "int4")),
    )  # fmt: skip


def _gpu(draw: random.Random) -> Gpu:
    return gpu(draw.choice(("a100-80gb", "h100-80gb")))


def _shape(draw: random.Random) -> ModelShape:
    return model(draw.choice(("llama-3-8b", "mixtral-8x7b", "opt-13b")))


@cache
def _result(number: int) -> RunResult:
    return run(make_spec(whole.drawn(number)))


@cache
def _observation(number: int) -> Observation:
    return _result(number).observation()


@cache
def _spec(number: int) -> ExperimentSpec:
    return make_spec(whole.drawn(number))


def _anything(draw: random.Random) -> Any:
    return draw.choice((None, True, 0, 3, -1, 0.5, "", "a", [1, 2], {"a": 1}, {"b": "x"}))


def _trace(draw: random.Random) -> Trace:
    """Draw a trace: some with arrivals, tenants, targets and shared beginnings."""
    size = draw.randrange(1, 6)

    def column(*values: Any) -> Any:
        return np.array([draw.choice(values) for _ in range(size)])

    given: dict[str, Any] = {}
    if draw.randrange(2):
        gaps_ns = column(0, 400_000_000, 1_000_000_000, 90_000_000_000)
        given["arrival_ns"] = np.cumsum(gaps_ns)
    if draw.randrange(2):
        given["tenant"] = column("a", "b").astype(object)
    if draw.randrange(2):
        given["priority"] = column(-1, 0, 2)
    if draw.randrange(2):
        rows = [tuple(range(draw.choice((0, 3)), draw.randrange(3, 6))) for _ in range(size)]
        given["prefix"] = PrefixHashes.from_rows(rows, 16)
    prompts = column(1, 16, 40, 33) + 80 * ("prefix" in given)
    return Trace(prompt_tokens=prompts, output_tokens=column(1, 2, 5, 9), **given)


def _probe(draw: random.Random) -> Probe:
    excess = tuple(draw.choice((-0.5, 0.0, 0.25)) for _ in range(draw.randrange(1, 3)))
    return Probe(draw.choice((0.5, 1.0, 2.0, 4.0)), excess)


def _bracket(draw: random.Random) -> Bracket:
    """Draw where a search ended, with what it tried on the way."""
    bound = draw.choice(("", "", "at least", "below", "at most", "above"))
    probes = tuple(_probe(draw) for _ in range(draw.randrange(1, 4)))
    return Bracket(
        draw.choice((0.5, 1.0, 2.0)), draw.choice((0.0, 1.0, 4.0, math.inf)), bound, probes,
        draw.choice((False, True)),
    )  # fmt: skip


def _stints(draw: random.Random) -> Any:
    """Draw who decoded from which step to which, as a log has it."""
    rows = [
        [draw.randrange(4), draw.choice((-1, 5)), first, first + draw.randrange(1, 4)]
        for first in (0, 1, 2, 5)[: draw.randrange(5)]
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


_MADE: dict[Any, Callable[[random.Random], Any]] = {
    Request: _request,
    RequestState: lambda draw: RequestState(_request(draw)),
    Arrival: _arrival,
    EngineConfig: _config,
    Deployment: _deployment,
    Gpu: _gpu,
    ModelShape: _shape,
    CostModel: lambda draw: EveryField(unit_ns=1),
    Observation: lambda draw: _observation(draw.choice(_EXPERIMENTS)),
    RunResult: lambda draw: _result(draw.choice(_EXPERIMENTS)),
    StepSpread: lambda draw: StepSpread((0.5, 1.5), (0.9, 1.0, 1.1), draw.choice((1, 3))),
    Pricing: lambda draw: Pricing(EveryField(unit_ns=1)),
    random.Random: lambda draw: random.Random(draw.randrange(9)),
    np.random.Generator: lambda draw: np.random.default_rng(draw.randrange(9)),
    int: lambda draw: draw.choice(_INTS),
    typing.SupportsIndex: lambda draw: draw.choice(_INTS),
    float: lambda draw: draw.choice(_FLOATS),
    bool: lambda draw: draw.choice((False, True)),
    str: lambda draw: draw.choice(_TEXTS),
    bytes: lambda draw: bytes(draw.randrange(4) for _ in range(draw.randrange(5))),
    type(None): lambda draw: None,
    object: _anything,
    Any: _anything,
    Trace: _trace,
    Bracket: _bracket,
    Path: lambda draw: draw.choice(_PATHS),
    slice: lambda draw: slice(draw.choice((None, 0, 1)), draw.choice((None, 2, 3))),
    BaseException: lambda draw: draw.choice((ValueError, KeyError, OSError))(draw.choice(_TEXTS)),
    ExperimentSpec: lambda draw: _spec(draw.choice(_EXPERIMENTS)),
}
_FOR_CHECKERS: dict[str, Any] = {
    "RunResult": RunResult, "Observation": Observation, "ExperimentSpec": ExperimentSpec,
    "Trace": Trace,
}  # fmt: skip
"""Names that some modules import for type checkers alone."""
_TYPES = ("bf16", "fp8", "int4", "fp32", "auto")
_NAMED: dict[str, Callable[[random.Random], Any]] = {
    "stints": _stints,
    "column": lambda draw: draw.choice(("arrival_ns", "tenant", "priority", "engine", "other")),
    **dict.fromkeys(("dtype", "weight_dtype", "kv_dtype"), lambda draw: draw.choice(_TYPES)),
}
"""By the name of a parameter: what its type does not tell."""
_MANY = {
    list: list, abc.Sequence: list, abc.Iterable: list, abc.Collection: list,
}  # fmt: skip


class _RefusedError(SpecError):
    """What a function raises that is given to say what is wrong, and never to return."""


class _Iterator(list[Any]):
    """An iterator that can be told without using it up."""

    def __next__(self) -> Any:
        if not self:
            raise StopIteration
        return self.pop(0)


def _drawn(kind: Any, draw: random.Random, depth: int = 0) -> Any:
    """Draw a value of an annotated type."""
    if kind in _MADE:
        return _MADE[kind](draw)
    of, args = typing.get_origin(kind), typing.get_args(kind)
    if of in (typing.Union, types.UnionType):
        if "_NestedSequence" in str(kind):  # whatever NumPy makes an array of
            return _array("float", draw)
        return _drawn(
            draw.choice([one for one in args if _is_known(one, depth)] or args), draw, depth
        )
    if of is typing.Literal:
        return draw.choice(args)
    if of is typing.Annotated:
        return _drawn(args[0], draw, depth)
    if of is tuple and Ellipsis not in args:
        return tuple(_drawn(one, draw, depth) for one in args)
    if of is tuple:
        return tuple(_drawn(args[0], draw, depth) for _ in range(draw.randrange(4)))
    if of is abc.Iterator:
        return _Iterator(_drawn(args[0], draw, depth) for _ in range(draw.randrange(4)))
    if of in _MANY:
        return _MANY[of]([_drawn(args[0], draw, depth) for _ in range(draw.randrange(4))])
    if of in (dict, abc.Mapping) and args[0] is str and _is_array(args[1]):
        return _table(draw)
    if of in (dict, abc.Mapping):
        return {_drawn(args[0], draw, depth): _drawn(args[1], draw, depth) for _ in range(2)}
    if _is_array(kind):
        return _array(str(kind), draw)
    if of is abc.Callable:
        return _function(args[-1], draw, depth)
    if inspect.isclass(kind) and kind.__module__.startswith("schedlab.") and depth < _DEEPEST:
        return _made(kind, draw, depth + 1)
    raise UndrawableError(str(kind))


@cache
def _is_known(kind: Any, depth: int) -> bool:
    """Whether a type, of several that a value may have, can be drawn so deep inside others."""
    for seed in range(3):
        try:
            _drawn(kind, random.Random(seed), depth)
        except UndrawableError:
            return False
        except Exception:  # a value that its own class refuses
            continue
    return True


def _is_array(kind: Any) -> bool:
    return typing.get_origin(kind) is np.ndarray or "NDArray" in str(kind)


def _array(kind: str, draw: random.Random) -> Any:
    size = draw.randrange(6)
    if "float" in kind:
        return np.array([draw.choice(_FLOATS) for _ in range(size)], dtype=np.float64)
    if "bool" in kind:
        return np.array([draw.choice((False, True)) for _ in range(size)], dtype=bool)
    values = [draw.choice(_INTS) for _ in range(size)]
    return np.array(sorted(values) if draw.randrange(2) else values, dtype=np.int64)


def _function(kind: Any, draw: random.Random, depth: int) -> Callable[..., Any]:
    """Draw a function: what it returns depends on what it is given, and on nothing else."""
    seed = draw.random()
    if kind is NoReturn:

        def refuses(*args: Any, **named: Any) -> NoReturn:
            raise _RefusedError(f"{_plain(args)} {_plain(named)}")

        return refuses
    _drawn(kind, random.Random(0), depth)  # whether it can be drawn

    def drawn(*args: Any) -> Any:
        return _drawn(kind, random.Random(f"{seed} {_plain(args)}"), depth)

    return drawn


def _table(draw: random.Random) -> dict[str, Any]:
    """Draw a table that has every column of whole numbers, ids in order."""
    size = draw.randrange(5)
    table = {
        name: np.array([draw.choice(_INTS) for _ in range(size)], dtype=np.int64)
        for name in _COLUMNS
    }
    return {**table, "id": np.arange(size)}


def _made(cls: type, draw: random.Random, depth: int) -> Any:
    if inspect.isabstract(cls) or getattr(cls, "_is_protocol", False):
        raise UndrawableError(cls.__name__)
    if issubclass(cls, BaseModel):
        return cls(**_section(cls, draw, depth))
    return cls(**_arguments(_init(cls), draw, depth))


def _section(cls: type[BaseModel], draw: random.Random, depth: int) -> dict[str, Any]:
    """Draw some keys of a section of an experiment."""
    found = {}
    for name, field in cls.model_fields.items():
        if field.is_required() or draw.random() < 0.3:
            with suppress(UndrawableError, ValidationError):
                found[name] = _drawn(field.annotation, draw, depth)
    return found


def _init(cls: type) -> Callable[..., Any]:
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return cls
    init = cls.__new__ if issubclass(cls, tuple) else cls.__init__
    if init is object.__init__ and dataclasses.is_dataclass(cls):
        raise UndrawableError(cls.__name__)
    return init


def _arguments(of: Callable[..., Any], draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """Draw what a function is called with; what has a default is left out now and then."""
    found = {}
    for name, (kind, optional) in _parameters(of).items():
        if not (optional and draw.random() < 0.4):
            named = _NAMED.get(name)
            found[name] = _drawn(kind, draw, depth) if named is None else named(draw)
    return found


@cache
def _parameters(of: Callable[..., Any]) -> dict[str, tuple[Any, bool]]:
    if inspect.isclass(of):  # a tuple with names: its constructor does not know its module
        hints = typing.get_type_hints(of)
        return {name: (hints[name], name in of._field_defaults) for name in of._fields}
    hints = typing.get_type_hints(of, localns=_FOR_CHECKERS)
    return {
        name: (hints[name], one.default is not one.empty)
        for name, one in inspect.signature(of).parameters.items()
        if name not in ("self", "cls", "_cls")
        and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    }


# -- what is asked -----------------------------------------------------------------------------


def _answer(ask: Callable[[], Any]) -> Any:
    try:
        return _plain(ask())
    except UndrawableError:
        raise
    except Exception as error:  # a refusal is an answer
        return _refusal(error)


def _refusal(error: Exception) -> str:
    """Return the type of an error, and its words if they are ours."""
    if isinstance(error, _RefusedError):
        return f"refused: {error}"
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    if at is None or not at.tb_frame.f_globals.get("__name__", "").startswith("schedlab."):
        return type(error).__name__
    # What Python refuses in a line of ours is said in its own words, which change with its version.
    is_raised = at.tb_frame.f_code.co_code[at.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    if not is_raised or error.__cause__ or error.__context__:
        return type(error).__name__
    words = _NUMPY.sub(r"\1", str(error))
    return f"{type(error).__name__}: {words}"


def _plain(value: Any, depth: int = 0) -> Any:
    """Return what can be written of a value, the same in every process."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float | np.floating):
        return rounded(float(value)) if math.isfinite(value) else str(float(value))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, RunResult | Observation):
        return value.name if isinstance(value, RunResult) else value._result.name
    if isinstance(value, bytes | bytearray | memoryview):
        return list(bytes(value))
    if depth > _DEEPEST or isinstance(value, np.random.Generator | random.Random):
        return type(value).__name__
    if isinstance(value, np.ndarray):
        return [_plain(one, depth + 1) for one in value.tolist()]
    if isinstance(value, set | frozenset):
        return sorted((_plain(one, depth + 1) for one in value), key=repr)
    if isinstance(value, abc.Mapping):
        return [[_plain(k, depth + 1), _plain(v, depth + 1)] for k, v in list(value.items())[:99]]
    if isinstance(value, abc.Iterable) and not isinstance(value, type):
        return [_plain(one, depth + 1) for one, _ in zip(value, range(99), strict=False)]
    if callable(value):
        return "callable"
    if not type(value).__module__.startswith(("schedlab.", "tests.")):
        return type(value).__name__  # of another library: what it says differs with its version
    return [type(value).__name__, *_state(value, depth + 1)]


def _state(value: Any, depth: int = 0) -> list[Any]:
    """Return what an object says of itself: its public attributes and properties."""
    names = sorted(name for name in dir(value) if not name.startswith("_"))
    found = []
    for name in names:
        try:
            one = getattr(value, name)
        except Exception as error:  # what it has not worked out yet, for instance
            found.append([name, type(error).__name__])
            continue
        if not callable(one):
            found.append([name, _plain(one, depth + 1)])
    return found


def questions_to_function(of: Callable[..., Any]) -> Iterator[tuple[Any, Any]]:
    """Ask a function time after time; yield what was asked and what was answered."""
    draw = random.Random(f"{of.__module__}.{of.__qualname__}")
    asked = set()
    for _ in range(QUESTIONS):
        given: dict[str, Any] = {}
        try:
            refused = _answer(lambda given=given: given.update(_arguments(of, draw)))
        except UndrawableError:  # this time: one of several types, or too deep inside
            continue
        said = _plain(given)
        if refused is None and repr(said) not in asked:
            asked.add(repr(said))
            yield said, _answer(partial(of, **given))


def questions_to_class(cls: type) -> Iterator[tuple[Any, Any]]:
    """Make objects and call their methods; yield what was asked and what was answered."""
    draw = random.Random(f"{cls.__module__}.{cls.__qualname__}")
    methods = _methods(cls)
    for _ in range(OBJECTS):
        try:
            one = _trace(draw) if cls is Trace else _made(cls, draw, 0)
        except UndrawableError:
            continue
        except Exception as error:
            yield "made", _refusal(error)
            continue
        yield "made", _answer(partial(_state, one))
        for _ in range(CALLS if methods else 0):
            name = draw.choice(methods)
            given: dict[str, Any] = {}
            method = getattr(cls, name)
            try:
                refused = _answer(lambda given=given, of=method: given.update(_arguments(of, draw)))
            except UndrawableError:
                continue
            if refused is None:
                yield [name, _plain(given)], _answer(partial(getattr(one, name), **given))
        yield "in the end", _answer(partial(_state, one))


@cache
def _methods(cls: type) -> list[str]:
    """Return the methods whose parameters can be drawn."""
    return [
        name
        for name in sorted(vars(cls))
        if not name.startswith("_")
        and callable(of := getattr(cls, name))
        and not isinstance(of, type)
        and _can_draw(of)
    ]


def _can_draw(of: Callable[..., Any]) -> bool:
    try:
        for seed in range(8):
            draw = random.Random(seed)
            for kind, _ in _parameters(of).values():
                try:
                    _drawn(kind, draw)
                except UndrawableError:
                    raise
                except Exception:  # a value that its own class refuses
                    continue
    except (UndrawableError, NameError, TypeError, ValueError, KeyError):
        return False
    return True


# -- of whom -----------------------------------------------------------------------------------

_LEFT_OUT = {
    "sim.result.RunResult", "sim.metrics.observation.Observation",  # come from a run alone
    # Of which only newer versions of Python tell the types.
    "sim.metrics.weighted.WeightedSample", "sim.record.columns.LazyTable",
    "sim.record.columns.with_columns", "sim.cost.learning.fit._nearest",
    "sim.metrics.distributions._of_pairs",
    "policies.predictors.sentence_encoder",  # needs more libraries
    "sim.kv.prefix.PrefixCachingKVCache",  # calls in an order that nobody has tear it: endless
    "sim.drive.router._who",  # names objects of any kind by their places in memory
    # Change what the whole process knows.
    "sim.metrics.targets._attainment", "sim.user_modules",
    # Ask networks, clocks, machines, other processes, or libraries that are not everywhere.
    "traces.fetch", "traces.published", "traces.tokenizer",
    "experiments.sweeps.timing.TimeEstimate", "experiments.regression.baseline.version_change",
    "experiments.comparing.comparison_files.to_data", "experiments.specification.shipped",
    "experiments.facade", "experiments.sweeps.workers", "experiments.sweeps.ray_workers",
    "experiments.running.real_backend", "experiments.running.vllm_backend",
    "experiments.running.fence", "experiments.running.point_hash",
    "experiments.running.provenance", "experiments.comparing.machine",
    "experiments.comparing.calibrated_engine", "experiments.comparing.calibrate",
    "experiments.training.network", "experiments.training.trees", "experiments.training.train",
    "experiments.results.results_folder", "experiments.figures.interactive",
    "experiments.comparing.measured_runs.measure",
    "experiments.comparing.measured_runs.steps_at_level",
    "experiments.comparing.frontend_measurement._gaps", "experiments.report.page.render",
    "experiments.sweeps.dry_run.describe_plan", "experiments.sweeps.dry_run.time_point",
    "experiments.sweeps.dry_run._estimate", "experiments.sweeps.dry_run._seconds",
    "experiments.sweeps.jobs.run_job", "experiments.sweeps.jobs.run_elsewhere",
    "experiments.specification.named_files._found", "experiments.claims.quoted.load_quoted",
    # Answers by how deep the checkout and the home folder lie.
    "experiments.specification.named_files._candidates",
    # Say with which versions they ran, or ask for pandas or Arrow.
    "experiments.claims.page.data", "experiments.claims.report.data",
    "experiments.sweeps.store.Store", "experiments.sweeps.sweep_all.plan",
    "experiments.outcomes.Results", "sim.record.saved_log.SavedLog",
    "sim.record.saved_log.read_table", "sim.record.saved_log.write_table",
    "sim.result._whole_table", "sim.cost.learning.tables._parquet",
    "sim.cost.learning.tables._all_reduces", "sim.cost.learning.tables._experts",
    "traces.readers.schedlab._parquet_records",
    # Long runs, of which a digest would say little.
    "experiments.claims.claims.load_claims", "experiments.comparing.compare.compare",
    "experiments.comparing.fitted_profile.save_residuals",
    "experiments.running.run.run", "experiments.running.run._run",
    "experiments.comparing.frontend_measurement._fit",  # SciPy frees memory twice over such values
}  # fmt: skip


@cache
def subjects(room: str) -> dict[str, Any]:
    """Return every function and class of a module that can be asked, by name."""
    module = importlib.import_module(f"schedlab.{room}")
    found: dict[str, Any] = {}
    for name, value in sorted(vars(module).items()):
        if getattr(value, "__module__", "") != module.__name__ or f"{room}.{name}" in _LEFT_OUT:
            continue
        if (inspect.isclass(value) and _can_be_made(value)) or (
            inspect.isroutine(value) and _parameters_known(value) and _can_draw(value)
        ):
            found[name] = value
    return found


def _parameters_known(of: Callable[..., Any]) -> bool:
    try:
        return bool(_parameters(of))
    except (NameError, TypeError, ValueError, KeyError):
        return False


def _can_be_made(cls: type) -> bool:
    if issubclass(cls, BaseException) or inspect.isabstract(cls):
        return False
    if getattr(cls, "_is_protocol", False):
        return False
    try:
        return cls in _MADE or _can_draw(_init(cls))
    except (UndrawableError, NameError, TypeError, ValueError, KeyError):
        return False


def questions(room: str, name: str) -> Iterator[tuple[Any, Any]]:
    """Ask one of `subjects`; yield what was asked and what was answered."""
    of = subjects(room)[name]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield from questions_to_class(of) if inspect.isclass(of) else questions_to_function(of)


def answers(room: str) -> dict[str, str]:
    """Ask all of a module; a digest of the answers of each."""
    return {name: _digest(room, name) for name in subjects(room)}


def _digest(room: str, name: str) -> str:
    """Return a digest of the answers, or that there is no end of them.

    What calls follow each other is drawn, so they may be what nobody asks in that order, and an
    object that they left torn may search for ever.
    """

    def give_up(*_: object) -> NoReturn:
        raise _EndlessError

    before = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, _LONGEST_S)
    try:
        text = json.dumps(list(questions(room, name)))
    except _EndlessError:
        return "endless"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _rooms() -> list[str]:
    every = [
        one.name.removeprefix("schedlab.")
        for room in (
            schedlab.sim,
            schedlab.policies,
            schedlab.testing,
            schedlab.traces,
            schedlab.experiments,
        )
        for one in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")
        if not one.ispkg
    ]
    asked = ("experiments.bench.", "experiments.commands.")  # what prints, or takes time
    return [room for room in every if room not in _LEFT_OUT and not room.startswith(asked)]


CASES = {f"answers of {room}": (answers, room) for room in _rooms()}


def main() -> None:
    """Print what is asked, and every answer."""
    for name in sys.argv[1:]:
        room, _, own = name.rpartition(".")
        for asked, answer in questions(room, own):
            print(json.dumps(asked), "->", json.dumps(answer))


if __name__ == "__main__":
    main()
