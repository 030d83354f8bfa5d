"""Numbers so that they are the same on any machine, and digests of many."""

import hashlib
import json
from typing import Any

import numpy as np


def rounded(value: Any) -> Any:
    """Round to nine digits: functions of numpy differ in the sixteenth from machine to machine.

    What rounding left of nothing, as in the deviation of a constant, is nothing.
    """
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    if isinstance(value, float | np.floating):
        return f"{0.0 if abs(value) < 1e-14 else value:.9g}"
    return int(value) if isinstance(value, np.integer) else value


def json_digest(value: Any) -> str:
    """Return a digest of a value as JSON."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]
