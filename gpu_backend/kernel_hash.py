"""Which kernels a measurement is of."""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path


def kernel_hash(device: str = "cuda") -> str:
    """Return a hash of the code that runs on a device: measurements are of it and no other.

    Parameters
    ----------
    device : str
        ``cuda...``: the Triton kernels and their launchers; ``cpu``: the torch operations.

    Notes
    -----
    Docstrings, comments, blank lines and imports are not in it: a measurement stays valid when
    they change.
    """
    here = Path(__file__).parent
    if device == "cpu":
        paths = [here / "cpu_ops.py"]
    else:
        paths = [*sorted((here / "kernels").glob("*.py")), here / "triton_ops.py"]
    digest = hashlib.sha256()
    for path in [*paths, here / "model.py"]:
        code = _code(path.read_text(encoding="utf-8"))
        digest.update(path.name.encode() + b"\0" + code.encode())
    return digest.hexdigest()[:16]


def _code(source: str) -> str:
    """Return the lines of a module that do something."""
    idle: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom) or _is_text(node):
            assert isinstance(node, ast.stmt)
            idle.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return "\n".join(
        line.rstrip()
        for number, line in enumerate(source.splitlines(), start=1)
        if number not in idle and line.strip() and not line.lstrip().startswith("#")
    )


def _is_text(node: ast.AST) -> bool:
    """Whether a statement is nothing but a string: a docstring."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
