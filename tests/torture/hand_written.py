"""Files and policies that people get wrong, or that somebody wrote to do harm."""

from collections.abc import Iterator

from tests.torture.odd_values import SMALL
from tests.torture.sandbox import REFUSED, Case

_POLICY = """\
import random
import sys
from schedlab.policies.fcfs import FirstComeFirstServed


class P(FirstComeFirstServed):
"""

_MODULES = {
    "import_exits": "import sys\nsys.exit(7)\n",
    "import_raises": "raise BaseException('x')\n",
    "not_python": "def\n",
    "no_class": "",
}

_BODIES = {
    "init_raises": "def __init__(self): raise RuntimeError('boom')",
    "init_exits": "def __init__(self): exit(3)",
    "plan_exits": "def plan(self, view, builder): exit()",
    "plan_hangs": "def plan(self, view, builder):\n        while True: pass",
    "plan_waits_for_ever": "def plan(self, view, builder):\n"
    "        return builder.build(until_ns=view.now_ns + 1)",
    "plan_waits_a_part": "def plan(self, view, builder):\n"
    "        return builder.build(until_ns=view.now_ns + 1.5)",
    "plan_waits_text": "def plan(self, view, builder): return builder.build(until_ns='x')",
    "plan_returns_none": "def plan(self, view, builder): return None",
    "key_raises": "def key(self, state, now_ns): raise RuntimeError('boom')",
    "key_hangs": "def key(self, state, now_ns):\n        while True: pass",
    "key_exits": "def key(self, state, now_ns): sys.exit()",
    "key_looks_ahead": "def key(self, state, now_ns): return state.request.output_tokens",
    "key_is_missing_prediction": "def key(self, state, now_ns):\n"
    "        return state.request.predicted_tokens + 1",
    "on_start_raises": "def on_start(self, view): raise RuntimeError('boom')",
    "on_start_writes": "def on_start(self, view): view.foo = 1",
    "on_arrival_raises": "def on_arrival(self, state, now_ns): raise RuntimeError('boom')",
    "on_arrival_takes_nothing": "def on_arrival(self): pass",
    "on_arrival_is_a_number": "on_arrival = 1",
    "on_tokens_raises": "def on_tokens(self, plan, num_steps, now_ns): raise RuntimeError('boom')",
    "on_finish_exits": "def on_finish(self, state, now_ns): exit()",
    "knobs_is_a_number": "knobs = 12",
    "changes_a_request": "def on_arrival(self, state, now_ns): state.request.prompt_tokens = 1",
    "pads_less_than_nothing": "def plan(self, view, builder):\n"
    "        builder.pad(-5)\n        return super().plan(view, builder)",
    "rejects_with_an_object": "def plan(self, view, builder):\n"
    "        for state in list(view.waiting): builder.reject(state, object())\n"
    "        return builder.build()",
    "preempts_somehow": "def plan(self, view, builder):\n"
    "        for state in view.running: builder.preempt(state, 'somehow')\n"
    "        return super().plan(view, builder)",
}

_BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)

_FILES: dict[str, str | bytes] = {
    "alias_bomb": _BOMB,
    "deep_list": "[" * 100_000,
    "deep_mapping": "{a: " * 50_000,
    "nul_in_name": f'{SMALL}name: "a\\0b"\n',
    "dots_as_name": f'{SMALL}name: ".."\n',
    "long_name": f'{SMALL}name: "{"a" * 300}"\n',
    "latin_1": SMALL.encode() + b"# \xff\n",
    "huge": b"#" + b"x" * (70 << 20),
    "many_sweep_values": f"{SMALL}sweep: {{seed: [{','.join(map(str, range(20_000)))}]}}\n",
    "many_replications": f"{SMALL}replications: 1000000000\n",
    "empty": "",
    "tab": "\tname: 1\n",
    "two_documents": f"{SMALL}---\na: 1\n",
    "python_tag": "a: !!python/object:os.system x\n",
    "number_as_key": "1: 2\n",
    "control_character": "a: \x01\n",
    "half_a_surrogate": f'{SMALL}name: "\\ud800"\n',
    "extends_a_device": "extends: /dev/zero\n",
}

_ARRIVALS = {
    "rate_beyond_floats": "poisson, rate: 1.0e-300",
    "rate_beyond_clocks": "poisson, rate: 1.0e-12",
    "bursts_of_nothing": "on_off, rate: 1, mean_on_s: 1.0e-300, mean_off_s: 1.0e-300",
    "bursts_too_short": "on_off, rate: 1.0e-9, mean_on_s: 0.001, mean_off_s: 0.001",
    "drifts_too_slowly": "varying, rate: 1.0e-9",
    "drifts_too_far": "varying, rate: 1, sigma: 1.0e+9",
}


