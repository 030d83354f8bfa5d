"""Python's search for reference cycles, put off while a simulation runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Keep Python from looking for reference cycles.

    Everything is still freed when its last reference goes; only cycles wait. A run makes none for
    each request or step (tests/unit/test_collector.py counts them, by policy), but keeps many
    objects, and each search goes through all of them: with a prefix cache that is most of the
    time of a run. A policy whose own objects form cycles keeps them until its run ends.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
