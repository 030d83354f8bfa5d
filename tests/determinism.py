"""Digests of what small experiments give, to be compared between machines: ``make determinism``.

    python -m tests.determinism [--save FILE] [--against FILE] [--but LINE ...]

An experiment of every feature and of every policy is run. A line of each tells its digest of what
was drawn (arrivals and lengths), of decisions and times (requests, steps, gaps, preemptions), and
of metrics. With a file of another Python, NumPy, processor or core the lines that differ are told;
exits with 1 if any does. docs/reliability.md says what is not the same, and why.
"""

import argparse
import hashlib
import json
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from schedlab import core
from schedlab.experiments.running.provenance import versions
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec
from schedlab.policies import registry
from schedlab.sim.files import write_text
from tests.torture.feature_experiments import FEATURES, experiment

_DRAWN = ("arrival_ns", "prompt_tokens", "max_tokens")


KEPT = Path(__file__).with_suffix(".json")


def digests() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each experiment with the digests of its parts."""
    for name, data in _experiments():
        result = run(make_spec(data))
        requests = {column: np.asarray(result.requests[column]) for column in result.requests}
        drawn = {column: requests[column] for column in _DRAWN if column in requests}
        log = result.log
        decided = [requests, log.steps(), log.preemptions(), log.token_gaps()]
        metrics = json.dumps({key: repr(value) for key, value in result.metrics().items()})
        yield (
            name,
            {
                "drawn": _digest([drawn]),
                "decided": _digest(decided),
                "metrics": hashlib.sha256(metrics.encode()).hexdigest()[:16],
            },
        )


def _experiments() -> Iterator[tuple[str, dict[str, Any]]]:
    for feature in FEATURES:
        if feature not in ("find", "tune"):
            yield feature, experiment(feature)
    for policy in registry.names():
        needs = registry.make(policy).needs_prediction
        chosen = {"name": policy, **({"predictor": "oracle"} if needs else {})}
        yield f"policy {policy}", experiment("classes") | {"policy": chosen}


def _digest(tables: list[Mapping[str, Any]]) -> str:
    found = hashlib.sha256()
    for table in tables:
        for name in sorted(table):
            column = np.asarray(table[name])
            text = column.dtype.kind in "OUS"
            found.update(f"{name} {'text' if text else column.dtype.str}\n".encode())
            found.update("\n".join(map(str, column)).encode() if text else column.tobytes())
    return found.hexdigest()[:16]


def save(path: Path, found: Mapping[str, dict[str, str]]) -> None:
    """Keep digests, and by what they were made."""
    about = {**versions(), "machine": platform.machine(), "core": core.running()}
    write_text(path, json.dumps({"about": about, "digests": found}, indent=1) + "\n")


def differences(found: Mapping[str, dict[str, str]], path: Path) -> list[str]:
    """Name what differs from the digests that a file keeps."""
    theirs = json.loads(path.read_text(encoding="utf-8"))["digests"]
    return [
        f"{name}: {part}"
        for name in sorted(found.keys() | theirs.keys())
        for part in ("drawn", "decided", "metrics")
        if found.get(name, {}).get(part) != theirs.get(name, {}).get(part)
    ]


def main() -> int:
    """Print the digests, and what differs from those of a file."""
    parser = argparse.ArgumentParser(description="Digests of what small experiments give.")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write them as JSON")
    parser.add_argument("--against", type=Path, metavar="FILE", help="tell what differs")
    parser.add_argument("--but", action="append", default=[], help="what is known to differ there")
    asked = parser.parse_args()
    found = dict(digests())
    about = {**versions(), "machine": platform.machine(), "core": core.running()}
    whole = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    for name, parts in found.items():
        print(f"{name}: {', '.join(f'{part} {digest}' for part, digest in parts.items())}")
    print(f"all {len(found)}: {whole}")
    if asked.save:
        save(asked.save, found)
    if asked.against is None:
        return 0
    different = differences(found, asked.against)
    print(f"{len(different)} of {3 * len(found)} differ from {asked.against}", *different, sep="\n")
    return int(bool(set(different) - set(asked.but)))


if __name__ == "__main__":
    sys.exit(main())
