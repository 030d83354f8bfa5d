"""What a device can do and whether the kernels are right on it, part by part.

``python -m schedlab.gpu_backend.selfcheck`` measures on a CUDA device. Each row is printed, and
the JSON file of its part written anew, as it comes; a case that raises is a row like the others,
and the next case follows. `schedlab.gpu_backend.sitting` runs all parts, and what comes after them,
within a time budget. With ``--device cpu`` tiny sizes run in Triton's interpreter: a rehearsal,
whose figures mean nothing.

Status: 0; 1 if a check failed or a case raised; 2 without the device.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import triton
from rich.console import Console

from schedlab.gpu_backend.device import open_device
from schedlab.gpu_backend.device_timer import cuda_timer, host_timer
from schedlab.gpu_backend.kernel_hash import kernel_hash
from schedlab.gpu_backend.selfcheck_parts import FULL, PARTS, REHEARSAL, ResultLine, Subject
from schedlab.sim.errors import SpecError
from schedlab.sim.files import write_text
from schedlab.sim.text import json_text


def run_parts(names: Sequence[str], subject: Subject, folder: Path | None, console: Console) -> int:
    """Run parts of the check, in the order given.

    Parameters
    ----------
    names : sequence of str
        Keys of `PARTS`.
    subject : Subject
        What to measure.
    folder : Path or None
        Where each part's ``NAME.json`` goes, anew with each row.
    console : Console
        Where rows are printed.

    Returns
    -------
    int
        Failed checks and cases.
    """
    failed = 0
    for name in names:
        failed += _run_part(name, subject, folder, console)
        subject.release()
    return failed


def _run_part(name: str, subject: Subject, folder: Path | None, console: Console) -> int:
    begun_s = time.perf_counter()
    rows: list[ResultLine] = []

    def note(row: ResultLine | None) -> None:
        if row is not None:
            rows.append(row)
            console.print(f"{name}: {' | '.join(cell for cell in row.cells if cell)}")
        if folder is None:
            return
        record = {
            "part": name,
            "kernels": kernel_hash(),
            "complete": row is None,
            "took_s": time.perf_counter() - begun_s,
            "failed": sum(r.failed for r in rows),
            "rows": [{**r.data, "failed": r.failed} for r in rows],
        }
        write_text(folder / f"{name}.json", json_text(record) + "\n")

    for case in PARTS[name](subject):
        try:
            for row in case.rows():
                note(row)
        except Exception as error:
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            data = {"name": case.name, "error": f"{type(error).__name__}: {error}"}
            note(ResultLine((case.name, "RAISED", what), data, failed=True))
    note(None)
    console.print(f"{name}: {len(rows)} rows, {time.perf_counter() - begun_s:.0f} s")
    return sum(row.failed for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m schedlab.gpu_backend.selfcheck", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="folder for JSON files")
    parser.add_argument("--device", default="cuda", help="cuda (default); cpu rehearses")
    parser.add_argument(
        "--only", action="append", choices=[*PARTS], metavar="PART",
        help=f"run this part ({', '.join(PARTS)}); may be repeated. Default: all but tiles",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    try:
        device = open_device(options.device)
        if device.type == "cpu" and not triton.knobs.runtime.interpret:
            raise SpecError("a rehearsal on the CPU needs TRITON_INTERPRET=1 in the environment")
    except SpecError as error:
        print(f"selfcheck: nothing was measured. {error}", file=sys.stderr)
        return 2
    if device.type == "cuda":
        subject = Subject(device, cuda_timer, FULL)
    else:
        subject = Subject(device, host_timer, REHEARSAL)
    names = options.only or [name for name in PARTS if name != "tiles"]
    console = Console(highlight=False, markup=False, soft_wrap=True)
    return 1 if run_parts(names, subject, options.output, console) else 0


if __name__ == "__main__":
    sys.exit(main())
