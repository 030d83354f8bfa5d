"""Everything that has to be measured on a GPU, in order of worth, within a time budget.

``python -m schedlab.gpu_backend.sitting --budget 25m -o OUT``

Each piece is a process of its own with a time limit: one that fails or hangs costs only itself.
Pieces that only check, and measure nothing, run at the same time where the device has the memory.
After every piece, and whenever a piece has written something, all results are packed anew into
``OUT/sitting.tar.gz``; a sitting that is killed loses what came since. ``--resume`` goes on from
such a file, on this machine or another. What a piece has finished is not repeated as long as the
source of the kernels is the same. ``--device cpu`` rehearses the whole on a tiny model.

Status: 0 if every piece asked for is done; 1 if one failed or there was no time; 2 if nothing can
be measured here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

from schedlab.gpu_backend.sitting_pieces import (
    GPU,
    PIECES,
    REHEARSAL,
    ROOT,
    Command,
    Sitting,
    device_holds_several,
)
from schedlab.sim.errors import SpecError
from schedlab.sim.files import read_json_object, replacing, write_text

ARCHIVE = "sitting.tar.gz"
_SHOWN_CHARS = 3000
_WAIT_S = 0.1
"""Between two looks at what runs."""
_WATCHED = "timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu"
"""What nvidia-smi is asked for."""

_TEMPORARY = re.compile(r"\..+\.(new|old|tmp)")


def run(sitting: Sitting, names: Sequence[str]) -> bool:
    """Run pieces that are not done, and pack what they leave.

    Returns
    -------
    bool
        Whether all of them are done.

    Raises
    ------
    SpecError
        If not even the versions can be told: nothing else would run, either.
    """
    results = sitting.results
    results.mkdir(parents=True, exist_ok=True)
    log = results / "pieces.json"
    done: dict[str, str] = dict(read_json_object(log)) if log.exists() else {}

    def note(name: str, what: str) -> None:
        done[name] = what
        write_text(log, json.dumps(done, indent=1) + "\n")
        print(f"--- {name}: {what}", flush=True)
        pack(sitting)

    for together in _turns(sitting, names):
        begun = []
        for name in together:
            piece = PIECES[name]
            if name != "comparison" and done.get(name, "").startswith("done"):
                print(f"--- {name}: {done[name]}, before", flush=True)
            elif piece.needs and not (results / piece.needs).exists():
                note(name, f"not begun: there is no {piece.needs}")
            elif sitting.left_s < piece.least_s:
                note(name, "not begun: no time was left")
            else:
                begun.append(name)
        _run_together(sitting, begun, note)
        if "versions" in begun and not done["versions"].startswith("done"):
            raise SpecError(f"{results / 'logs' / 'versions.log'} says why")
    return all(done.get(name, "").startswith("done") for name in names)


def _turns(sitting: Sitting, names: Sequence[str]) -> Iterator[list[str]]:
    """Yield pieces that run at the same time: those that only check, if the device holds them."""
    together: list[str] = []
    for name in names:
        if together and not (PIECES[name].only_checks and PIECES[together[-1]].only_checks
                             and device_holds_several(sitting.results)):  # fmt: skip
            yield together
            together = []
        together.append(name)
    if together:
        yield together


def _run_together(sitting: Sitting, names: Sequence[str], note: Callable[[str, str], None]) -> None:
    """Run pieces at the same time; note how each went."""
    running = [_Running(sitting, name) for name in names]
    packed, looked_s = _state(sitting.results), time.monotonic()
    try:
        while running:
            for piece in list(running):
                how = piece.poll()
                if how is not None:
                    running.remove(piece)
                    note(piece.name, how)
            if time.monotonic() - looked_s >= sitting.setup.poll_s:
                if (now := _state(sitting.results)) != packed:
                    pack(sitting)
                    packed = now
                looked_s = time.monotonic()
            if running:
                time.sleep(min(_WAIT_S, sitting.setup.poll_s))
    finally:
        for piece in running:
            piece.kill()


class _Running:
    """A piece under way: its commands, one process after the other, until its time is up."""

    def __init__(self, sitting: Sitting, name: str) -> None:
        self.name = name
        self._begun_s = time.monotonic()
        limit_s = min(PIECES[name].limit_s, sitting.left_s - 2)
        self._end_s = self._begun_s + limit_s
        self._log = sitting.results / "logs" / f"{name}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._log.write_text("", encoding="utf-8")
        self._is_cpu = sitting.setup.device == "cpu"
        self._commands = PIECES[name].commands(sitting, limit_s)
        self._process: subprocess.Popen[bytes] | None = None
        self._watch = _watch(sitting.results) if PIECES[name].is_watched else None

    def poll(self) -> str | None:
        """Go on; return how the piece went if it has ended."""
        how = self._go_on()
        if how is None:
            return None
        self.kill()
        # A piece that was killed may have ended in the midst of a character.
        told = self._log.read_text(encoding="utf-8", errors="replace")
        print(told[-_SHOWN_CHARS:], flush=True)
        return f"{how}, {time.monotonic() - self._begun_s:.0f} s"

    def _go_on(self) -> str | None:
        if self._process is not None:
            status = self._process.poll()
            if status is None:
                return None if time.monotonic() < self._end_s else "stopped at its time limit"
            if status:
                return f"failed, status {status}"
        try:
            command = next(self._commands, None)
        except SpecError as error:
            return f"failed: {error}"
        if command is None:
            return "done"
        self._process = self._start(command)
        return None

    def _start(self, command: Command) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        env = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "COLUMNS": "170"}
        if self._is_cpu:
            env["TRITON_INTERPRET"] = "1"
        with self._log.open("a", encoding="utf-8") as out:
            out.write(f"$ python -m {' '.join(command)}\n")
            out.flush()
            return subprocess.Popen(
                [sys.executable, "-m", *command],
                stdout=out, stderr=subprocess.STDOUT, env=env, cwd=ROOT,
            )  # fmt: skip

    def kill(self) -> None:
        """End what still runs."""
        for process in (self._process, self._watch):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()


def _watch(results: Path) -> subprocess.Popen[bytes] | None:
    """Begin to write down clocks and power of the devices, where a program knows them."""
    if shutil.which("nvidia-smi") is None:
        return None
    with (results / "clocks.csv").open("ab") as out:
        return subprocess.Popen(
            ["nvidia-smi", f"--query-gpu={_WATCHED}", "--format=csv,noheader", "-l", "10"],
            stdout=out,
        )  # fmt: skip


def _state(folder: Path) -> set[tuple[str, int]]:
    """Return the whole files of a folder, logs left out, with their sizes."""
    found = set()
    for path in folder.rglob("*"):
        if path.suffix != ".log" and not any(map(_TEMPORARY.match, path.parts)):
            try:
                found.add((str(path), path.stat().st_size))
            except FileNotFoundError:  # moved meanwhile
                continue
    return found


def pack(sitting: Sitting) -> None:
    """Write the archive of all results anew, whole or not at all, and the summary beside it."""
    log = sitting.results / "pieces.json"
    done = read_json_object(log) if log.exists() else {}
    summary = "".join(f"{name}: {what}\n" for name, what in done.items())
    write_text(sitting.output / "summary.txt", summary)
    with (
        replacing(sitting.output / ARCHIVE) as new,
        tarfile.open(new, "w:gz", compresslevel=6) as tar,
    ):
        for path in sorted(sitting.work.rglob("*")):
            name = path.relative_to(sitting.work)
            if path.is_file() and not any(map(_TEMPORARY.match, name.parts)):
                try:
                    tar.add(path, name.as_posix(), recursive=False)
                except FileNotFoundError:  # moved meanwhile
                    continue


def unpack(archive: Path, work: Path) -> None:
    """Put the results of an archive into a folder; files that are there already stay.

    Raises
    ------
    SpecError
        If the archive cannot be read.
    """
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                path, content = work / member.name, tar.extractfile(member)
                if content is None or not path.resolve().is_relative_to(work.resolve()):
                    raise SpecError(f"{archive}: {member.name!r} is no file of a sitting")
                if not path.exists():
                    with replacing(path) as new:
                        new.write_bytes(content.read())
    except (OSError, tarfile.TarError, EOFError) as error:
        raise SpecError(f"{archive}: not a whole archive of a sitting: {error}") from error


def missing_packages() -> list[str]:
    """Return the requirements of this project, with torch and triton, that are not met here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    missing = []
    for requirement in (*project["dependencies"], *project["optional-dependencies"]["gpu"]):
        match = re.match(r"([\w.-]+)>=([\d.]+)", requirement)
        if match is None:
            raise SpecError(f"pyproject.toml: requirement {requirement!r} is not NAME>=VERSION")
        try:
            there = metadata.version(match[1])
        except metadata.PackageNotFoundError:
            missing.append(match[0])
            continue
        if _numbers(there) < _numbers(match[2]):
            missing.append(f"{match[0]} ({there} is here)")
    return missing


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def seconds(text: str) -> float:
    """Return a duration like ``25m``, ``1.5h``, ``90s`` or ``90`` in seconds.

    Examples
    --------
    >>> seconds("25m"), seconds("90")
    (1500.0, 90.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration like 25m, 1.5h or 90s")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m schedlab.gpu_backend.sitting", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("-o", "--output", type=Path, required=True, metavar="OUT", help=f"folder for {ARCHIVE}")
    add("--budget", type=seconds, default=1500.0, help="seconds, or 25m (default), or 1h")
    add("--pieces", default=",".join(PIECES), help="default: %(default)s")
    add("--resume", type=Path, metavar=ARCHIVE, help="go on from an archive")
    work, spec = ROOT / "runs" / "sitting", ROOT / "experiments" / "compare-h200.yaml"
    add("--work", type=Path, default=work, help="folder for the results (default: %(default)s)")
    add("--spec", type=Path, default=spec, help="what to compare (default: %(default)s)")
    add("--device", default="cuda", choices=("cuda", "cpu"), help="cpu rehearses")
    options = parser.parse_args(arguments)
    names = options.pieces.split(",")
    if unknown := [name for name in names if name not in PIECES]:
        parser.error(f"--pieces: {unknown[0]!r} is none of {', '.join(PIECES)}")
    end_s = time.monotonic() + options.budget
    # Ended from outside, it ends its piece, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sitting = Sitting(
        GPU if options.device == "cuda" else REHEARSAL, options.spec.resolve(),
        options.work.resolve(), options.output.resolve(), end_s,
    )  # fmt: skip
    try:
        if missing := missing_packages():
            raise SpecError(
                f"these packages are missing: {', '.join(missing)}. Without a network, bring their "
                "wheels (pip download), pip install --no-index --target FOLDER them, and set "
                "PYTHONPATH=FOLDER"
            )
        if options.resume is not None:
            unpack(options.resume, options.work.resolve())
        all_done = run(sitting, names)
    except SpecError as error:
        print(f"sitting: nothing was measured. {error}", file=sys.stderr)
        return 2
    print("--- summary", flush=True)
    print((sitting.output / "summary.txt").read_text(encoding="utf-8"), flush=True)
    return 0 if all_done else 1


if __name__ == "__main__":
    sys.exit(main())
