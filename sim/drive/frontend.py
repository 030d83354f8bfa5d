"""What stands between clients and engine: HTTP, tokenisation, and what streams answers back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from heapq import heapreplace
from pathlib import Path

import numpy as np

from schedlab.sim.errors import SpecError, nearest
from schedlab.sim.files import read_json_object, write_text
from schedlab.sim.record.columns import Columns, Ints, Pairs, whole_numbers

_NS_PER_S = 1e9
_SECONDS = ("latency_s", "request_s", "prompt_token_s", "output_token_s")
_FILE_KEYS = (*_SECONDS, "servers", "source", "measured")


@dataclass(frozen=True, slots=True)
class Frontend:
    """The server in front of an engine, as two queues that know nothing of each other.

    Parameters
    ----------
    latency_s : float
        Seconds from a client to the engine and back in which nobody else has to wait: network,
        messages between processes, a thread that tokenises.
    request_s, prompt_token_s : float
        Seconds that one server is busy with a request, and with each token of its prompt, before
        the engine has it.
    output_token_s : float
        Seconds that one server is busy with a generated token: detokenising it and writing it to
        its stream.
    servers : int
        Processes that share requests and tokens evenly.
    source : str
        Where the figures come from.

    Raises
    ------
    SpecError
        If a time is negative or not finite, or there is no server.

    Notes
    -----
    Requests queue in order of arrival for `servers` servers, for
    ``request_s + prompt_token_s * prompt tokens`` each, and are handed on in that order,
    `latency_s` later. The tokens of a step come out of the engine together, queue behind those of
    the steps before, and are seen together when ``output_token_s * tokens / servers`` have passed:
    a first token is among the last to be written, since its request is the newest of the batch.
    Neither queue delays the engine.
    """

    latency_s: float = 0.0
    request_s: float = 0.0
    prompt_token_s: float = 0.0
    output_token_s: float = 0.0
    servers: int = 1
    source: str = "the experiment"

    def __post_init__(self) -> None:
        for key in _SECONDS:
            value = getattr(self, key)
            if not (math.isfinite(value) and value >= 0):
                raise SpecError(f"frontend: {key} must be finite and >= 0, got {value!r}")
        if self.servers < 1:
            raise SpecError(f"frontend: servers must be at least 1, got {self.servers}")

    def received_ns(self, arrival_ns: Ints, prompt_tokens: Ints) -> Ints:
        """Return when the engine is handed each request.

        Parameters
        ----------
        arrival_ns, prompt_tokens : ndarray of int64, shape (num_requests,)
            When clients send, not decreasing, and how much.
        """
        busy_s = self.request_s + self.prompt_token_s * prompt_tokens
        busy_ns = np.rint(busy_s * _NS_PER_S).astype(np.int64)
        if self.servers == 1:
            done_ns = _done_ns(arrival_ns, busy_ns)
        else:
            done_ns = np.maximum.accumulate(_done_by_several_ns(arrival_ns, busy_ns, self.servers))
        return done_ns + round(self.latency_s * _NS_PER_S)

    def seen_ns(self, engine_ns: Ints, token_counts: Pairs) -> Ints:
        """Return when clients see what the engine does at some times.

        Parameters
        ----------
        engine_ns : ndarray of int64, shape (num_requests,)
            Ends of steps; -1 = never, which stays.
        token_counts : (ndarray, ndarray) of int64
            All ends of steps at which tokens come out, not decreasing, and how many.
        """
        ends_ns, tokens = token_counts
        if not len(ends_ns):
            return engine_ns
        busy_ns = np.rint(tokens * (self.output_token_s / self.servers * _NS_PER_S))
        done_ns = _done_ns(ends_ns, busy_ns.astype(np.int64))
        step = np.searchsorted(ends_ns, engine_ns, side="right") - 1
        waited_ns = np.where(step >= 0, done_ns[step] - ends_ns[step], 0)
        return np.where(engine_ns < 0, engine_ns, engine_ns + waited_ns)

    def columns(self, requests: Columns, token_counts: Pairs) -> dict[str, Ints]:
        """Return what it adds to the table of requests.

        Parameters
        ----------
        requests : mapping of str to ndarray
            One row a request, by id.
        token_counts : (ndarray, ndarray) of int64
            As for `seen_ns`.

        Returns
        -------
        dict of str to ndarray
            ``received_ns``: when the engine was handed the request; ``first_token_seen_ns`` and
            ``finish_seen_ns``: when the client saw the first token and the end, -1 if never.
        """
        arrival_ns = whole_numbers(requests, "arrival_ns")
        return {
            "received_ns": self.received_ns(arrival_ns, whole_numbers(requests, "prompt_tokens")),
            "first_token_seen_ns": self.seen_ns(
                whole_numbers(requests, "first_token_ns"), token_counts
            ),
            "finish_seen_ns": self.seen_ns(whole_numbers(requests, "finish_ns"), token_counts),
        }


def _done_ns(come_ns: Ints, busy_ns: Ints) -> Ints:
    """Return when one server is done with each job (Lindley's recursion, all at once)."""
    worked_ns = np.cumsum(busy_ns)
    return np.maximum.accumulate(come_ns - (worked_ns - busy_ns)) + worked_ns


def _done_by_several_ns(come_ns: Ints, busy_ns: Ints, servers: int) -> Ints:
    free_ns = [0] * servers
    done_ns = []
    for come, busy in zip(come_ns.tolist(), busy_ns.tolist(), strict=True):
        done_ns.append(max(come, free_ns[0]) + busy)
        heapreplace(free_ns, done_ns[-1])
    return np.array(done_ns, dtype=np.int64)


def read_frontend(path: Path | str) -> Frontend:
    """Read the measured figures of a front end.

    Parameters
    ----------
    path : Path or str
        JSON with the parameters of `Frontend`, `source` among them, and optionally ``measured``:
        anything that says how.

    Raises
    ------
    SpecError
        If it cannot be read, or a key is unknown, missing or wrong; names file and key.
    """
    path = Path(path)
    data = read_json_object(path)
    for key in data:
        if key not in _FILE_KEYS:
            raise SpecError(f"{path}: unknown key {key!r}; {nearest(key, _FILE_KEYS)}")
    if not isinstance(data.get("source"), str):
        raise SpecError(f"{path}: source must say where the figures come from")
    for key in (*_SECONDS, "servers"):
        value = data.get(key, 1)
        wrong = isinstance(value, bool) or not isinstance(value, int | float)
        if wrong or (key == "servers" and value != int(value)):
            raise SpecError(f"{path}: {key} must be a number, got {value!r}")
    known = {f.name for f in fields(Frontend)}
    try:
        return Frontend(**{key: value for key, value in data.items() if key in known})
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from error


def write_frontend(path: Path, frontend: Frontend, measured: Mapping[str, object]) -> None:
    """Write figures of a front end, and how they were measured, as `read_frontend` reads them."""
    text = json.dumps({**asdict(frontend), "measured": dict(measured)}, indent=1)
    write_text(path, text + "\n")
