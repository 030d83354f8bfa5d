"""What is taken where nobody says anything: every default of a function, and every constant.

Knobs of policies and fields of an engine are in `pinned.defaults`, as registries give them.
"""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from schedlab.core import MODULES

# Compiled functions tell no defaults; what needs Triton or vLLM is not everywhere, and the package
# for vLLM can only be imported where the Python core runs.
_NEEDS = re.compile(r"^\s*(import|from) (schedlab\.gpu_backend\.)?(triton|kernels|vllm)", re.M)
ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    "sim", "traces", "experiments", "schedlab/testing", "policies/autoscalers",
    "policies/migrators", "policies/predictors", "policies/routers", "policies/speculation",
)  # fmt: skip


def defaults(folder: str) -> dict[str, dict[str, str]]:
    """Return by file what its functions, classes and constants say of numbers and flags."""
    found = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        inside = path.relative_to(ROOT).as_posix().removeprefix("schedlab/")
        name = inside.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        is_for_vllm = name.startswith("gpu_backend.vllm")
        if name in MODULES or is_for_vllm or _NEEDS.search(path.read_text(encoding="utf-8")):
            continue
        if said := dict(_of(importlib.import_module(f"schedlab.{name}"))):
            found[path.relative_to(ROOT / folder).as_posix()] = said
    return found


def _of(module: ModuleType) -> Iterator[tuple[str, str]]:
    for name, value in vars(module).items():
        if name.startswith("__") or name == "TYPE_CHECKING":
            continue
        if getattr(value, "__module__", None) == module.__name__:
            if inspect.isclass(value):
                for method, called in vars(value).items():
                    if method in ("__init__", "__new__") or not method.startswith(("__", "_is_")):
                        yield from _said(f"{name}.{method}", called)
            else:
                yield from _said(name, value)
        elif name.lstrip("_").isupper():
            yield from _said(name, value)


def _said(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield a number, or those among the defaults of a function."""
    if _is_number(value):
        yield name, repr(value)
    elif inspect.isfunction(value):
        for parameter in inspect.signature(value).parameters.values():
            if _is_number(parameter.default):
                yield f"{name}({parameter.name})", repr(parameter.default)


def _is_number(value: Any) -> bool:
    if type(value) is tuple:
        return any(map(_is_number, value))
    return type(value) in (bool, int, float)


CASES = {f"defaults of {folder}": (defaults, folder) for folder in FOLDERS}
