"""Measured runs kept on disk, so that a comparison can be done in several sittings."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from schedlab.sim.core.plan_log import RecordedStep
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.errors import SpecError
from schedlab.sim.files import read_json_object, write_text
from schedlab.sim.result import RunResult


class MeasuredRuns:
    """A folder with one subfolder for each measured run.

    Parameters
    ----------
    folder : Path
        Made if need be.
    identity : str
        Of the measurement: experiment, kernels, device.

    Raises
    ------
    SpecError
        If the folder holds runs of another measurement.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        self.folder = folder
        path = folder / "measurement.json"
        if path.exists():
            found = read_json_object(path).get("identity")
            if found != identity:
                raise SpecError(
                    f"{path}: the runs kept there are of another experiment, device or kernels "
                    f"({found}, this is {identity}); choose another folder, or delete that one"
                )
            return
        if folder.exists() and any(folder.iterdir()):
            raise SpecError(f"{folder} holds something else than measured runs; choose another")
        write_text(path, json.dumps({"identity": identity}) + "\n")

    def find(self, point: int, repeat: int) -> tuple[RunResult, list[RecordedStep]] | None:
        """Return a run and its steps (none if they were not recorded), or None if it is not kept.

        Parameters
        ----------
        point, repeat : int
            Which run.
        """
        folder = self._folder_of(point, repeat)
        if not folder.exists():
            return None
        with gzip.open(folder / "plan_log.jsonl.gz", "rt", encoding="utf-8") as lines:
            steps = [_step(json.loads(line)) for line in lines]
        return RunResult.load(folder), steps

    def keep(
        self, point: int, repeat: int, result: RunResult, steps: Sequence[RecordedStep]
    ) -> None:
        """Write a run down; it is there whole or not at all."""
        folder = self._folder_of(point, repeat)
        new = folder.with_name(f".{folder.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        result.save(new)
        with gzip.open(new / "plan_log.jsonl.gz", "wt", encoding="utf-8") as lines:
            lines.writelines(json.dumps(step) + "\n" for step in steps)
        new.rename(folder)

    def _folder_of(self, point: int, repeat: int) -> Path:
        return self.folder / f"point-{point:03d}-repeat-{repeat}"


def _step(row: list[Any]) -> RecordedStep:
    start_ns, tokens, preempted, shape, duration_ns, overhead_ns = row
    batch = BatchShape(*shape)
    return RecordedStep(
        start_ns,
        {int(key): n for key, n in tokens.items()},
        tuple(preempted),
        batch._replace(chunks=tuple((q, c) for q, c in batch.chunks)),
        duration_ns,
        overhead_ns,
    )
