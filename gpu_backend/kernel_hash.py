"""Which kernels a measurement is of."""

from __future__ import annotations

import hashlib
from pathlib import Path


def kernel_hash(device: str = "cuda") -> str:
    """Return a hash of the source that runs on a device: measurements are of it and no other.

    Parameters
    ----------
    device : str
        ``cuda...``: the Triton kernels and their launchers; ``cpu``: the torch operations.
    """
    here = Path(__file__).parent
    if device == "cpu":
        paths = [here / "cpu_ops.py"]
    else:
        paths = [*sorted((here / "kernels").glob("*.py")), here / "triton_ops.py"]
    digest = hashlib.sha256()
    for path in [*paths, here / "model.py"]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
