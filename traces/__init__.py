"""Workloads: traces of real services, and generators of synthetic ones."""

from schedlab.traces.presets import PRESETS
from schedlab.traces.published import PUBLISHED
from schedlab.traces.readers import READERS, detect_format, read, stream
from schedlab.traces.readers.reader import Reader, ReadOptions
from schedlab.traces.synthetic import synthesize
from schedlab.traces.trace import Trace
from schedlab.traces.workload import workload
from schedlab.traces.writer import write

__all__ = [
    "PRESETS",
    "PUBLISHED",
    "READERS",
    "ReadOptions",
    "Reader",
    "Trace",
    "detect_format",
    "read",
    "stream",
    "synthesize",
    "workload",
    "write",
]
