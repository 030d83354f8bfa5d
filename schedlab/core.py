"""Which core runs: the Python source, or the extension modules that mypyc makes of it.

The source defines the results; what is compiled of it gives the same bytes, sooner. Compiled
modules lie in the folder `compiled`, which `python -m schedlab.build_core` fills and a wheel for a
platform brings along. They are used if they fit this Python and are made of the source as it is
now; the environment variable SCHEDLAB_CORE says otherwise: ``python`` never uses them,
``compiled`` is an error without them.
"""

from __future__ import annotations

import os
import sys
import warnings
import zlib
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

GROUP = "schedlab_core__mypyc"
"""The module that holds the code of all others."""

MODULES = (
    "sim.config",
    "sim.core.decode_batch", "sim.core.departures", "sim.core.engine", "sim.core.executor",
    "sim.core.intake", "sim.core.lifecycle", "sim.core.micro_batch", "sim.core.pipeline",
    "sim.core.pipeline_executor", "sim.core.pipelined_engine", "sim.core.plan",
    "sim.core.plan_builder", "sim.core.population", "sim.core.reception",
    "sim.core.speculative_batch", "sim.core.speculative_executor", "sim.core.step",
    "sim.core.step_ledger", "sim.core.tiering", "sim.core.track", "sim.core.view",
    "sim.core.waiting_queue",
    "sim.cost.kernel_times", "sim.cost.pricing", "sim.cost.product", "sim.cost.segment",
    "sim.cost.shape", "sim.cost.stages",
    "sim.drive.arrivals", "sim.drive.clock", "sim.drive.engine_state", "sim.drive.fleet",
    "sim.drive.members", "sim.drive.offer", "sim.drive.router", "sim.drive.server",
    "sim.drive.simulation", "sim.drive.tournament",
    "sim.kv.contiguous", "sim.kv.free_queue", "sim.kv.ledger", "sim.kv.paged", "sim.kv.prefix",
    "sim.kv.prefix_index", "sim.kv.prompt", "sim.kv.tier",
    "sim.record.log", "sim.record.rows", "sim.record.segment_row",
    "sim.request",
    "sim.speculation.acceptance", "sim.speculation.drafters",
    "policies.attained_service", "policies.credits", "policies.deadlines", "policies.feedback",
    "policies.last_moment", "policies.preemption", "policies.rank_loop",
    "policies.routers.block_index", "policies.routers.prefix_tree",
    "policies.segment_choice", "policies.segments", "policies.serving_loop",
    "policies.shared_steps", "policies.slack_loop", "policies.step_load",
    "policies.tenant_service", "policies.virtual_batch",
    "traces.rows",
)  # fmt: skip
"""What is compiled, below `schedlab`: what runs once a plan, or once a request."""

FOLDER = Path(__file__).with_name("compiled")
MANIFEST = "manifest.txt"
"""In the folder: who compiled, then a checksum and a name a module."""

_CHOICES = ("auto", "python", "compiled")


class _Finder:
    """Finds the compiled modules before their source."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        short = name.removeprefix("schedlab.")
        if name == GROUP or (short != name and short in MODULES):
            return spec_from_file_location(name, library(name))
        return None


_running = "python"


def running() -> str:
    """Return which core runs: ``python``, or ``compiled`` and by what."""
    return _running


def library(name: str) -> Path:
    """Return where the compiled module of a full name lies, or would lie, for this Python."""
    return FOLDER / f"{name}{EXTENSION_SUFFIXES[0]}"


def source(module: str) -> Path:
    """Return the source of one of `MODULES`, in a checkout that of the folder at its top."""
    inside = Path(__file__).parent.joinpath(*module.split(".")).with_suffix(".py")
    at_top = Path(__file__).parents[1].joinpath(*module.split(".")).with_suffix(".py")
    return inside if inside.exists() else at_top


def checksum(module: str) -> str:
    """Return what tells two versions of a module's source apart."""
    return f"{zlib.crc32(source(module).read_bytes()):08x}"


def why_not() -> str | None:
    """Say why the compiled core cannot run, None if it can."""
    manifest = FOLDER / MANIFEST
    if not manifest.exists():
        is_checkout = Path(__file__).parents[1].joinpath("Makefile").exists()
        return "it is not built; run: make core" if is_checkout else "this wheel brings none"
    if not library(GROUP).exists():
        return f"it is built for another Python, not {sys.implementation.cache_tag}"
    gone = [name for name in MODULES if not library(f"schedlab.{name}").exists()]
    if gone:
        return f"{', '.join(gone[:3])} of it are gone; run: make core"
    made_of: dict[str, str] = {}
    for line in manifest.read_text(encoding="utf-8").splitlines()[1:]:
        made, module = line.split()
        made_of[module] = made
    changed = [name for name in MODULES if made_of.get(name) != checksum(name)]
    if changed or len(made_of) != len(MODULES):
        return (
            f"it is not made of {', '.join(changed[:3]) or 'these modules'} as now; run: make core"
        )
    return None


def choose() -> None:
    """Decide which core runs, before any module of it is imported.

    Raises
    ------
    ImportError
        If SCHEDLAB_CORE asks for what is not there, or for what nobody knows.
    """
    global _running
    asked = os.environ.get("SCHEDLAB_CORE", "auto")
    if asked not in _CHOICES:
        raise ImportError(f"SCHEDLAB_CORE is {asked!r}, expected one of {', '.join(_CHOICES)}")
    if asked == "python" or (asked == "auto" and not FOLDER.exists()):
        return
    reason = why_not()
    if reason is None:
        sys.meta_path.insert(0, _Finder())
        by = (FOLDER / MANIFEST).read_text(encoding="utf-8").splitlines()[0]
        _running = f"compiled ({by})"
    elif asked == "compiled":
        raise ImportError(f"SCHEDLAB_CORE is 'compiled', but of the compiled core: {reason}")
    else:
        warnings.warn(
            f"the Python core runs, not the compiled one: {reason}", RuntimeWarning, stacklevel=2
        )


def use_python() -> None:
    """Let the Python core run in this process, whatever is built.

    For who gives the core objects of other classes than its own, which compiled code refuses.

    Raises
    ------
    ImportError
        If a part of the compiled core was imported before.
    """
    global _running
    if _running == "python":
        return
    if any(f"schedlab.{module}" in sys.modules for module in MODULES):
        raise ImportError("the compiled core runs already; start Python with SCHEDLAB_CORE=python")
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    _running = "python"
