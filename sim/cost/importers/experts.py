"""The time of a mixture of experts by tokens, from measurements by tokens and touched experts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from schedlab.sim.cost.attention import line_us
from schedlab.sim.cost.importers.csv_table import read_csv
from schedlab.sim.cost.table_profile import Curve
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.model_shape import ModelShape

_BYTES = 2.0  # activations are 16 bits wide


@dataclass(frozen=True, slots=True)
class Sharing:
    """How the experts are split over devices, and what links them.

    Attributes
    ----------
    num_shares : int
        Devices that share the experts of a layer; 1 = every device has all.
    by_width : bool
        Whether a share is a slice of every expert (tensor parallelism) and not whole experts
        (expert parallelism).
    num_engines : int
        Engines whose tokens meet at the experts (data parallelism with expert parallelism).
    link_latency_s, link_bytes_per_s : float
        Of the exchange between them.
    """

    num_shares: int
    by_width: bool
    num_engines: int
    link_latency_s: float
    link_bytes_per_s: float


def expert_curves(
    path: Path, calls: float, shape: ModelShape, sharing: Sharing
) -> tuple[list[Curve], list[str]]:
    """Turn moe.csv into curves of the tokens that meet at the experts.

    Parameters
    ----------
    path : Path
        Columns tokens, activated_experts, time_us and, in newer files, ep: how many shares the
        experts, and the choices of each token, were divided by when they were measured.
    calls : float
        Mixture layers in a step.
    shape : ModelShape
        How many experts there are, and how many a token takes.
    sharing : Sharing
        Who computes what.

    Returns
    -------
    curves : list of Curve
        The experts, and the exchange of tokens if several engines share them.
    assumptions : list of str
        What the file does not say.

    Raises
    ------
    SpecError
        If the file is missing or malformed.

    Notes
    -----
    T tokens touch ``E/N * (1 - (1 - k/E)**T)`` experts of one of N shares under uniform,
    independent routing, and bring ``T * k/N`` pairs of a token and an expert there. A row of ep d
    was measured with k/d pairs a token, so the time is that of ``T * d/N`` tokens in the table:
    with N shares, every expert touched and whole experts measured, ``table(T/N, E/N)``. The curve
    goes as far as N devices with as many tokens each as were measured.

    A slice of the width of all experts has the weights and the arithmetic of as large a share of
    whole experts, and is priced as that.

    Where several engines share the experts, T counts the tokens of all of them; they come by an
    all-gather and leave by a reduce-scatter, each
    ``latency + (N-1)/N * T * hidden_size * 2 bytes / bandwidth``, N being engines.
    """
    table = read_csv(path, ("tokens", "activated_experts", "time_us"))
    degrees = table.whole("ep") if "ep" in table.columns else [1] * len(table)
    shares = sharing.num_shares
    # Slices of whole experts were measured, never slices of their width.
    degree = 1 if sharing.by_width and 1 in degrees else _nearest(shares, degrees)
    assumptions = [
        "experts are chosen uniformly and independently, so T tokens touch E*(1-(1-k/E)^T) of them"
    ]
    if shares > 1 and sharing.by_width:
        assumptions.append(
            f"each of {shares} devices has experts of 1/{shares} of their full width; they are "
            f"priced as 1/{shares} of the experts at full width, which is what was measured "
            "(--expert-parallel if the engine spreads whole experts)"
        )
    elif degree != shares:
        assumptions.append(
            f"experts were measured for ep {degree}; for ep {shares} a device is charged for its "
            "share of tokens and experts in that table"
        )
    grid: dict[int, dict[int, float]] = {}
    measured_rows = zip(
        degrees, table.whole("tokens", least=1), table.whole("activated_experts", least=0),
        table.numbers("time_us", least=0),
        strict=True,
    )  # fmt: skip
    for line, (ep, tokens, experts, us) in enumerate(measured_rows, start=2):
        if ep != degree:
            continue
        row = grid.setdefault(tokens, {})
        if experts in row:
            raise SpecError(
                f"{path}:{line}: tokens {tokens}, activated_experts {experts} is there twice"
            )
        row[experts] = us
    rows = [(sorted(row), [row[e] for e in sorted(row)]) for _, row in sorted(grid.items())]
    measured = sorted(grid)
    gathered = {max(t * shares // degree, 1) for t in measured}
    # Between measured counts the number of touched experts bends, so points are added.
    known = gathered | set(measured)
    between = {t * quarters // 4 for t in known for quarters in (5, 6, 7)}
    at = sorted(t for t in between | known if t <= max(gathered))
    missed = 1 - shape.experts_per_token / shape.num_experts
    times = []
    for tokens in at:
        touched = shape.num_experts / shares * (1 - missed**tokens)
        across = [line_us(x, y, min(touched, x[-1])) for x, y in rows]
        times.append(line_us(measured, across, tokens * degree / shares))
    engines = sharing.num_engines
    curves = [Curve("moe", calls, tuple(at), tuple(times), shared=engines > 1)]
    if engines > 1:
        share = (engines - 1) / engines
        per_token_s = share * shape.hidden_size * _BYTES / sharing.link_bytes_per_s
        ends = (float(at[0]), float(max(at[-1], at[0] + 1)))
        exchange = tuple(2e6 * (sharing.link_latency_s + per_token_s * t) for t in ends)
        curves.append(Curve("exchange", calls, ends, exchange, shared=True))
        assumptions.append(
            f"the {engines} engines exchange tokens in {sharing.link_latency_s * 1e6:g} us plus "
            f"traffic at {sharing.link_bytes_per_s / 1e9:g} GB/s, twice a layer"
        )
    return curves, assumptions


def _nearest(shares: int, degrees: Iterable[int]) -> int:
    return min(set(degrees), key=lambda degree: (abs(degree - shares), degree))
