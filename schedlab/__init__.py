"""A laboratory for LLM-serving request scheduling.

The packages live at the top of the repository (`sim`, `policies`, `traces`, `gpu_backend`,
`experiments`) and are imported, and installed, as `schedlab.sim` and so on. In a checkout, links
in this folder lead to them, so that every tool that reads source finds what Python imports.
"""

from schedlab import core

core.choose()


def __getattr__(name: str) -> str:
    """Return the version on demand: reading package metadata takes as long as a short command."""
    if name == "__version__":
        from importlib import metadata

        return metadata.version("schedlab")
    raise AttributeError(f"module 'schedlab' has no attribute {name!r}")
