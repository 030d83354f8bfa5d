"""Run one command line in a process of its own and judge how it ended."""

import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

DONE, REFUSED = 0, 2
"""Exit codes of a command: it did what was asked; it refused its input."""

Content = bytes | str

MAX_MESSAGE_CHARS = 3000
MEMORY_BYTES = 4 << 30


@dataclass
class Case:
    """A command line, the files it finds, and what its complaint must name.

    Attributes
    ----------
    argv : sequence of str
        What follows ``schedlab`` on the command line.
    files : mapping of str to (bytes, str, or callable that returns them)
        Written into the empty working directory beforehand, by relative name.
    names : sequence of str
        One of these must be in the message of a refusal; none asked if empty.
    prepare : str
        Further Python run in the directory beforehand, for what is no plain file.
    ends : sequence of int
        Exit codes that are no fault.
    keeps_with : str
        What is left is no fault where the message holds this.
    """

    argv: Sequence[str]
    files: Mapping[str, Content | Callable[[], Content]] = field(default_factory=dict)
    names: Sequence[str] = ()
    prepare: str = ""
    ends: Sequence[int] = (DONE, REFUSED)
    keeps_with: str = ""


@dataclass
class Ending:
    """How a case ended: its exit code (None if it had to be killed), texts, and faults."""

    code: int | None
    out: str
    err: str
    left: list[str]
    faults: list[str]


def run_case(case: Case, folder: Path, limit_s: float = 20.0) -> Ending:
    """Run a case in `folder`, which must be empty, and judge it.

    The command runs in a fork of this process, which has imported everything already: a case
    costs tens of milliseconds. It may use `MEMORY_BYTES` more memory and `limit_s` seconds.
    """
    for name, content in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        found = content() if callable(content) else content
        path.write_bytes(found if isinstance(found, bytes) else found.encode())
    before = _listing(folder)
    texts = folder.with_name(f"{folder.name}.out"), folder.with_name(f"{folder.name}.err")
    child = os.fork()
    if child == 0:
        _become(case, folder, texts)
    code = _wait(child, limit_s)
    out, err = (path.read_text(encoding="utf-8", errors="replace") for path in texts)
    left = sorted(_listing(folder) - before - set(case.names))
    return Ending(code, out, err, left, list(_faults(case, code, err, left)))


def modules_of(case: Case, folder: Path) -> list[str]:
    """Return the names of the modules that are there after a case, which runs in `folder`."""
    lists = """
import sys
from schedlab.experiments.commands import cli
command = cli.main
def main():
    try:
        command()
    finally:
        open("../modules", "w").write("\\n".join(sys.modules))
cli.main = main
"""
    run_case(replace(case, prepare=lists), folder, limit_s=120.0)
    return folder.with_name("modules").read_text().splitlines()


def _become(case: Case, folder: Path, texts: tuple[Path, Path]) -> None:
    """Turn this fork into the command; never return."""
    code = 97
    try:
        os.setsid()
        os.chdir(folder)
        limit_bytes = _address_space_bytes() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
        for number, path in enumerate(texts, start=1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8")
        sys.stderr = os.fdopen(2, "w", encoding="utf-8")
        exec(case.prepare, {"folder": folder})
        sys.argv = ["schedlab", *case.argv]
        from schedlab.experiments.commands import cli

        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except BaseException:  # what would have been a traceback
            import traceback

            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _address_space_bytes() -> int:
    """Return what this process has mapped already, which a fork of it inherits."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[0]) * resource.getpagesize() if statm.exists() else 0


def _wait(child: int, limit_s: float) -> int | None:
    deadline = time.monotonic() + limit_s
    pause_s = 0.002
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _listing(folder: Path) -> set[str]:
    """Return what lies in a folder, but for what Python keeps of modules that it has imported."""
    found = [path.relative_to(folder) for path in folder.rglob("*")]
    return {str(path) for path in found if "__pycache__" not in path.parts}


def _faults(case: Case, code: int | None, err: str, left: list[str]) -> list[str]:
    faults = []
    if code is None:
        return ["hangs"]
    if "Traceback (most recent call last)" in err or code == 97:
        last = err.strip().splitlines()[-1][:200] if err.strip() else ""
        faults.append(f"traceback: {last}")
    elif code not in case.ends:
        faults.append(f"exit code {code}")
    if len(err) > MAX_MESSAGE_CHARS:
        faults.append(f"a message of {len(err)} characters")
    if code != 0:
        if not err.strip():
            faults.append("no message")
        elif case.names and not any(name in err for name in case.names):
            faults.append(f"message names none of {', '.join(case.names)}")
        if left and not (case.keeps_with and case.keeps_with in err):
            faults.append(f"left behind {left[:4]}")
    if code == 0 and any(".new-" in name or name.endswith(".tmp") for name in left):
        faults.append(f"left behind {left[:4]}")
    if "RuntimeWarning" in err:
        faults.append("a warning of numpy's")
    return faults
