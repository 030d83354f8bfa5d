"""Figure of a forced replay: what steps took beside what they were predicted to take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedlab.experiments.figures.style import GREY, LOOKS, house_style, new_figure, plain_numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from schedlab.experiments.comparing.forced_replay import ForcedReplay

_LOW, _HIGH = 0.5, 1.5


def step_time_figure(found: ForcedReplay, title: str) -> Figure:
    """Draw recorded against predicted times of stretches of steps, and the error by batch size.

    Parameters
    ----------
    found : ForcedReplay
        What a recording said of the replay.
    title : str
        Name of the run.

    Returns
    -------
    Figure
        Left: each stretch between two recorded ends, told apart by whether prompts were computed
        in it; how many lie beyond the axis is written below. Right: recorded minus predicted time
        of a step of decodes only, by their number, with standard errors, and of one with prompts.
    """
    stretches = found.stretches()
    with house_style():
        figure = new_figure(8.4, 4.2)
        left, right = figure.subplots(1, 2)
        for has_prompts, label, look in (
            (False, "decodes only", LOOKS[0]), (True, "with prompts", LOOKS[1]),
        ):  # fmt: skip
            some = stretches[stretches[:, 2] == has_prompts]
            left.plot(
                some[:, 1], some[:, 0] / some[:, 1], linestyle="none", marker=look.marker,
                markersize=3, color=look.color, alpha=0.6, label=label,
            )  # fmt: skip
        left.axhline(1, color="#444444", linewidth=0.8)
        left.set_xscale("log")
        plain_numbers(left, "x")
        left.set_ylim(_LOW, _HIGH)
        share = stretches[:, 0] / stretches[:, 1]
        if outside := int(((share < _LOW) | (share > _HIGH)).sum()):
            note = f"{outside} of {len(share)} outside"
            left.text(0.02, 0.03, note, transform=left.transAxes, color=GREY, fontsize=8)
        left.set_xlabel("predicted time between two recorded ends of steps (ms)")
        left.set_ylabel("recorded / predicted")
        left.set_title(title)
        left.legend(loc="upper right")
        decodes = [d for d in found.differences if d.kind.endswith(" decodes")]
        prompts = [d for d in found.differences if d.kind == "a step with prompts"]
        shown = [*decodes, *prompts]
        labels = [d.kind.removesuffix(" decodes").replace("a step with ", "") for d in shown]
        right.bar(
            range(len(shown)), [d.mean_ms for d in shown],
            yerr=[d.standard_error_ms for d in shown], error_kw={"linewidth": 0.8},
            color=[LOOKS[0].color] * len(decodes) + [LOOKS[1].color] * len(prompts),
        )  # fmt: skip
        right.axhline(0, color="#444444", linewidth=0.8)
        right.set_xticks(range(len(shown)), labels, rotation=60, ha="right", fontsize=7)
        right.set_xlabel("decodes in a step; a step with prompts")
        right.set_ylabel("recorded - predicted (ms)")
        right.set_title("error of a step")
    return figure
