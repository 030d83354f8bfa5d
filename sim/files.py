"""Files: written whole or not at all, read with errors that name them."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from schedlab.sim.errors import SpecError


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, whole or not at all; see `replacing`."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; move it there if the block ends well.

    Parameters
    ----------
    path : Path
        The file to write. Its folder is made if need be.

    Yields
    ------
    Path
        Where to write. It is removed if the block raises, and an older `path` stays as it was.

    Examples
    --------
    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "a.txt"
    >>> with replacing(target) as temporary:
    ...     _ = temporary.write_text("whole")
    >>> target.read_text()
    'whole'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            temporary.unlink()
        raise


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object that is the whole of a file.

    Raises
    ------
    SpecError
        If the file cannot be read, is not JSON, or holds something else; names the file.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.json"
    >>> _ = path.write_text('{"vocab_size": 32000}')
    >>> read_json_object(path)
    {'vocab_size': 32000}
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path}: cannot read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise SpecError(f"{path}: must hold a JSON object, that is {{...}}")
    return data
