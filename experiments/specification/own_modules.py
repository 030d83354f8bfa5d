"""Where modules of the user's are looked for: what ``module:Class`` may name."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from schedlab.sim.user_modules import Places, look_in, places, refresh


def find_own_modules(folder: Path | None = None) -> None:
    """Let ``module:Class`` name modules of a folder and of the working directory, as they are now.

    One that was edited since it was imported is imported anew, and so are those that import it.
    The folder goes before any other modules of the user's, the working directory is searched last;
    no package of ours, and none that is installed, is taken from either.

    Parameters
    ----------
    folder : Path, optional
        The folder of an experiment, in place of that of the one before.
    """
    beside = places().beside if folder is None else str(folder)
    look_in(Places(beside, str(Path.cwd())))
    refresh()


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
