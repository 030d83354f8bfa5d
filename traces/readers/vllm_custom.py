"""The custom dataset of `vllm bench serve`: one JSON object with a prompt a line.

Source: vLLM documentation, "Benchmark CLI", custom dataset. vLLM shuffles such a file unless told
not to; here rows keep their order. `prompt_tokens` and `application` are read where given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.sim.errors import TraceError
from schedlab.traces.read_report import ReadReport
from schedlab.traces.readers.cells import BROKEN_TEXT, texts, valid_texts, whole_numbers
from schedlab.traces.readers.reader import Reader, ReadOptions
from schedlab.traces.readers.source import Peek, Records, jsonl_records
from schedlab.traces.readers.trace_builder import TraceBuilder
from schedlab.traces.tokenizer import token_counter
from schedlab.traces.trace import Int64, Trace


def _sniff(peek: Peek) -> bool:
    return peek.kind == "jsonl" and "prompt" in peek.names


def _chunks(path: Path, options: ReadOptions) -> Iterator[Trace]:
    builder: TraceBuilder | None = None
    report = ReadReport(format="vllm_custom", path=str(path))
    for records in jsonl_records(path, ("prompt",), options.chunk_rows):
        prompts = [r["prompt"] for r in records.values]
        for i, prompt in enumerate(prompts):
            if not isinstance(prompt, str):
                raise TraceError(f"{records.at(i)}: prompt must be text, got {prompt!r:.40}")
        prompts, num_repaired = valid_texts(prompts)
        prompt_tokens, counted_by = _prompt_tokens(records, prompts, options.tokenizer)
        if builder is None:
            report = replace(report, tokens=counted_by)
            builder = TraceBuilder(report, empty_reason=options.empty_reason)
        elif counted_by != report.tokens:
            builder.note(f"some prompts {counted_by}")
        if num_repaired:
            builder.note(BROKEN_TEXT)
        applications = [r.get("application") for r in records.values]
        trace = builder.trace(
            records,
            prompt_tokens=prompt_tokens,
            output_tokens=_output_tokens(records, options.default_output_tokens, builder),
            prompt=np.array(prompts, dtype=object),
            application=texts(applications) if any(applications) else None,
        )
        if trace is not None:
            yield trace
    yield (builder or TraceBuilder(report)).finish()


def _prompt_tokens(records: Records, prompts: list[str], tokenizer: str) -> tuple[Int64, str]:
    """Return the prompt lengths and who counted them."""
    given = [r.get("prompt_tokens") for r in records.values]
    if None not in given:
        return whole_numbers(given, "prompt_tokens", records), "counted by the publisher"
    counter = token_counter(tokenizer)
    return np.array(counter.count_tokens(prompts), dtype=np.int64), counter.label


def _output_tokens(records: Records, default: int | None, builder: TraceBuilder) -> Int64:
    """Return the output lengths, given or the user's default."""
    values: list[Any] = [r.get("output_tokens") for r in records.values]
    if None in values:
        if default is None:
            raise TraceError(
                f"{records.at(values.index(None))}: no output_tokens; give default_output_tokens "
                "to use one length for such prompts"
            )
        builder.note(f"output_tokens missing in the file: {default} assumed")
        values = [default if value is None else value for value in values]
    return whole_numbers(values, "output_tokens", records)


READER = Reader("vllm_custom", "vLLM custom dataset, JSON Lines with prompts", _sniff, _chunks)