# What is given up after a hundred thousand or ten million turns is given up sooner, or
# these cases would take longer than all others together.
_SHORT_LIMITS = """
import os
from schedlab.sim.core import engine
from schedlab.traces import arrivals
os.environ['SCHEDLAB_PLAN_LIMIT_S'] = '0.3'
engine.MOST_WAITS = 2_000
arrivals._MOST_SEGMENTS = 200_000
"""


def policy_cases() -> Iterator[tuple[str, Case]]:
    """Run experiments with a policy that misbehaves."""
    modules = _MODULES | {name: f"{_POLICY}    {body}\n" for name, body in _BODIES.items()}
    for name, source in modules.items():
        files = {"s.yaml": SMALL, f"p_{name}.py": source}
        run = ["run", "s.yaml", f"policy=p_{name}:P", "-q", "-o", "out"]
        yield (
            f"policy {name}",
            Case(run, files, [f"p_{name}", "policy P"], _SHORT_LIMITS, ends=[REFUSED]),
        )


def file_cases() -> Iterator[tuple[str, Case]]:
    """Run experiment files that are none."""
    for name, content in _FILES.items():
        yield (
            f"file {name}",
            Case(["run", "s.yaml", "-q"], {"s.yaml": content}, ["s.yaml"], ends=[REFUSED]),
        )
    for name, process in _ARRIVALS.items():
        content = SMALL.replace("request_rate: 4", f"arrivals: {{process: {process}}}")
        yield (
            f"arrivals {name}",
            Case(
                ["run", "s.yaml", "-q"], {"s.yaml": content}, ["s.yaml"], _SHORT_LIMITS,
                ends=[REFUSED],
            ),
        )  # fmt: skip
    pipe = "import os\nos.mkfifo('s.yaml')"
    yield "file pipe", Case(["run", "s.yaml", "-q"], {}, ["s.yaml"], pipe, ends=[REFUSED])
    yield "file device", Case(["run", "/dev/zero", "-q"], {}, ["/dev/zero"], ends=[REFUSED])


def environment_cases() -> Iterator[tuple[str, Case]]:
    """Run with variables that mean nothing."""
    odd = {
        "SOURCE_DATE_EPOCH": ("yesterday", "-99999999999999999999", "9" * 30),
        "SCHEDLAB_PLAN_LIMIT_S": ("soon", "-1", "nan"),
        "SCHEDLAB_MAX_TEXT_MIB": ("much", "0", "inf"),
    }
    for variable, values in odd.items():
        for value in values:
            change = f"import os\nos.environ[{variable!r}] = {value!r}"
            run = ["run", "s.yaml", "-q", "-o", "out"]
            case = Case(run, {"s.yaml": SMALL}, [variable], change, ends=[REFUSED])
            yield f"{variable}={value}", case


def command_cases() -> Iterator[tuple[str, Case]]:
    """Ask commands for what makes no sense, or would never end."""
    run = ("run", "s.yaml", "-q", "-o", "out")
    disaggregated = "pools: {p: {count: 1, role: prefill}, d: {count: 1, role: decode}}"
    asked = {
        "recommend without a model": (("recommend",), "--model"),
        "check what is not there": (("check", "nope:Nope"), "nope"),
        "plot what is not there": (("plot", "nope"), "nope"),
        "tune a key without a number": (
            ("tune", "s.yaml", "-q", "-o", "out", "tune={maximize: slo_attainment, "
             "over: {policy.nope: [1, 2]}}"),
            "policy.nope",
        ),
        "find without bounds": (("find", "s.yaml", "find=max slo_attainment"), "find"),
        "predictor of no module": ((*run, "policy={name: sjf, predictor: nope:Nope}"), "nope"),
        "predictor of another kind": ((*run, "policy={name: sjf, predictor: os:path}"), "os"),
        "fleet of a number": ((*run, "cluster={pools: {a: 1}}"), "cluster.pools.a"),
        "fleet of nobody": ((*run, "cluster={count: 0}"), "cluster.count"),
        "fleet too large": ((*run, "cluster={count: 1000000000}"), "cluster.count"),
        "fleet that only decodes": (
            (*run, "cluster={pools: {d: {count: 1, role: decode}}}"), "cluster"
        ),
        "prompts kept by a number that is none": (
            (*run, f"cluster={{{disaggregated}, local: {{max_queued_tokens: .nan}}}}"), "cluster"
        ),
        "sessions of a number": ((*run, "workload.sessions=1000000"), "workload"),
        "device that is a file without end": ((*run, "real.device=/dev/zero"), "/dev/zero"),
        "autoscaler of no name": ((*run, "cluster={count: 1, autoscaler: {name: nope}}"), "nope"),
    }  # fmt: skip
    for name, (argv, named) in asked.items():
        yield f"command {name}", Case(argv, {"s.yaml": SMALL}, [named], ends=[REFUSED])
