"""LLMServingSim profile bundles: kernel timings of vLLM, layer by layer.

Source: casys-kaist/LLMServingSim, folder profiler/perf and its documentation ("Output bundle").
A bundle is ``perf/<HARDWARE>/<org>/<model>/<variant>/`` with meta.yaml and ``tp<N>/*.csv``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from pathlib import Path

from schedlab.sim.cost.attention import Skew
from schedlab.sim.cost.importers.all_reduce import all_reduce_curve
from schedlab.sim.cost.importers.csv_table import CsvTable, read_csv
from schedlab.sim.cost.importers.experts import Sharing, expert_curves
from schedlab.sim.cost.importers.imported import Imported
from schedlab.sim.cost.importers.layer_list import layer_calls
from schedlab.sim.cost.importers.skew_fit import read_skew
from schedlab.sim.cost.importers.yaml_section import YamlSection, read_section
from schedlab.sim.cost.table_profile import Curve, RingAllReduce, TableProfile
from schedlab.sim.errors import SpecError, nearest
from schedlab.sim.files import read_json_object
from schedlab.sim.hardware.dtypes import dtype_name
from schedlab.sim.hardware.gpus import canonical_gpu
from schedlab.sim.hardware.model_shape import ModelShape
from schedlab.sim.hardware.models import canonical_model, model

# Layers behind which tensor parallelism sums over devices.
_REDUCED_LAYERS = ("o_proj", "down_proj", "moe")
_PUBLISHED = {
    ("rtx-4090", "llama-3.1-8b", "bf16", 1): (0.45, "9b26e3263fd775ab"),
    ("rtx-pro-6000", "llama-3.1-8b", "bf16", 1): (2.1, "052c215e5f1e9b41"),
}
"""Per cent that LLMServingSim 2.0 published of its own predictions, by hardware, model, variant and
GPUs, and the `_fingerprint` of the tables that gave them."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a bundle does not say of itself.

    Attributes
    ----------
    tensor_parallel_size : int
        Which ``tp<N>`` folder to take.
    model_config : Path or None
        Hugging Face config.json; the model's name in the table of models if absent.
    architecture : Path or None
        The list of layers; looked for beside the bundle if absent.
    link_latency_s, link_bytes_per_s : float
        Of the device-to-device link, for all-reduces and the exchange between engines.
    all_reduce : Path or None
        Measured all-reduces (see `all_reduce_curve`), in place of a ring over that link.
    data_parallel_size, expert_parallel : int, bool
        Engines that share the experts of a mixture-of-experts model.
    use_skew : bool or None
        Whether to correct for unequal contexts; what meta.yaml says if absent.
    """

    tensor_parallel_size: int = 1
    model_config: Path | None = None
    architecture: Path | None = None
    link_latency_s: float = 10e-6
    link_bytes_per_s: float = 16e9
    all_reduce: Path | None = None
    data_parallel_size: int = 1
    expert_parallel: bool = False
    use_skew: bool | None = None


def import_bundle(path: Path, options: Options) -> Imported:
    """Return the profile of one bundle.

    Parameters
    ----------
    path : Path
        The variant's folder, e.g. ``perf/RTX4090/meta-llama/Llama-3.1-8B/bf16``.
    options : Options
        What it does not say.

    Returns
    -------
    Imported
        Tables, meta.json and what had to be assumed.

    Raises
    ------
    SpecError
        If a file is missing or malformed, or a layer of the list has no timings.
    """
    meta = read_section(path / "meta.yaml")
    hardware, variant = _required(meta, "hardware"), meta.text("variant") or "bf16"
    tp = options.tensor_parallel_size
    folder = path / f"tp{tp}"
    if not folder.is_dir():
        there = sorted(p.name for p in path.glob("tp*") if p.is_dir())
        raise SpecError(f"{path}: no folder tp{tp}; there are {', '.join(there) or 'none'}")
    config_path = options.model_config or _near(path, f"model_configs/{meta.text('model')}.json")
    shape = model(str(config_path)) if config_path else model(_required(meta, "model"))
    _check_sharing(options, shape)
    layers = layer_calls(_architecture(path, meta, options), shape)
    assumptions: list[str] = []
    by_tokens = tuple(_dense(folder, layers, shape, options, assumptions))
    reduced = sum(calls for name, calls in layers.items() if name in _REDUCED_LAYERS)
    all_reduce = None
    if options.all_reduce is not None:
        if tp == 1:
            raise SpecError("--all-reduce needs several devices: --tensor-parallel-size")
        curve, assumed = all_reduce_curve(options.all_reduce, shape, tp, reduced)
        by_tokens += (curve,)
        assumptions.append(assumed)
    elif tp > 1:
        bytes_per_token = shape.hidden_size * 2.0
        all_reduce = RingAllReduce(
            int(reduced), tp, bytes_per_token, options.link_latency_s, options.link_bytes_per_s
        )
        assumptions.append(
            f"all-reduces behind {' and '.join(x for x in _REDUCED_LAYERS if x in layers)} of "
            f"every layer take {options.link_latency_s * 1e6:g} us plus a ring at "
            f"{options.link_bytes_per_s / 1e9:g} GB/s: the bundle measures kernels of one rank only"
        )
    skew = _skew(folder, meta, tp, options, assumptions)
    profile = TableProfile(
        by_tokens=by_tokens,
        by_requests=_per_sequence(folder, layers),
        attention=_attention(folder),
        attention_calls=int(layers["attention"]),
        skew=skew,
        all_reduce=all_reduce,
    )
    return Imported(
        profile=profile,
        meta={
            "model": shape.name,
            "hardware": hardware,
            "dtype": _dtype(meta, variant),
            "tensor_parallel_size": tp,
            "data_parallel_size": options.data_parallel_size,
            "expert_parallel": options.expert_parallel,
            "source": "LLMServingSim",
            **_published_error(
                (canonical_gpu(hardware), canonical_model(shape.name), variant, tp),
                folder,
                layers,
                has_skew=skew is not None,
            ),
            "gpu": meta.text("gpu"),
            "vllm_version": meta.text("vllm_version"),
            "profiled_at": meta.text("profiled_at") or "",
            "layers": {name: calls for name, calls in layers.items()},
        },
        assumptions=(
            "kernel time in eager mode, one layer with dummy weights: no host time, no launch gaps",
            *assumptions,
        ),
    )


def _published_error(
    of: tuple[str, str, str, int], folder: Path, layers: Mapping[str, float], *, has_skew: bool
) -> dict[str, str]:
    """Return what to say of a profile's error: nothing unless it is of these very tables."""
    percent, fingerprint = _PUBLISHED.get(of, (0.0, ""))
    if not fingerprint or _fingerprint(folder, layers, has_skew=has_skew) != fingerprint:
        return {}
    told = f"{percent:g} %, mean of 15 latencies of one recorded run, by LLMServingSim 2.0"
    return {"published_error": told}


