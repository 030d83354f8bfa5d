"""Where modules of the user's are looked for: what ``module:Class`` may name."""

from __future__ import annotations

import sys
from pathlib import Path


def find_own_modules(*folders: Path) -> None:
    """Let ``module:Class`` name modules in the working directory and in some folders.

    They are searched last: whatever such a folder holds, no package of ours, and none that is
    installed, is taken from it.
    """
    known = set(sys.path)
    sys.path += [place for place in map(str, (Path.cwd(), *folders)) if place not in known]
