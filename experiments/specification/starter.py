"""A folder to start from: an experiment, a policy of one's own, and the schema for the editor."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from schedlab.experiments.specification.schema import json_schema
from schedlab.experiments.specification.shipped import experiment_file
from schedlab.sim.errors import SpecError
from schedlab.sim.files import write_texts

EXAMPLE = "sjf-against-fcfs"
SCHEMA_FILE = "schedlab.schema.json"
POLICY = '''\
# longest_first.py
from schedlab.policies import ContinuousBatching


class LongestPromptFirst(ContinuousBatching):
    """Serve the longest prompt first. Starves short prompts under load."""

    def key(self, state, now_ns):
        return -state.request.prompt_tokens
'''


def write_starter(folder: Path) -> list[Path]:
    """Write files to start from; what is there already is never overwritten.

    Parameters
    ----------
    folder : Path
        It is made if need be.

    Returns
    -------
    list of Path
        ``spec.yaml``, ``longest_first.py`` and the schema that editors complete the YAML with.

    Raises
    ------
    SpecError
        If one of the files is there already; then none is written.
    OSError
        If one cannot be written; then none is.
    """
    example = experiment_file(EXAMPLE).read_text(encoding="utf-8")
    texts = {
        "spec.yaml": example.replace(f"schedlab run {EXAMPLE}", "schedlab run spec.yaml"),
        "longest_first.py": POLICY,
        SCHEMA_FILE: json.dumps(json_schema(), indent=1) + "\n",
    }
    for name in texts:
        if (folder / name).exists():
            raise SpecError(f"{folder / name} is there already; name another folder")
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise SpecError(f"{place} is a file; name a folder to write {', '.join(texts)} into")
    is_new = not folder.exists()
    try:
        write_texts(folder, texts)
    except BaseException:
        if is_new:
            with suppress(OSError):  # it could not be made
                folder.rmdir()
        raise
    return [folder / name for name in texts]