def _fingerprint(folder: Path, layers: Mapping[str, float], *, has_skew: bool) -> str:
    """Return what differs between bundles as soon as a table or the list of layers does."""
    names = ["dense.csv", "per_sequence.csv", "attention.csv", *["skew_fit.csv"] * has_skew]
    texts = [(folder / name).read_text(encoding="utf-8-sig") for name in names]
    return sha256("\n".join([*texts, repr(sorted(layers.items()))]).encode()).hexdigest()[:16]


def read_link(path: Path) -> tuple[float, float]:
    """Return latency (s) and bandwidth (bytes/s) of the links in a cluster's config.json.

    Raises
    ------
    SpecError
        If the file cannot be read, or lacks ``link_latency`` (ns) or ``link_bw`` (GB/s).
    """
    data = read_json_object(path)
    values = []
    for key in ("link_latency", "link_bw"):
        value = data.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise SpecError(f"{path}: {key} must be a positive number, got {value!r}")
        values.append(float(value))
    return values[0] * 1e-9, values[1] * 1e9


def _architecture(path: Path, meta: YamlSection, options: Options) -> Path:
    """Return the file with the layers of a step."""
    name = str(meta.text("architecture"))
    found = options.architecture or _near(
        path, f"model_configs/{name}.architecture.yaml", f"models/{name}.yaml"
    )
    if found is None:
        raise SpecError(
            f"{path}: no layer list of architecture {name!r} near the bundle "
            f"(model_configs/{name}.architecture.yaml or models/{name}.yaml); give --architecture"
        )
    return found


def _dense(
    folder: Path,
    layers: Mapping[str, float],
    shape: ModelShape,
    options: Options,
    assumptions: list[str],
) -> list[Curve]:
    """Return the curves of all layers whose time depends on tokens."""
    per_request = set(_by_layer(read_csv(folder / "per_sequence.csv"), "sequences"))
    dense = _by_layer(read_csv(folder / "dense.csv", ("layer", "tokens", "time_us")), "tokens")
    curves = []
    for name, calls in layers.items():
        if name == "attention" or name in per_request:
            continue
        if name == "moe":
            path = folder.parent / "tp1" / "moe.csv"  # measured at full width only
            if not path.is_file():
                path = folder / "moe.csv"
            more, assumed = expert_curves(path, calls, shape, _sharing(options))
            curves += more
            assumptions += assumed
        elif name in dense:
            at, us = dense[name]
            curves.append(Curve(name, calls, at, us))
        else:
            raise SpecError(
                f"{folder / 'dense.csv'}: no timings of layer {name!r}; {nearest(name, dense)}"
            )
    return curves


def _sharing(options: Options) -> Sharing:
    return Sharing(
        num_shares=options.tensor_parallel_size * options.data_parallel_size,
        by_width=not options.expert_parallel,
        num_engines=options.data_parallel_size,
        link_latency_s=options.link_latency_s,
        link_bytes_per_s=options.link_bytes_per_s,
    )


