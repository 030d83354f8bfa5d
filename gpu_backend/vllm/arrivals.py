"""What a policy sees of a request that arrives: what it carries, and what is predicted of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from schedlab.policies.predictors import registry
from schedlab.policies.predictors.predictor import PredictionInputs, Predictor
from schedlab.sim.errors import SpecError, nearest
from schedlab.sim.own_code import raised
from schedlab.sim.request import LARGEST, SHORTEST_TARGET_MS, Request, Slo

_NAMES = ("application", "session", "tenant")
_KEYS = (*_NAMES, "predicted_tokens", "slo")


class Arrivals:
    """Describes vLLM's requests to a policy.

    Parameters
    ----------
    predictor : mapping or str, optional
        Name and knobs of the predictor that is run as requests arrive. What a request carries is
        believed before what is predicted.
    open_tokenizer : callable, optional
        Returns the server's tokenizer, or None if it has none; called if there is a predictor.

    Raises
    ------
    SpecError
        If the predictor derives what it says from true lengths, which a server does not know, or
        reads text and the server has no tokenizer.
    """

    def __init__(
        self,
        predictor: object = None,
        open_tokenizer: Callable[[], Any] = lambda: None,
    ) -> None:
        self._predictor = None if predictor is None else _make_predictor(predictor)
        self._tokenizer = None if self._predictor is None else open_tokenizer()
        self._rng = np.random.default_rng(0)
        if self._predictor and self._predictor.reads_text and self._tokenizer is None:
            raise SpecError(
                f"predictor {type(self._predictor).__name__} reads text, and this server has no "
                "tokenizer (--skip-tokenizer-init)"
            )

    def seen(self, request: Any, request_id: int, arrival_ns: int) -> Request:  # noqa: ANN401
        """Return what a policy sees of a request.

        Raises
        ------
        SpecError
            If what it carries is no mapping, has an unknown key or a wrong value, or the predictor
            fails; names the key or the predictor.
        """
        told = carried(request.sampling_params.extra_args)
        if self._predictor is not None and "predicted_tokens" not in told:
            told["predicted_tokens"] = self._predicted(request, told.get("application"))
        return bare(request, request_id, arrival_ns, **told)

    def _predicted(self, request: Any, application: str | None) -> float:  # noqa: ANN401 - vLLM's
        predictor, tokenizer, ids = self._predictor, self._tokenizer, request.prompt_token_ids
        assert predictor is not None
        name = type(predictor).__name__
        try:
            text = None
            if tokenizer is not None and ids is not None:
                text = tokenizer.decode(ids, skip_special_tokens=True)
            inputs = PredictionInputs(
                prompt_tokens=np.array([request.num_prompt_tokens]),
                output_tokens=np.empty(0, dtype=np.int64),
                rng=self._rng,
                application=_column(application),
                prompt=_column(text),
                prompt_ids=_column(ids),
            )
            (predicted,) = predictor.predict(inputs)
            is_measure = math.fabs(predicted) <= LARGEST
        except Exception as error:
            said = raised(error, type(predictor))
            raise SpecError(f"predictor {name}: {said}") from error
        if not is_measure:
            bounds = f"{-LARGEST:g} to {LARGEST:g}"
            raise SpecError(f"predictor {name} says {predicted}, which is no number of {bounds}")
        return float(predicted)


def bare(request: Any, request_id: int, arrival_ns: int, **told: Any) -> Request:  # noqa: ANN401
    """Return a request with what vLLM itself knows of it, and what is `told` beside.

    Hashes of the blocks of its prompt are chained there as names are here; without prefix caching
    vLLM makes none. 64 bits of each tell them apart.
    """
    return Request(
        id=request_id,
        arrival_ns=arrival_ns,
        prompt_tokens=request.num_prompt_tokens,
        max_tokens=request.max_tokens,
        priority=request.priority,
        prefix_hash_ids=tuple([int.from_bytes(name[:8], "big") for name in request.block_hashes]),
        **told,
    )


def carried(extra_args: Mapping[str, object] | None) -> dict[str, Any]:
    """Return what a request carries for a policy in ``SamplingParams.extra_args["schedlab"]``.

    Parameters
    ----------
    extra_args : mapping or None
        ``"schedlab"`` in it is a mapping, or its JSON text: ``vllm_xargs`` of a request over HTTP
        takes no mappings.

    Returns
    -------
    dict
        Checked arguments of `Request`.

    Raises
    ------
    SpecError
        If it is no mapping, or has an unknown key or a wrong value; names the key.
    """
    found = (extra_args or {}).get("schedlab", {})
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except (ValueError, RecursionError) as error:
            raise SpecError(f"schedlab: not a mapping in JSON: {error}") from None
    told = checked_keys(found, _KEYS, "schedlab")
    if told.get("slo") is not None:
        targets = checked_keys(told["slo"], Slo._fields, "schedlab.slo")
        told["slo"] = Slo(
            **{
                key: _number(value, f"schedlab.slo.{key}", SHORTEST_TARGET_MS)
                for key, value in targets.items()
                if value is not None
            }
        )
    if told.get("predicted_tokens") is not None:
        told["predicted_tokens"] = _number(told["predicted_tokens"], "schedlab.predicted_tokens")
    for key in _NAMES:
        if not isinstance(told.get(key), str | int | None):
            raise SpecError(f"schedlab.{key} must be a name, got {told[key]!r:.80}")
    return {key: value for key, value in told.items() if value is not None}


def checked_keys(found: object, known: tuple[str, ...], where: str) -> dict[str, Any]:
    """Return a mapping that has known keys only, or raise SpecError.

    Parameters
    ----------
    found : object
        What was given.
    known : tuple of str
        The keys it may have.
    where : str
        How a message calls it.
    """
    if not isinstance(found, Mapping):
        raise SpecError(f"{where} must be a mapping, got {found!r:.80}")
    for key in found:
        if key not in known:
            raise SpecError(f"{where}: unknown key {key!r:.80}; {nearest(str(key), known)}")
    return dict(found)


def _number(value: object, where: str, least: float = -LARGEST) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and least <= value <= LARGEST:  # type: ignore[operator]
        return float(value)  # type: ignore[arg-type]
    raise SpecError(f"{where} must be a number of {least:g} to {LARGEST:g}, got {value!r:.80}")


def _make_predictor(spec: object) -> Predictor:
    knobs: dict[str, Any] = dict(spec) if isinstance(spec, Mapping) else {"name": spec}
    name = knobs.pop("name", None)
    if not isinstance(name, str):
        raise SpecError(f"policy.predictor must be a name, or a mapping with one, got {spec!r:.80}")
    if registry.predictor_class(name).emulated:
        raise SpecError(
            f"predictor {name!r} takes the true length and spoils it, and a server does not know "
            "that; predictors that run in one: trained, constant, my_module:MyPredictor"
        )
    return registry.make(name, **knobs)


def _column(value: Any) -> Any:  # noqa: ANN401 - of one row
    """Return a column of objects of one row; None for None."""
    if value is None:
        return None
    column = np.empty(1, dtype=object)
    column[0] = value
    return column
