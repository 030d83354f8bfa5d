"""Several workers on one folder, interleaved operation by operation, from a seed.

Each worker is a process of its own as far as files can tell: it has a number of its own, dies
without cleaning up, and what it was writing then is torn. All run in threads of this process of
which one has the baton; it gives it away before each of its operations on files below a folder, so
that the same seed gives the same history. Only the operations are real.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_OPERATIONS = {
    "open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "os.link",
    "os.truncate",
}  # fmt: skip
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_FIRST_NUMBER = 5_000_000  # above what Linux gives


class _Killed(BaseException):
    """What ends a worker that was killed: none of its operations is done any more."""


@dataclass(eq=False)
class _Worker:
    name: str
    work: Callable[[], object]
    number: int
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    is_dead: bool = False
    has_ended: bool = False
    error: BaseException | None = None
    writing: Path | None = None


@dataclass
class History:
    """What came of some workers.

    Attributes
    ----------
    operations : list of str
        Every operation on a file: who, what, which.
    num_kills : int
        Workers that were killed, and begun again.
    errors : list of (str, BaseException)
        Workers that ended by an exception, and which.
    """

    operations: list[str] = field(default_factory=list)
    num_kills: int = 0
    errors: list[tuple[str, BaseException]] = field(default_factory=list)


class World:
    """A folder and the workers on it.

    Parameters
    ----------
    root : Path
        Operations on files below it are interleaved.
    seed : int
        Of who is next, and who is killed.
    kill : float
        Chance that a worker is killed before an operation.
    after_operation : callable, optional
        Called between operations, with nobody at work; raises if a law is broken.
    """

    def __init__(
        self, root: Path, seed: int, kill: float, after_operation: Callable[[], None] | None = None
    ) -> None:
        self.root = root.resolve()
        self.history = History()
        self._draw = random.Random(seed)
        self._kill = kill
        self._after_operation = after_operation
        self._is_over = threading.Semaphore(0)
        self._living: list[_Worker] = []
        self._num_started = 0
        self._of_thread: dict[int, _Worker] = {}
        self._broken: BaseException | None = None

    def run(self, works: dict[str, Callable[[], object]], max_kills: int = 5) -> History:
        """Let workers work until all have ended; who is killed is begun again.

        Raises
        ------
        Exception
            What `after_operation` raised.
        """
        self._kills_left = max_kills
        with _watched(self):
            for name, work in works.items():
                self._start(name, work)
            self._next()
            self._is_over.acquire()
        if self._broken is not None:
            raise self._broken
        return self.history

    def _start(self, name: str, work: Callable[[], object]) -> None:
        self._num_started += 1
        worker = _Worker(name, work, _FIRST_NUMBER + self._num_started)
        self._living.append(worker)
        threading.Thread(target=self._live, args=[worker], daemon=True).start()

    def _live(self, worker: _Worker) -> None:
        self._of_thread[threading.get_ident()] = worker
        worker.turn.acquire()
        try:
            worker.work()
        except _Killed:
            pass
        except BaseException as error:
            if not worker.is_dead:
                self.history.errors.append((worker.name, error))
        del self._of_thread[threading.get_ident()]
        worker.has_ended = True
        self._living.remove(worker)
        if worker.is_dead:
            self._tear(worker)
            self._start(worker.name, worker.work)
        self._check()
        self._next()

    def _next(self) -> None:
        if self._living:
            self._draw.choice(self._living).turn.release()
        else:
            self._is_over.release()

    def _check(self) -> None:
        if self._after_operation is not None and self._broken is None:
            mine = self._of_thread.pop(threading.get_ident(), None)  # its own operations are free
            try:
                self._after_operation()
            except BaseException as error:
                self._broken = error
            if mine is not None:
                self._of_thread[threading.get_ident()] = mine

    def _tear(self, worker: _Worker) -> None:
        """Leave of what a dead worker was writing any part."""
        if worker.writing is not None and worker.writing.is_file():
            size = worker.writing.stat().st_size
            os.truncate(worker.writing, self._draw.randint(0, size))

    def before(self, event: str, args: tuple[object, ...]) -> None:
        """Give the baton away before an operation of a worker, or end it."""
        worker = self._of_thread.get(threading.get_ident())
        if worker is None or event not in _OPERATIONS:
            return
        path = args[0]
        if not isinstance(path, str | bytes | os.PathLike):
            return
        where = Path(os.path.abspath(os.fsdecode(path)))
        if not where.is_relative_to(self.root):
            return
        if worker.is_dead:
            raise _Killed
        self._check()
        if self._kills_left and self._draw.random() < self._kill:
            self._kills_left -= 1
            self.history.num_kills += 1
            worker.is_dead = True
            self.history.operations.append(f"{worker.name} is killed")
            raise _Killed
        self._draw.choice(self._living).turn.release()
        worker.turn.acquire()
        worker.writing = None
        if event == "open" and isinstance(args[2], int) and args[2] & _WRITING:
            worker.writing = where
        self.history.operations.append(f"{worker.name} {event} {where.relative_to(self.root)}")

    def number(self) -> int | None:
        """Return the process number of who asks, None if that is no worker."""
        worker = self._of_thread.get(threading.get_ident())
        return None if worker is None else worker.number

    def lives(self, number: int) -> bool:
        """Say whether a worker of that process number is alive."""
        return any(worker.number == number and not worker.is_dead for worker in self._living)


_world: World | None = None
_is_hooked = False


def _hook(event: str, args: tuple[object, ...]) -> None:
    if _world is not None:
        _world.before(event, args)


@contextmanager
def _watched(world: World) -> Iterator[None]:
    """Let a world see operations of its workers, who have process numbers of their own."""
    global _world, _is_hooked
    if not _is_hooked:  # which cannot be undone
        sys.addaudithook(_hook)
        _is_hooked = True
    getpid, kill = os.getpid, os.kill

    def kill_one(number: int, signal: int) -> None:
        if number < _FIRST_NUMBER:
            kill(number, signal)
        elif not world.lives(number):
            raise ProcessLookupError

    os.getpid, os.kill = lambda: world.number() or getpid(), kill_one
    _world = world
    try:
        yield
    finally:
        _world = None
        os.getpid, os.kill = getpid, kill