def _check_sharing(options: Options, shape: ModelShape) -> None:
    """Refuse engines that share nothing."""
    size = options.data_parallel_size
    if not shape.num_experts and (size > 1 or options.expert_parallel):
        raise SpecError(
            f"{shape.name} has no experts: leave out --data-parallel-size and --expert-parallel; "
            "its engines share nothing, so the profile is that of one of them"
        )
    if size > 1 and not options.expert_parallel:
        raise SpecError(
            f"--data-parallel-size {size} needs --expert-parallel: engines that each have all "
            "experts share nothing (leave both out), and experts sliced over engines were not "
            "measured"
        )


def _per_sequence(folder: Path, layers: Mapping[str, float]) -> tuple[Curve, ...]:
    curves = _by_layer(read_csv(folder / "per_sequence.csv"), "sequences")
    return tuple(
        Curve(name, layers[name], at, us) for name, (at, us) in curves.items() if name in layers
    )


def _by_layer(table: CsvTable, key: str) -> dict[str, tuple[tuple[float, ...], tuple[float, ...]]]:
    rows = zip(
        table.text("layer"),
        table.whole(key, least=1),
        range(2, len(table) + 2),
        table.numbers("time_us", least=0),
        strict=True,
    )
    curves = {}
    for name, group in groupby(sorted(rows), key=lambda row: row[0]):
        _, at, lines, us = zip(*group, strict=True)
        for i in range(1, len(at)):
            if at[i] == at[i - 1]:
                raise SpecError(
                    f"{table.path}:{lines[i]}: layer {name!r} at {key} {at[i]} is there twice"
                )
        curves[name] = (at, us)
    return curves


def _attention(folder: Path) -> dict[str, list[float] | list[int]]:
    table = read_csv(folder / "attention.csv", ("n_decode", "kv_decode", "time_us"))
    # Newer bundles have the prefills' mean key length instead of their context, and rows of other
    # kernels than plain attention and of decodes of several tokens.
    kept = [True] * len(table)
    if "layer" in table.columns:
        kept = [name == "attention" for name in table.text("layer")]
    if "decode_q_len" in table.columns:
        single = [q <= 1 for q in table.whole("decode_q_len")]
        kept = [a and b for a, b in zip(kept, single, strict=True)]
    chunk = "prefill_tokens" if "prefill_tokens" in table.columns else "prefill_chunk"
    by_key = "prefill_key" in table.columns
    columns: dict[str, list[float] | list[int]] = {
        "prefill_chunk": table.whole(chunk, least=0),
        "prefill_key" if by_key else "kv_prefill": (
            table.numbers("prefill_key", least=0) if by_key else table.whole("kv_prefill", least=0)
        ),
        "num_decodes": table.whole("n_decode", least=0),
        "kv_decode": table.whole("kv_decode", least=0),
        "us": table.numbers("time_us", least=0),
    }
    points: dict[tuple[float, ...], float] = {}
    for line, (is_kept, *point, us) in enumerate(zip(kept, *columns.values(), strict=True), 2):
        if not is_kept:
            continue
        if us == 0:
            raise SpecError(f"{table.path}:{line}: time_us must be above 0")
        if tuple(point) in points:
            told = ", ".join(f"{key} {at:g}" for key, at in zip(columns, point, strict=False))
            raise SpecError(f"{table.path}:{line}: {told} is there twice")
        points[tuple(point)] = us
    # Of what was not measured alone the other kind would stand in.
    if not any(chunk and not n for chunk, _, n, _ in points):
        raise SpecError(f"{table.path}: no row of attention to prefills alone")
    if not any(n and not chunk for chunk, _, n, _ in points):
        raise SpecError(f"{table.path}: no row of attention to decodes alone")
    values = zip(*((*point, us) for point, us in points.items()), strict=True)
    return {key: list(column) for key, column in zip(columns, values, strict=True)}


def _skew(
    folder: Path, meta: YamlSection, tp: int, options: Options, assumptions: list[str]
) -> Skew | None:
    """Return the correction for unequal contexts, if meta.yaml enables it."""
    fit = meta.section("skew_fit")
    if fit.truth("enabled") if options.use_skew is None else options.use_skew:
        return read_skew(folder, fit, tp)
    if (folder / "skew_fit.csv").is_file():
        assumptions.append("skew_fit.csv is left unused, as meta.yaml says")
    return None


def _near(path: Path, *names: str) -> Path | None:
    """Find a file by a relative name beside the bundle or beside a folder that holds it."""
    for folder in path.absolute().parents:
        for name in names:
            if (folder / name).is_file():
                return folder / name
    return None


def _dtype(meta: YamlSection, variant: str) -> str:
    """Return the format of a variant such as ``fp8-kvfp8``: that of the weights."""
    try:
        return dtype_name(variant.partition("-")[0])
    except SpecError as error:
        raise meta.error("variant", f"begins with no format: {error}") from error


def _required(meta: YamlSection, key: str) -> str:
    text = meta.text(key)
    if not text:
        raise SpecError(f"{meta.file}: key {key!r} is missing")
    return text
