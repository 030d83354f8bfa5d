"""Sound files of every kind, each changed in one place: how files come to be wrong."""

import csv
import gzip
import io
import json
import random
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.torture.sandbox import DONE, Case
from tests.torture.sound_files import gz, parquet, seeds

_CELLS = ("", "x", "nan", "-1", "0", "1e400", "9" * 30, "9" * 5000, "1_0", "0x10", "١", "\x00", "é")
_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 1e308, 10**18, 10**40, "", "x", "x" * 5000, "\x00", "../..", [], [1],
    [[[[]]]], {}, {"a": {"a": 1}},
)  # fmt: skip
_RAW = ("1" * 5000, "NaN", "Infinity", "-Infinity", '"\\ud800"', "[" * 3000, "1e999")
_FLIPS = 24

Mutation = tuple[str, bytes | Callable[[], bytes]]
"""What was changed, and what the file holds then, made when it is asked for."""


def mutated_file_cases(kind: str = "") -> Iterator[tuple[str, Case]]:
    """Change each sound file (of kinds that begin so) in each way that its form allows."""
    for seed in seeds(kind):
        yield f"{seed.kind} sound", Case(seed.argv, dict(seed.files), seed.names, ends=[DONE])
        for how, content in _mutations(seed.name, seed.files[seed.name]):
            files = {**seed.files, seed.name: content}
            yield f"{seed.kind} {how}", Case(seed.argv, files, seed.names)


def _mutations(name: str, content: bytes) -> Iterator[Mutation]:
    yield from _bytewise(content)
    ending = "".join(Path(name).suffixes[-2:])
    form: dict[str, Callable[[bytes], Iterator[Mutation]]] = {
        ".csv": _csv, ".json": _json, ".jsonl": _json_lines, ".yaml": _lines, ".csv.gz": _zipped,
        ".parquet": _columns,
    }  # fmt: skip
    if ending == ".yaml" and content.startswith(b"{"):
        ending = ".json"
    if ending in form:
        yield from form[ending](content)


def _bytewise(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Change bytes as a bad disk, a bad copy or another system would."""
    size = len(content)
    yield "empty", b""
    yield "newline only", b"\n"
    for part in (1, 2, 3):
        yield f"cut at {part}/4", content[: size * part // 4]
    yield "without its end", content[:-1]
    yield "twice", content + content
    yield "BOM", b"\xef\xbb\xbf" + content
    yield "UTF-16", content.decode("latin-1").encode("utf-16")
    yield "returns", content.replace(b"\n", b"\r\n")
    yield "zipped", gz(content)
    rng = random.Random(zlib.crc32(content[:4096]))
    for i in range(_FLIPS):
        where = rng.randrange(max(size, 1))
        value = rng.choice((0, 10, 34, 44, 58, 91, 123, 128, 255, rng.randrange(256)))
        yield f"byte {i} changed", content[:where] + bytes([value]) + content[where + 1 :]


def _csv(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Put odd cells into the second row, and change the columns."""
    header, *rows = list(csv.reader(io.StringIO(content.decode())))
    for i, column in enumerate(header):
        for value in _CELLS:
            row = [*rows[0][:i], value, *rows[0][i + 1 :]]
            yield f"{column}={value[:20]!r}", _table([header, row, *rows[1:]])
        fewer = [[*row[:i], *row[i + 1 :]] for row in (header, *rows)]
        yield f"without {column}", _table(fewer)
        yield f"{column} twice", _table([[*row, row[i]] for row in (header, *rows)])
    yield "a row alone", _table(rows[:1])
    yield "a short row", _table([header, rows[0][:-1], *rows[1:]])
    yield "a long row", _table([header, [*rows[0], "1"], *rows[1:]])
    yield "a wide row", _table([header, ["1"] * 5000])
    yield "rows the other way round", _table([header, *rows[::-1]])


def _table(rows: list[list[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _json(content: bytes) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Put odd values everywhere in a JSON value, and leave every key out once."""
    whole = json.loads(content)
    for path in _paths(whole):
        where = "/".join(map(str, path))
        for value in _VALUES:
            yield f"{where}={str(value)[:20]!r}", partial(_with, whole, path, value)
        for raw in _RAW:
            yield f"{where}={raw[:12]}", partial(_with_text, whole, path, raw)
        if path:
            yield f"without {where}", partial(_without, whole, path)


def _json_lines(content: bytes) -> Iterator[Mutation]:
    first, *others = content.splitlines(keepends=True)
    for how, changed in _json(first):
        yield how, partial(_with_lines, changed, others)
    yield "rows the other way round", b"".join([*others[::-1], first])


def _dumped(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _paths(value: Any, most: int = 60) -> list[tuple[Any, ...]]:
    """Return where values stand, outer ones first; of a long list only its first two entries."""
    found: list[tuple[Any, ...]] = [()]
    for path in found:
        inner = _at(value, path)
        if isinstance(inner, dict):
            found += [(*path, key) for key in inner]
        elif isinstance(inner, list):
            found += [(*path, i) for i in range(min(len(inner), 2))]
        if len(found) >= most:
            break
    return found[:most]


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _with(whole: Any, path: tuple[Any, ...], value: Any) -> bytes:
    if not path:
        return _dumped(value)
    copy = json.loads(json.dumps(whole))
    _at(copy, path[:-1])[path[-1]] = value
    return _dumped(copy)


def _with_text(whole: Any, path: tuple[Any, ...], raw: str) -> bytes:
    return _with(whole, path, "MARK").replace(b'"MARK"', raw.encode())


def _with_lines(first: Callable[[], bytes], others: list[bytes]) -> bytes:
    return b"".join([first(), b"\n", *others])


def _without(whole: Any, path: tuple[Any, ...]) -> bytes:
    copy = json.loads(json.dumps(whole))
    del _at(copy, path[:-1])[path[-1]]
    return _dumped(copy)


def _lines(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Leave out, repeat and break every line of a YAML file."""
    lines = content.splitlines(keepends=True)
    for i, line in enumerate(lines):
        before, after = lines[:i], lines[i + 1 :]
        key = line.split(b":")[0].decode("latin-1")
        yield f"without {key}", b"".join(before + after)
        yield f"{key} twice", b"".join([*before, line, line, *after])
        yield f"{key} indented", b"".join([*before, b"  " + line, *after])
        yield f"{key} without colon", b"".join([*before, line.replace(b":", b"", 1), *after])
        yield f"{key} bracketed", b"".join([*before, line.rstrip() + b" [{\n", *after])


def _zipped(content: bytes) -> Iterator[Mutation]:
    plain = gzip.decompress(content)
    yield "not gzip at all", plain
    yield "two members", content + content
    yield "trailing garbage", content + b"garbage"
    yield "bomb of one line", lambda: gz(b"a" * (1 << 28))
    row = plain.splitlines(keepends=True)
    yield "bomb of a cell", lambda: gz(row[0] + b"1," + b"9" * (1 << 28))


def _columns(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Give a Parquet table columns of other kinds."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    whole = pq.read_table(io.BytesIO(content))
    for column in whole.column_names:
        columns = whole.to_pydict()
        num_rows = whole.num_rows
        yield f"without {column}", parquet(**{k: v for k, v in columns.items() if k != column})
        odd = (None, "x", -1, True, 1e400, float("nan"), 2**62, [1, 2], {"a": 1}, b"\xff", 0.5)
        for value in odd:
            changed = columns | {column: [value] * num_rows}
            yield f"{column}={value!r}", parquet(**changed)
    yield "no rows", parquet(**{name: pa.array([], pa.int64()) for name in whole.column_names})
    yield "no columns", parquet()
