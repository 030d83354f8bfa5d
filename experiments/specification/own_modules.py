"""Where modules of the user's are looked for: what ``module:Class`` may name."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path


def find_own_modules(*folders: Path) -> None:
    """Let ``module:Class`` name modules in the working directory and in some folders.

    They are searched last: whatever such a folder holds, no package of ours, and none that is
    installed, is taken from it.
    """
    known = set(sys.path)
    sys.path += [place for place in map(str, (Path.cwd(), *folders)) if place not in known]


def taken_from_elsewhere(folder: Path, named: Iterable[str]) -> list[str]:
    """Say which modules did not come from a folder, though it has one of that name.

    Parameters
    ----------
    folder : Path
        Where they were to be looked for.
    named : iterable of str
        What was imported, as ``module:Class``.
    """
    lines = []
    for module in sorted({one.partition(":")[0] for one in named}):
        beside = folder.joinpath(*module.split(".")).with_suffix(".py")
        taken = getattr(sys.modules.get(module), "__file__", None)
        if taken is not None and beside.is_file() and not beside.samefile(taken):
            lines.append(f"module {module} is {taken}, which comes before {beside}")
    return lines
