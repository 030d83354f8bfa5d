"""Which tests are asked about a mutant, and in what turn."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
# Slow, or about something else than what a simulation gives.
LEFT_OUT = {
    "test_cli_report",
    "test_notebooks",
    "test_plots",
    "test_predictor_training",
    "test_predictors_trained",
    "test_report_page",
    "test_sweeping",
    "test_traces_fetch",
    "test_wheel",
}
# Long simulations, campaigns, and tests of what other processes do, which is not seen: where these
# are slow, they are not run to learn which lines they run.
DEAR = re.compile(
    r"^tests/(theory|torture)/|"
    r"/test_(architecture|cli_start|kernels_compile|notebooks|predictor_training|wheel)\.py"
)
# As `make unit`: files that import nothing but simulator and policies.
_OTHERS = re.compile(r"schedlab\.(experiments|gpu_backend|traces)|notebook")
# Laws of these policies are asked whatever the mutant; and those of the policy it is in.
LAWFUL = ("fcfs", "srtf", "static", "vtc", "sarathi")
LAWS = "tests/property/test_laws.py"
# Unit tests of the module itself that are asked before any table.
NUM_FIRST = 6
OURS = "tests/unit/test_mutants.py"  # names modules, and looks at none
GOLDEN = "tests/golden/test_golden.py"
PACED = "tests/golden/test_paced.py"  # looks at runs of all policies in several ways
# The golden tables that know most of a room: asked before the others, for speed alone.
TABLES = {
    "sim.core": "wild|combined (fcfs|fastserve|hygen|plas|sarathi|vtc)",
    "sim.kv": "wild|combined (fcfs|fastserve|sarathi)",
    "sim.cost": "prices|import",
    "sim.hardware": "memory",
    "sim.drive": "fleet|router|front",
    "sim.record": "fleet|metrics",
    "sim.metrics": "metrics",
    "sim.speculation": "combined (fcfs|sarathi|vtc)",
    "policies.autoscalers": "combined fleets",
    "policies.migrators": "combined fleets",
    "policies.routers": "router|combined fleets",
    "policies.speculation": "combined (fcfs|sarathi|vtc)",
    "policies.predictors": "predictor",
    "experiments.statistics": "verdicts|intervals",
    "experiments.analysis": "compared|figures of runs",
    "experiments.bench": "bench ",
    "experiments.claims": "claim",
    "experiments.commands": "commands ",
    "experiments.comparing": "backends|replay|overheads|compared ",
    "experiments.figures": "figure|backends",
    "experiments.regression": "regression|baseline",
    "experiments.report": "report",
    "experiments.results": "tables|report",
    "experiments.running": "resolved|requests|recommendation",
    "experiments.search": "search|tuning|recommendation|bracket",
    "experiments.specification": "keys|resolved|expanded|refused",
    "experiments.sweeps": "planned|times|tables",
    "experiments.training": "learned",
    "testing": "laws",
    "gpu_backend": "calibration|pools|clocks|sitting|fit|measured|layouts|tiles|samples|benches",
    "traces": "file|arrivals|draw|classes|turns|load tests",
}


class Asked(NamedTuple):
    """Tests of a file.

    Attributes
    ----------
    file : str
        From the root of the repository.
    name : str
        A regular expression that is looked for in their names.
    slow : bool
        Those marked slow; otherwise the others.
    """

    file: str
    name: str = ""
    slow: bool = False


def module_of(path: str) -> str:
    """Return the name of the module in a file, which is given from the root of the repository."""
    dotted = path.removeprefix("schedlab/").removesuffix(".py").replace("/", ".")
    return f"schedlab.{dotted}".removesuffix(".__init__")


def asked_of(module: str, briefly: bool) -> list[Asked]:
    """Return the tests to ask of a module, in turn.

    First unit tests of itself (`NUM_FIRST` files: those that import it and are named after it,
    those that import it, those named after it, or after its package if they mention it; small
    ones first). Then the golden tables of its room, of a policy its small golden runs, and those of
    defaults, then all others that name it, golden, the unit layer, laws. Of what is neither
    simulator nor policy only its own and golden are asked, and so they are of anything `briefly`;
    of a policy then its laws as well, and of anything those of its own that are slow, and the tests
    of modules beside it that import it.
    """
    package, subject = module.split(".")[:2][-1], module.rpartition(".")[2]
    simulates = package in ("sim", "policies")
    beside = _users(module)
    own, related, others = [], [], []
    rooms = ["unit", "property", "theory", "torture"]
    rooms += ["gpu"] if package == "gpu_backend" else []
    for path in sorted(p for room in rooms for p in (ROOT / "tests" / room).glob("test_*.py")):
        text, name = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
        if name in (LAWS, OURS) or (simulates and not briefly and path.stem in LEFT_OUT):
            continue
        mentions = f'"{subject}"' in text
        imports = names(text, module)
        is_named = subject in path.stem or (mentions and package in path.stem)
        is_broad = path.parent.name not in ("unit", "gpu")
        rank = 3 - 2 * imports - is_named
        place = is_broad, rank, len(text), name
        if imports or is_named or mentions:
            own.append(place)
        elif path.parent.name == "unit" and not _OTHERS.search(text):
            others.append(name)
        if any(names(text, user) for user in beside):
            related.append(place)
    own.sort()
    asked = [
        Asked(name) for is_broad, rank, _, name in own[:NUM_FIRST] if rank < 3 and not is_broad
    ]
    asked += [
        one
        for room, table in TABLES.items()
        if module.startswith(f"schedlab.{room}")
        for one in _golden(table)
    ]
    if package == "policies":
        asked += _golden(f"(small_runs.*|combined ){subject}")
    asked += _golden("defaults ")
    asked += [Asked(name) for *_, name in own]
    asked += _golden()
    if simulates and not briefly:
        asked += [Asked(name) for name in (*others, PACED)]
        asked.append(Asked(LAWS, "|".join({*LAWFUL, subject})))
    elif package == "policies":
        asked.append(Asked(LAWS, subject))
    if briefly:
        asked += [Asked(name, slow=True) for *_, name in own]
        asked += [Asked(name, slow=slow) for slow in (False, True) for *_, name in sorted(related)]
    return asked


def _golden(table: str = "") -> list[Asked]:
    return [Asked(GOLDEN, table), Asked(GOLDEN, table, slow=True)]


def names(text: str, module: str) -> bool:
    """Whether a file names a module: whole, or as what it imports from a package."""
    package, _, name = module.rpartition(".")
    imported = rf"from {re.escape(package)} import (\([^)]*|[^(\n]*)\b{name}\b"
    return re.search(rf"{re.escape(module)}\b|{imported}", text) is not None


@cache
def _users(module: str) -> list[str]:
    """Return the modules of its package that name a module."""
    found = []
    for path in sorted((ROOT / module.split(".")[:2][-1]).rglob("*.py")):
        user = module_of(path.relative_to(ROOT).as_posix())
        if user != module and names(path.read_text(encoding="utf-8"), module):
            found.append(user)
    return found


def in_turn(asked: Sequence[Asked], nodes: Mapping[str, bool]) -> list[str]:
    """Return the tests among those collected that are asked for, each once.

    Parameters
    ----------
    asked : sequence of Asked
        What to look for.
    nodes : mapping
        By pytest's name of a test, whether it is slow.
    """
    of_file: dict[str, list[str]] = {}
    for node in nodes:
        of_file.setdefault(node.partition("::")[0], []).append(node)
    found: dict[str, None] = {}
    for one in asked:
        for node in of_file.get(one.file, ()):
            if nodes[node] == one.slow and re.search(one.name, node):
                found.setdefault(node)
    return list(found)
