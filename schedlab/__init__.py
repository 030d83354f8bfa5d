"""A laboratory for LLM-serving request scheduling.

``import schedlab as sl``, then ``sl.run("quickstart")``, ``sl.sweep``, ``sl.find``, ``sl.compare``
and ``sl.load(folder)``; see `schedlab.experiments.facade`.

The packages live at the top of the repository (`sim`, `policies`, `traces`, `gpu_backend`,
`experiments`) and are imported, and installed, as `schedlab.sim` and so on. In a checkout, links
in this folder lead to them, so that every tool that reads source finds what Python imports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from schedlab import core

if TYPE_CHECKING:
    from schedlab.experiments.facade import (
        claims,
        compare,
        find,
        known_policies,
        load,
        load_claims,
        load_measurement,
        measure,
        run,
        spec,
        sweep,
        synthesize,
    )

__all__ = [
    "claims", "compare", "find", "known_policies", "load", "load_claims", "load_measurement",
    "measure", "run", "spec", "sweep", "synthesize",
]  # fmt: skip

core.choose()


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a function, or the version
    """Return what takes long to import on demand: a short command needs none of it."""
    if name == "__version__":
        from importlib import metadata

        return metadata.version("schedlab")
    if name in __all__:
        from schedlab.experiments import facade

        return getattr(facade, name)
    raise AttributeError(f"module 'schedlab' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return what there is, for completion."""
    return sorted([*globals(), *__all__])
