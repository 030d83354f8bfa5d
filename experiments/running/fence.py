"""What code of the user's may do to a run: raise, exit or never end, each told as its fault."""

from __future__ import annotations

import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, FunctionType

from schedlab.sim.environment import environment_number
from schedlab.sim.errors import PolicyError, SchedlabError, described

_OURS = str(Path(__file__).resolve().parents[2])

LIMIT_S = 60.0
"""Longest time that a call into such code may take, unless ``SCHEDLAB_PLAN_LIMIT_S`` says more."""


class _TooLong(BaseException):
    """Passes by everything that catches exceptions on its way out of the code."""


@contextmanager
def fenced(classes: Mapping[str, type]) -> Iterator[None]:
    """Tell whatever the code of some classes does to a run as an error that names class and line.

    Parameters
    ----------
    classes : mapping of str to type
        Whose code is watched, policies and all else that runs in the midst of a run, by what a
        message calls them; that of their bases counts as their own.

    Raises
    ------
    PolicyError
        If a call into it raises (also SystemExit and GeneratorExit), or does not come back within
        `LIMIT_S`. Nothing is limited where a debugger is at work, outside the main thread, and
        where there are no timers.
    SpecError
        If ``SCHEDLAB_PLAN_LIMIT_S`` is no number of seconds.
    """
    # By the code itself: a class typed into a notebook has no source file.
    codes = {name: list(_codes(cls)) for name, cls in classes.items()}
    files = {code.co_filename for own in codes.values() for code in own}
    caller = sys._getframe(2)
    with _watched(files, caller, _limit_s()):
        try:
            yield
        except (SchedlabError, KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:
            frames = [
                (frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)
            ]
            inside = [(code, line) for code, line in frames if code.co_filename in files]
            last = frames[-1][0].co_filename
            terminated = isinstance(error, SystemExit) and last.startswith(_OURS)
            if not inside or terminated:
                raise
            code, line = inside[-1]
            did = str(error) if isinstance(error, _TooLong) else f"raised {described(error)}"
            raise PolicyError(
                f"{_owner([code for code, _ in inside], codes)}: {code.co_name}() {did} "
                f"({Path(code.co_filename).name}:{line})"
            ) from error


def _codes(cls: type) -> Iterator[CodeType]:
    members = (member for base in cls.__mro__ for member in vars(base).values())
    return (one.__code__ for one in members if isinstance(one, FunctionType))


def _owner(inside: list[CodeType], codes: Mapping[str, list[CodeType]]) -> str:
    """Return whose method was called, or else who lies in the same file."""
    for name, own in codes.items():
        if any(code in own for code in inside):
            return name
    file = inside[-1].co_filename
    return next(name for name, own in codes.items() if file in {one.co_filename for one in own})


def _limit_s() -> float:
    return environment_number(
        "SCHEDLAB_PLAN_LIMIT_S", LIMIT_S, "seconds, 0 for no limit", lambda s: 0 <= s < 1e9
    )


@contextmanager
def _watched(files: set[str], caller: FrameType, limit_s: float) -> Iterator[None]:
    """Look now and then whether the same call into `files` is still under way.

    That costs a run nothing, unlike a timer set for every call.
    """
    can = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if not (can and limit_s and sys.gettrace() is None):
        yield
        return
    call: FrameType | None = None
    times_seen = 0

    def look(number: int, frame: FrameType | None) -> None:
        nonlocal call, times_seen
        outermost = None
        while frame is not None and frame is not caller:
            if frame.f_code.co_filename in files:
                outermost = frame
            frame = frame.f_back
        times_seen = times_seen + 1 if outermost is call else 1
        call = outermost
        if call is not None and times_seen > 2:
            raise _TooLong(
                f"has run for more than {limit_s:g} s; SCHEDLAB_PLAN_LIMIT_S raises the limit"
            )

    before = signal.signal(signal.SIGALRM, look)
    timer = signal.setitimer(signal.ITIMER_REAL, limit_s / 2, limit_s / 2)
    begun_s = time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if timer[0]:  # a caller's own, e.g. that of pytest-timeout: due when it would have been
            left_s = timer[0] - (time.monotonic() - begun_s)
            signal.setitimer(signal.ITIMER_REAL, max(left_s, 1e-6), timer[1])
