"""ShareGPT: a JSON array of conversations; text only, so tokens have to be counted.

Source: the file `vllm bench serve --dataset-name sharegpt` reads. As there, the first turn is the
prompt and the second the answer; unlike there, short and long pairs are not pruned (use
`Trace.take` or `Trace.fit`). The array is loaded whole: memory is not bounded by the chunk.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from schedlab.sim.errors import TraceError
from schedlab.traces.read_report import ReadReport
from schedlab.traces.readers.cells import BROKEN_TEXT, valid_texts
from schedlab.traces.readers.reader import Reader, ReadOptions
from schedlab.traces.readers.source import Peek, Records, open_text, readable
from schedlab.traces.readers.trace_builder import TraceBuilder
from schedlab.traces.session_generator import prompt_tokens
from schedlab.traces.tokenizer import token_counter
from schedlab.traces.trace import Trace
from schedlab.traces.turns import Turns


def _sniff(peek: Peek) -> bool:
    return peek.kind == "json" and bool({"conversations", "conversation"} & set(peek.names))


def _chunks(path: Path, options: ReadOptions) -> Iterator[Trace]:
    return _conversations(path, options) if options.sessions else _first_pairs(path, options)


def _conversations(path: Path, options: ReadOptions) -> Iterator[Trace]:
    """Yield every conversation as a session: each pair of turns a request, with all before it."""
    counter = token_counter(options.tokenizer)
    report = ReadReport(
        format="sharegpt",
        path=str(path),
        tokens=counter.label,
        notes=("each pair of turns is a request, behind the answer before it; no think times",),
    )
    builder = TraceBuilder(report)
    entries = _load(path)
    for low in range(0, len(entries), options.chunk_rows):
        records = Records(path, separator=": entry ")
        asked: list[str] = []
        answered: list[str] = []
        needs: list[list[int]] = []
        too_short = 0
        for number, entry in enumerate(entries[low : low + options.chunk_rows], start=low + 1):
            turns = _all_turns(entry, path, number)
            pairs = list(zip(turns[::2], turns[1::2], strict=False))
            whole = next((i for i, pair in enumerate(pairs) if not all(pair)), len(pairs))
            too_short += not whole
            for i, (prompt, answer) in enumerate(pairs[:whole]):
                needs.append([len(asked) - 1] if i else [])
                records.lines.append(number)
                asked.append(prompt)
                answered.append(answer)
        builder.drop("no pair of turns with text", too_short)
        if not asked:
            continue
        new = np.array(counter.count_tokens(valid_texts(asked)[0]), dtype=np.int64)
        output = np.array(counter.count_tokens(valid_texts(answered)[0]), dtype=np.int64)
        trace = builder.trace(
            records,
            prompt_tokens=prompt_tokens(new, output, needs),
            output_tokens=output,
            session=np.array([f"{number}" for number in records.lines], dtype=object),
            turns=Turns.from_rows(needs, np.zeros(len(asked), dtype=np.int64)),
        )
        if trace is not None:
            yield trace
    yield builder.finish()


def _first_pairs(path: Path, options: ReadOptions) -> Iterator[Trace]:
    """Yield the first two turns of every conversation as a request."""
    counter = token_counter(options.tokenizer)
    report = ReadReport(
        format="sharegpt",
        path=str(path),
        tokens=counter.label,
        notes=("first turn = prompt, second turn = answer; no pruning by length",),
    )
    builder = TraceBuilder(report, empty_reason="empty prompt or answer")
    entries = _load(path)
    for low in range(0, len(entries), options.chunk_rows):
        records = Records(path, separator=": entry ")
        prompts, answers = [], []
        too_short = 0
        for number, entry in enumerate(entries[low : low + options.chunk_rows], start=low + 1):
            pair = _first_two_turns(entry, path, number)
            if pair is None:
                too_short += 1
                continue
            records.lines.append(number)
            records.values.append(entry)
            prompts.append(pair[0])
            answers.append(pair[1])
        builder.drop("fewer than two turns", too_short)
        if not prompts:
            continue
        prompts, broken_prompts = valid_texts(prompts)
        answers, broken_answers = valid_texts(answers)
        if broken_prompts or broken_answers:
            builder.note(BROKEN_TEXT)
        trace = builder.trace(
            records,
            prompt_tokens=np.array(counter.count_tokens(prompts), dtype=np.int64),
            output_tokens=np.array(counter.count_tokens(answers), dtype=np.int64),
            prompt=np.array(prompts, dtype=object),
        )
        if trace is not None:
            yield trace
    yield builder.finish()


def _load(path: Path) -> list[object]:
    """Return the whole array."""
    with open_text(path) as text, readable(path, [0]):
        try:
            entries = json.load(text)
        except json.JSONDecodeError as error:
            problem = f"{error.msg}, column {error.colno}"
            raise TraceError(f"{path}:{error.lineno}: no complete JSON ({problem})") from None
        except RecursionError:
            raise TraceError(f"{path}: no JSON array of conversations (nested too deep)") from None
        except ValueError:  # digits beyond what Python converts
            raise TraceError(f"{path}: no JSON array of conversations (a huge number)") from None
    if not isinstance(entries, list):
        raise TraceError(f"{path}: expected a JSON array of conversations")
    return entries


def _all_turns(entry: object, path: Path, number: int) -> list[str]:
    """Return the texts of a conversation, in order."""
    turns = None
    if isinstance(entry, dict):
        turns = entry.get("conversations", entry.get("conversation"))
    if not isinstance(turns, list):
        raise TraceError(f"{path}: entry {number} has no list 'conversations'")
    texts = [turn.get("value") if isinstance(turn, dict) else None for turn in turns]
    if not all(isinstance(text, str) for text in texts):
        raise TraceError(f"{path}: entry {number}: a turn has no text 'value'")
    return [str(text) for text in texts]


def _first_two_turns(entry: object, path: Path, number: int) -> tuple[str, str] | None:
    """Return prompt and answer, or `None` if the conversation has no second turn."""
    turns = None
    if isinstance(entry, dict):
        turns = entry.get("conversations", entry.get("conversation"))
    if not isinstance(turns, list):
        raise TraceError(f"{path}: entry {number} has no list 'conversations'")
    if len(turns) < 2:
        return None
    prompt, answer = (turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2])
    if not (isinstance(prompt, str) and isinstance(answer, str)):
        raise TraceError(f"{path}: entry {number}: a turn has no text 'value'")
    return prompt, answer


READER = Reader("sharegpt", "ShareGPT JSON array of conversations", _sniff, _chunks, True)
