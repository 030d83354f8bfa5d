"""Work that is killed, or meets a full disk, and is then begun again: nothing may be lost.

A `Victim` does its work in a fork of this process. It dies before its nth change to a file, by a
signal that nobody can catch, or at an instant of its run; or no file may grow beyond a size. What
it leaves must be what was there before or the whole result, and the same work done again must
give the files of work that nobody disturbed, byte by byte.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.torture.odd_values import SMALL

_CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.truncate"}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_NEVER = 1 << 30
_TAKES = ("seconds",)
"""What a result says of how long it took: no two runs agree on it."""


@dataclass(frozen=True)
class Victim:
    """Something that writes files.

    Attributes
    ----------
    name : str
        What it is.
    work : callable
        Does it in the working directory; writes nothing outside ``out`` but leftovers with a dot.
    prepare : callable
        Puts there what it finds.
    keeps_what_was : bool
        Whether ``out`` was there before, and is to be there, old or new, at every instant.
    is_whole_or_absent : bool
        Whether ``out`` never holds a part of the result.
    """

    name: str
    work: Callable[[], None]
    prepare: Callable[[Path], None]
    keeps_what_was: bool = False
    is_whole_or_absent: bool = True


@dataclass(frozen=True)
class Disturbance:
    """What happens to a victim: only one of these.

    Attributes
    ----------
    at_change : int
        It is killed before its nth change to a file; 0 = never.
    after : float
        It is killed after this share of the time that it takes undisturbed; 0 = never.
    signal : int
        Killed by what.
    most_bytes : int
        No file may be larger; 0 = as large as it likes.
    clock_steps : bool
        Whether the clock of the day jumps back and forth all the time.
    is_read_only : bool
        Whether nothing can be written into the working directory.
    """

    at_change: int = 0
    after: float = 0.0
    signal: int = signal.SIGKILL
    most_bytes: int = 0
    clock_steps: bool = False
    is_read_only: bool = False

    def __str__(self) -> str:
        if self.clock_steps:
            return "clock that jumps"
        if self.is_read_only:
            return "folder that is read-only"
        if self.most_bytes:
            return f"disk full at {self.most_bytes} bytes"
        how = signal.Signals(self.signal).name
        where = f"before change {self.at_change}" if self.at_change else f"at {self.after:.3f}"
        return f"{how} {where}"


def disturbed(victim: Victim, seed: int) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """Yield every way to disturb a victim, then ways drawn: what it is, and who tries it.

    Who is called disturbs the victim and returns what was wrong.
    """
    with tempfile.TemporaryDirectory(prefix="torture-") as outside:
        calm = Path(outside) / "calm"
        num_changes, took_s = _undisturbed(victim, calm)
        expected = _content(calm / "out")

        def tried(how: Disturbance, folder: Path) -> list[str]:
            try:
                return list(_faults(victim, how, folder, expected, took_s))
            finally:
                shutil.rmtree(folder)

        for number, how in enumerate(_ways(num_changes, random.Random(f"{victim.name} {seed}"))):
            yield f"{victim.name}, {how}", partial(tried, how, Path(outside) / str(number))


def _ways(num_changes: int, draw: random.Random) -> Iterator[Disturbance]:
    for number in range(1, num_changes + 1):
        yield Disturbance(at_change=number)
    for number in range(1, num_changes + 1, 3):
        yield Disturbance(at_change=number, signal=signal.SIGINT)
        yield Disturbance(at_change=number, signal=signal.SIGTERM)
    for size in (1, 100, 700, 4000):
        yield Disturbance(most_bytes=size)
    yield Disturbance(clock_steps=True)
    yield Disturbance(is_read_only=True)
    while True:
        yield Disturbance(after=draw.random())


def _undisturbed(victim: Victim, folder: Path) -> tuple[int, float]:
    """Let the victim work; return how often it changes files, and how long it takes."""
    folder.mkdir()
    victim.prepare(folder)
    begun_s = time.monotonic()
    counts = folder.with_name("counts")
    code = _become(victim, folder, Disturbance(at_change=_NEVER), 1.0, counts)
    if code != 0:
        raise RuntimeError(f"{victim.name}: undisturbed, it ends with {code}")
    return int(counts.read_text()), time.monotonic() - begun_s


def _faults(
    victim: Victim, how: Disturbance, folder: Path, expected: dict[str, bytes], took_s: float
) -> Iterator[str]:
    folder.mkdir()
    victim.prepare(folder)
    before = _content(folder / "out")
    if how.is_read_only:
        folder.chmod(0o555)
    code = _become(victim, folder, how, took_s)
    folder.chmod(0o755)
    found = _content(folder / "out")
    if not found and victim.keeps_what_was:  # between moving it aside and the new one in
        found = _content(next(folder.glob(".out.old-*"), folder / "out"))
    if victim.is_whole_or_absent and found not in (before, expected):
        yield f"left a part: {_difference(found, expected)}"
    if victim.keeps_what_was and not found:
        yield "lost what was there before"
    if how.most_bytes and code == -signal.SIGKILL:
        yield "hangs on a full disk"
    if how.clock_steps and (code != 0 or found != expected):
        yield f"ends with {code}: {_difference(found, expected)}"
    if how.is_read_only and (code == 0 or found != before or not _said(folder)):
        yield f"ends with {code}, says {_said(folder)[:200]!r}"
    if code == 97:
        yield "raises what is no error of ours: " + _said(folder)[-300:]
    again = _become(victim, folder, Disturbance(), took_s)
    if again != 0:
        yield f"cannot be begun again: ends with {again}: {_said(folder)[-300:]}"
    elif (found := _content(folder / "out")) != expected:
        yield f"is another result when begun again: {_difference(found, expected)}"
    left = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    if left:
        yield f"left behind {left[:3]}"


def _become(
    victim: Victim, folder: Path, how: Disturbance, took_s: float, counts: Path | None = None
) -> int:
    """Do the work in a fork; return its exit code, negative if a signal ended it."""
    child = os.fork()
    if child:
        deadline = time.monotonic() + 30 + 20 * took_s
        while time.monotonic() < deadline:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return -signal.SIGKILL
    code = 97
    try:
        os.chdir(folder)
        err = os.open(folder.with_suffix(".err"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(err, 1)
        os.dup2(err, 2)
        sys.stdout = sys.stderr = os.fdopen(2, "w", encoding="utf-8")
        num_changes = _disturb(folder, how, took_s)
        code = _ended(victim.work)
        if counts is not None:
            counts.write_text(str(num_changes()))
        sys.stderr.flush()
    finally:
        os._exit(code)


def _said(folder: Path) -> str:
    return folder.with_suffix(".err").read_text().strip()


def _ended(work: Callable[[], None]) -> int:
    from schedlab.sim.errors import SchedlabError

    try:
        work()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt:
        return 130
    except (SchedlabError, OSError) as error:
        print(error)
        return 2
    except BaseException:
        import traceback

        traceback.print_exc()
        return 97
    return 0


def _disturb(folder: Path, how: Disturbance, took_s: float) -> Callable[[], int]:
    """Arrange for what is to happen; return how to ask for the changes made so far."""
    num_changes = 0
    root = os.fsencode(folder)

    def watch(event: str, args: tuple[object, ...]) -> None:
        nonlocal num_changes
        if event == "open":
            path, _, flags = args
            if not (isinstance(flags, int) and flags & _WRITING):
                return
        elif event in _CHANGES:
            path = args[0]
        else:
            return
        if not isinstance(path, str | bytes | os.PathLike):
            return
        if not os.path.abspath(os.fsencode(path)).startswith(root + b"/"):
            return
        num_changes += 1
        if num_changes == how.at_change:
            os.kill(os.getpid(), how.signal)

    if how.at_change:
        sys.addaudithook(watch)
    if how.after:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends a process then and there
        signal.setitimer(signal.ITIMER_REAL, how.after * took_s)
    if how.clock_steps:
        draw, seconds = random.Random(0), time.time
        time.time = lambda: seconds() + draw.choice((-1e7, -3600, 0, 1e-3, 1e7))
    if how.is_read_only and os.geteuid() == 0:  # to whom nothing is read-only
        os.setuid(65534)
    if how.most_bytes:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (how.most_bytes, how.most_bytes))
    return lambda: num_changes


def _content(folder: Path) -> dict[str, bytes]:
    if folder.is_file():
        return {"": folder.read_bytes()}
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    # A temporary file of one that was killed is in nobody's way, nor is a lock of nobody.
    return {
        str(path.relative_to(folder)): _without_times(path)
        for path in paths
        if not path.name.startswith(".lock") and path.suffix != ".tmp"
    }


def _without_times(path: Path) -> bytes:
    content = path.read_bytes()
    if path.suffix != ".json":
        return content
    try:
        data = json.loads(content)
    except ValueError:
        return content
    if isinstance(data, dict):
        data = {key: value for key, value in data.items() if key not in _TAKES}
    return json.dumps(data).encode()


def _difference(found: dict[str, bytes], expected: dict[str, bytes]) -> str:
    names = found.keys() | expected.keys()
    return ", ".join(sorted(n for n in names if found.get(n) != expected.get(n)))[:200]


# -- what is killed ----------------------------------------------------------------------------


def _command(*argv: str) -> None:
    from schedlab.experiments.commands import cli

    os.environ["SOURCE_DATE_EPOCH"] = "0"
    sys.argv = ["schedlab", *argv]
    cli.main()


def _experiment(folder: Path) -> None:
    (folder / "s.yaml").write_text(SMALL)


def _older_result(older: Path, folder: Path) -> None:
    """Put an experiment there with the result of another, which is made once, in `older`."""
    if not older.exists():
        older.mkdir()
        (older / "s.yaml").write_text(SMALL.replace("seed: 0", "seed: 1"))
        run = Victim("", partial(_command, "run", "s.yaml", "-q", "-o", "out"), _experiment)
        assert _become(run, older, Disturbance(), 30.0) == 0
    shutil.copytree(older / "out", folder / "out")
    _experiment(folder)


def _sweep() -> None:
    from schedlab.experiments.specification.loading import load_spec
    from schedlab.experiments.sweeps.store import Store
    from schedlab.experiments.sweeps.sweep_all import sweep_all
    from schedlab.experiments.sweeps.workers import InProcess

    os.environ["SOURCE_DATE_EPOCH"] = "0"
    changes = ["sweep.policy=[fcfs, shortest_prompt]", "replications=2"]
    swept = sweep_all(load_spec(Path("s.yaml"), changes), Store(Path("out")), InProcess())
    if swept.failures:
        print(*(done.error for done in swept.failures))
        raise SystemExit(2)


def _calibrate() -> None:
    """Measure on a device that needs so long for a batch as its number says."""
    from schedlab.gpu_backend.calibration import measure, measured
    from schedlab.gpu_backend.calibration_design import design
    from schedlab.sim.config import EngineConfig
    from schedlab.sim.files import write_text

    class Timer:
        def time(self, point, repetitions):  # type: ignore[no-untyped-def]
            seconds = 1e-3 + 1e-6 * int(hashlib.sha256(repr(point).encode()).hexdigest()[:4], 16)
            return (seconds,) * repetitions, (seconds,) * repetitions

    config = EngineConfig(num_blocks=64, max_model_len=128, max_num_seqs=4)
    points = design(config, num_random=3, seed=0)[:12]
    found = measure(
        Timer(), config, points, Path("readings/points.jsonl"), about="nothing", num_rounds=2
    )
    lines = [f"{one.shape} {one.seconds}" for one in measured(found, points)]
    write_text(Path("out/result.txt"), "\n".join(lines))


CONTENT = "".join(f"{i / 10},{i % 700 + 9},7\n" for i in range(40_000)).encode()


def _fetch(port: int) -> None:
    from schedlab.traces.fetch import fetch
    from schedlab.traces.published import PublishedTrace

    os.environ["SCHEDLAB_CACHE"] = str(Path.cwd() / "out")
    os.environ["no_proxy"] = "127.0.0.1"
    digest = hashlib.sha256(CONTENT).hexdigest()
    url = f"http://127.0.0.1:{port}/some.csv"
    fetch(PublishedTrace("some", "made up", url, digest, len(CONTENT), "CC0", "Nobody"))


class _Server(http.server.BaseHTTPRequestHandler):
    """Gives CONTENT, from where it is asked for."""

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        for at in range(start, len(CONTENT), 50_000):
            self.wfile.write(CONTENT[at : at + 50_000])

    def log_message(self, format: str, *args: object) -> None:
        pass

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:
            self.close_connection = True  # its client was killed


@contextmanager
def victims() -> Iterator[list[Victim]]:
    """Give everything that is killed; a server of this process lives as long as the block."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    run = partial(_command, "run", "s.yaml", "-q", "-o", "out")
    nothing = Path.exists
    folder = tempfile.TemporaryDirectory(prefix="torture-")
    older = partial(_older_result, Path(folder.name) / "older")
    try:
        yield [
            Victim("run", run, _experiment),
            Victim("run again", run, older, keeps_what_was=True),
            Victim("sweep", _sweep, _experiment, is_whole_or_absent=False),
            Victim("calibrate", _calibrate, nothing, is_whole_or_absent=False),
            Victim("fetch", partial(_fetch, server.server_port), nothing, is_whole_or_absent=False),
        ]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        folder.cleanup()
