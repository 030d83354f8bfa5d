"""Traces that others publish: where they are, under which licence, and how to know the file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from schedlab.sim.errors import TraceError, nearest

_AZURE = (
    "https://raw.githubusercontent.com/Azure/AzurePublicDataset/"
    "790921015d50dd6aae7f7e47f39ba0e235ad6b08/data/"
)
_MOONCAKE = "https://raw.githubusercontent.com/kvcache-ai/Mooncake/{}/FAST25-release/traces/"
_BURSTGPT = "https://github.com/HPMLL/BurstGPT/releases/download/v2.0/"
_SPLITWISE = (
    'Patel et al., "Splitwise: Efficient generative LLM inference using phase splitting", ISCA 2024'
)
_FAST25 = (
    'Qin et al., "Mooncake: Trading More Storage for Less Computation - A KVCache-centric '
    'Architecture for Serving LLM Chatbot", FAST 2025'
)
_KDD25 = (
    'Wang et al., "BurstGPT: A Real-World Workload Dataset to Optimize LLM Serving Systems", '
    "KDD 2025"
)


@dataclass(frozen=True)
class PublishedTrace:
    """A trace file of others, fixed to one content.

    Attributes
    ----------
    name : str
        What it is called here, as in ``workload.trace: NAME``; no preset has the name.
    summary : str
        What it is.
    url : str
        Where its publisher keeps it, fixed to a commit or a release.
    sha256 : str
        Of the file, hex.
    size_bytes : int
        Of the file.
    licence : str
        Licence of the data.
    cite : str
        What its publisher asks to cite.
    """

    name: str
    summary: str
    url: str
    sha256: str
    size_bytes: int
    licence: str
    cite: str

    @property
    def path(self) -> Path:
        """Where the file is kept on this machine, once it is fetched."""
        suffix = self.url[self.url.rindex(".") :]
        return cache_folder() / "traces" / f"{self.name}{suffix}"

    def fetched(self) -> Path:
        """Return the path of the file.

        Raises
        ------
        TraceError
            If it was not fetched, or is of another size than what was published.
        """
        path, hint = self.path, f"fetch it with: schedlab trace fetch {self.name}"
        if not path.is_file():
            raise TraceError(
                f"the trace {self.name} is not on this machine (no {path}); {hint} "
                f"({self.size_bytes / 1e6:.1f} MB, {self.licence})"
            )
        if (size := path.stat().st_size) != self.size_bytes:
            raise TraceError(
                f"{path}: {size:,} bytes where {self.name} as published has "
                f"{self.size_bytes:,}; {hint}"
            )
        return path


def cache_folder() -> Path:
    """Return the folder for what is downloaded.

    Returns
    -------
    Path
        ``$SCHEDLAB_CACHE``, else ``$XDG_CACHE_HOME/schedlab``, else ``~/.cache/schedlab``. A
        relative ``$XDG_CACHE_HOME`` is passed over, as the XDG Base Directory rules ask.
    """
    own = os.environ.get("SCHEDLAB_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        if own:
            return Path(own).expanduser().absolute()
        return (base if base.is_absolute() else Path.home() / ".cache") / "schedlab"
    except RuntimeError as error:  # there is no home, or none of that user
        raise TraceError(f"SCHEDLAB_CACHE={own or ''}: {error}") from None


def published(name: str) -> PublishedTrace:
    """Return the published trace of that name.

    Raises
    ------
    TraceError
        If there is none; the nearest name is given.
    """
    if name not in PUBLISHED:
        raise TraceError(f"unknown published trace {name!r}; {nearest(name, PUBLISHED)}")
    return PUBLISHED[name]


_ALL = (
    PublishedTrace(
        name="azure-2023-conv",
        summary="an hour of a chat service: 19,366 requests with times and lengths",
        url=f"{_AZURE}AzureLLMInferenceTrace_conv.csv",
        sha256="2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
        size_bytes=719_188,
        licence="CC-BY 4.0",
        cite=_SPLITWISE,
    ),
    PublishedTrace(
        name="azure-2023-code",
        summary="an hour of code completion: 8,819 requests with times and lengths",
        url=f"{_AZURE}AzureLLMInferenceTrace_code.csv",
        sha256="54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
        size_bytes=320_117,
        licence="CC-BY 4.0",
        cite=_SPLITWISE,
    ),
    PublishedTrace(
        name="mooncake-2025-conversation",
        summary="an hour of long-context chat: 12,031 requests with shared prefixes, times to 3 s",
        url=_MOONCAKE.format("a2a4b18ac537fd798d50e6e9f57031ce86419a37")
        + "conversation_trace.jsonl",
        sha256="b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
        size_bytes=3_029_533,
        licence="Apache-2.0",
        cite=_FAST25,
    ),
    PublishedTrace(
        name="mooncake-2025-synthetic",
        summary="3,993 requests mixed from public data sets, shared prefixes, Poisson times",
        url=_MOONCAKE.format("3cca71daccf2a7afb8fe3f0295358f70e3a69fdb") + "synthetic_trace.jsonl",
        sha256="bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131",
        size_bytes=1_136_313,
        licence="Apache-2.0",
        cite=_FAST25,
    ),
    PublishedTrace(
        name="burstgpt-2025-1",
        summary="two months of a campus's calls to ChatGPT and GPT-4: 1.43 million, some failed",
        url=f"{_BURSTGPT}BurstGPT_1.csv",
        sha256="4bb3783693d0a435686fbfc885615d2349bd067239079fa4b749f2e679e12122",
        size_bytes=52_283_111,
        licence="CC-BY 4.0",
        cite=_KDD25,
    ),
)
PUBLISHED: dict[str, PublishedTrace] = {one.name: one for one in _ALL}
