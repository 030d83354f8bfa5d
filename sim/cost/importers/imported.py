"""What an importer returns, and how it becomes a profile folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from schedlab.sim.cost.table_profile import TableProfile, write_table


@dataclass(frozen=True)
class Imported:
    """A foreign profile, read.

    Attributes
    ----------
    profile : TableProfile
        The times.
    meta : mapping
        What they are of.
    assumptions : tuple of str
        What the source does not say and the importer had to choose.
    """

    profile: TableProfile
    meta: Mapping[str, object]
    assumptions: tuple[str, ...]

    def save(self, folder: Path) -> None:
        """Write the profile folder; meta.json keeps the assumptions."""
        write_table(folder, {**self.meta, "assumptions": list(self.assumptions)}, self.profile)
