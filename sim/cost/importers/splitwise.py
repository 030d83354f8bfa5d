"""splitwise-sim's measurements: whole steps of a whole model, no operators.

Source: Mutinifni/splitwise-sim, data/perf_model.csv. Times are milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.sim.cost.importers.csv_table import read_csv
from schedlab.sim.cost.importers.imported import Imported
from schedlab.sim.cost.table_profile import TableProfile
from schedlab.sim.errors import SpecError, nearest
from schedlab.sim.hardware.models import canonical_model

_COLUMNS = (
    "model", "hardware", "tensor_parallel", "prompt_size", "batch_size", "token_size",
    "prompt_time", "token_time",
)  # fmt: skip
_SHORTEST_MS = 1e-3
"""No step of a model takes less than a microsecond."""


def import_splitwise(
    path: Path, model: str, hardware: str, tensor_parallel_size: int = 8
) -> Imported:
    """Return the profile of one model on one GPU.

    Parameters
    ----------
    path : Path
        perf_model.csv.
    model, hardware : str
        As the file names them, e.g. llama2-70b and a100-80gb.
    tensor_parallel_size : int
        GPUs.

    Raises
    ------
    SpecError
        If the file is malformed or has no such rows.
    """
    table = read_csv(path, _COLUMNS)
    columns = {name: table.text(name) for name in ("model", "hardware")}
    for name, wanted in (("model", model), ("hardware", hardware)):
        if wanted not in columns[name]:
            hint = nearest(wanted, set(columns[name]))
            raise SpecError(f"{path}: {name} {wanted!r} was not measured; {hint}")
    workers = table.whole("tensor_parallel")
    rows = [
        i
        for i in range(len(table))
        if (columns["model"][i], columns["hardware"][i], workers[i])
        == (model, hardware, tensor_parallel_size)
    ]
    if not rows:
        raise SpecError(f"{path}: {model} on {hardware} has no tp {tensor_parallel_size}")
    prompt, batch, answer = (
        table.whole(name, least=1) for name in ("prompt_size", "batch_size", "token_size")
    )
    prompt_ms, token_ms = (
        table.numbers(name, least=_SHORTEST_MS) for name in ("prompt_time", "token_time")
    )
    prompts = _medians((prompt[i] * batch[i], prompt_ms[i]) for i in rows)
    decodes = _medians(((batch[i], prompt[i] + answer[i] // 2), token_ms[i]) for i in rows)
    points = [(0, 0, n, context, ms) for (n, context), ms in decodes.items()]
    batches = sorted({n for n, _ in decodes})
    sizes, times = list(prompts), list(prompts.values())
    for tokens in sizes:
        points.append((tokens, 0, 0, 0, prompts[tokens]))
        points += [(tokens, 0, n, 0, float(np.interp(tokens + n, sizes, times))) for n in batches]
    names = ("prefill_chunk", "kv_prefill", "num_decodes", "kv_decode", "us")
    grid = dict(zip(names, map(list, zip(*points, strict=True)), strict=True))
    grid["us"] = [1e3 * ms for ms in grid["us"]]
    return Imported(
        profile=TableProfile((), (), grid, attention_calls=1),
        meta={
            "model": canonical_model(model.replace("llama2", "llama-2")),
            "hardware": hardware,
            "dtype": "fp16",
            "tensor_parallel_size": tensor_parallel_size,
            "source": "splitwise-sim",
            "published_error": "none published of this profile (under 3 % of splitwise-sim itself: "
            "ISCA 2024)",
        },
        assumptions=(
            "whole steps of an engine of 2023, host time included",
            "a step with a prefill takes what a prompt of all its tokens takes, and its decodes "
            "count one token each, as in splitwise-sim; earlier chunks of a prompt cost nothing",
            "decodes take the mean token time of an answer, at the context of its middle",
            "contexts were varied for batches of one only",
        ),
    )


def _medians(points: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    found: dict[Any, list[float]] = {}
    for key, value in points:
        found.setdefault(key, []).append(value)
    return {key: float(np.median(found[key])) for key in sorted(found)}
