"""What a policy of the user's may do to a run: raise, exit or never end, each told as its fault."""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, FunctionType

from schedlab.policies.policy import Policy
from schedlab.sim.environment import environment_number
from schedlab.sim.errors import PolicyError, SchedlabError, described

_OURS = str(Path(__file__).resolve().parents[2])

LIMIT_S = 60.0
"""Longest time that one call into a policy may take, unless ``SCHEDLAB_PLAN_LIMIT_S`` says more."""


class _TooLong(BaseException):
    """Passes by everything that catches exceptions on its way out of the policy."""


@contextmanager
def fenced(policy: type[Policy]) -> Iterator[None]:
    """Tell whatever the code of a policy does to a run as an error that names policy and line.

    Parameters
    ----------
    policy : type of Policy
        Whose code is watched; that of its bases counts as its own.

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
    members = (member for cls in policy.__mro__ for member in vars(cls).values())
    files = {one.__code__.co_filename for one in members if isinstance(one, FunctionType)}
    caller = sys._getframe(2)
    with _watched(files, caller, _limit_s()):
        try:
            yield
        except (SchedlabError, KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)
            inside = [frame for frame in frames if frame.filename in files]
            terminated = isinstance(error, SystemExit) and frames[-1].filename.startswith(_OURS)
            if not inside or terminated:
                raise
            at = inside[-1]
            did = str(error) if isinstance(error, _TooLong) else f"raised {described(error)}"
            raise PolicyError(
                f"policy {policy.__name__}: {at.name}() {did} "
                f"({Path(at.filename).name}:{at.lineno})"
            ) from error


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
    signal.setitimer(signal.ITIMER_REAL, limit_s / 2, limit_s / 2)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
