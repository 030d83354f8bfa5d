"""Workloads: traces of real services, and generators of synthetic ones."""

from traces.presets import PRESETS
from traces.published import PUBLISHED
from traces.readers import READERS, detect_format, read, stream
from traces.synthetic import synthesize
from traces.trace import Trace
from traces.workload import workload
from traces.writer import write

__all__ = [
    "PRESETS",
    "PUBLISHED",
    "READERS",
    "Trace",
    "detect_format",
    "read",
    "stream",
    "synthesize",
    "workload",
    "write",
]
