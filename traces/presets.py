"""Named workloads: lengths and a plausible arrival process of published traces, without the files.

Prompt and output lengths of a preset are drawn independently, and nothing is said of shared
prefixes, sessions or text. Where that matters, read the trace itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from schedlab.sim.errors import SpecError, nearest
from schedlab.traces import quantiles
from schedlab.traces.lengths import Lengths, exponential, fixed, quantile_table

_AZURE = (
    "Azure LLM inference trace 2023, {} (Azure/AzurePublicDataset, CC-BY 4.0; Patel et al., "
    '"Splitwise: Efficient generative LLM inference using phase splitting", ISCA 2024)'
)
_LLUMNIX = (
    'mean, P50 and P99 of {} as given in Sun et al., "Llumnix: Dynamic Scheduling for Large '
    'Language Model Serving", OSDI 2024, table 1; the curve between these figures is ours'
)
_INDEPENDENT = "prompt and output drawn independently; rank correlation in the trace {}"


@dataclass(frozen=True)
class Preset:
    """A workload that can be drawn at any size and rate.

    Attributes
    ----------
    name, summary, source : str
        What it is called, what it is, where its figures come from and under which licence.
    rate : float
        Mean requests a second of the source, or a round number where it has no times.
    process : str
        Name of the arrival process (see `schedlab.traces.arrivals.PROCESSES`).
    parameters : mapping of str to float
        Its parameters other than the rate.
    prompt, output : Lengths
        Length distributions.
    notes : tuple of str
        What it leaves out.
    """

    name: str
    summary: str
    source: str
    prompt: Lengths
    output: Lengths
    rate: float = 1.0
    process: str = "poisson"
    parameters: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def preset(name: str) -> Preset:
    """Return the preset of that name.

    Raises
    ------
    SpecError
        If there is none; the nearest name is given.
    """
    if name not in PRESETS:
        raise SpecError(f"unknown preset {name!r}; {nearest(name, PRESETS)}")
    return PRESETS[name]


def _table(table: quantiles.Table) -> Lengths:
    """Return the distribution of a table of quantiles."""
    probabilities, tokens = zip(*table, strict=True)
    return quantile_table(probabilities, tokens)


_ALL = (
    Preset(
        name="azure-conv",
        summary="chat service: prompts 1,155 tokens on average, answers 211, slowly varying rate",
        source=_AZURE.format("conversation"),
        prompt=_table(quantiles.AZURE_CONV_PROMPT),
        output=_table(quantiles.AZURE_CONV_OUTPUT),
        rate=5.53,
        process="varying",
        parameters={"sigma": 0.23, "timescale_s": 600.0},
        notes=(_INDEPENDENT.format("+0.07"),),
    ),
    Preset(
        name="azure-code",
        summary="code completion: prompts 2,048 tokens on average, answers 28, bursts and lulls",
        source=_AZURE.format("code"),
        prompt=_table(quantiles.AZURE_CODE_PROMPT),
        output=_table(quantiles.AZURE_CODE_OUTPUT),
        rate=2.566,
        process="on_off",
        parameters={"mean_on_s": 17.0, "mean_off_s": 43.0},
        notes=(
            _INDEPENDENT.format("-0.02"),
            "bursts of one rate: 10 s counts vary less (Fano factor about 51) than in the trace "
            "(71)",
        ),
    ),
    Preset(
        name="mooncake-conversation",
        summary="long-context chat: prompts 12,035 tokens on average, answers 343",
        source=(
            "Mooncake conversation trace (kvcache-ai/Mooncake, Apache-2.0; Qin et al., "
            '"Mooncake: Trading More Storage for Less Computation", FAST 2025)'
        ),
        prompt=_table(quantiles.MOONCAKE_CONVERSATION_PROMPT),
        output=_table(quantiles.MOONCAKE_CONVERSATION_OUTPUT),
        rate=3.401,
        notes=(
            _INDEPENDENT.format("+0.07"),
            "no shared prefixes, of which the trace has many (37 % of its prompt blocks)",
        ),
    ),
    Preset(
        name="arxiv-summarization",
        summary="summaries of papers: prompts 2,588 tokens on average, answers 291; no times",
        source=(
            "arxiv-summarization lengths with the Llama-2 tokenizer, at most 4,096 tokens in all "
            "(microsoft/vidur, MIT)"
        ),
        prompt=_table(quantiles.ARXIV_SUMMARIZATION_PROMPT),
        output=_table(quantiles.ARXIV_SUMMARIZATION_OUTPUT),
        notes=(
            _INDEPENDENT.format("-0.11 (Pearson -0.46)")
            + "; sums above 4,096 tokens occur here, not in the source",
        ),
    ),
    Preset(
        name="sharegpt",
        summary="shared chats: prompts 306 tokens on average (median 74), answers 500; no times",
        source=_LLUMNIX.format("ShareGPT"),
        prompt=_table(quantiles.SHAREGPT_PROMPT),
        output=_table(quantiles.SHAREGPT_OUTPUT),
        notes=("a curve through three published figures a column, not the data",),
    ),
    Preset(
        name="burstgpt",
        summary="campus GPT-4 chats: prompts 830 tokens on average, answers 271",
        source=_LLUMNIX.format("BurstGPT"),
        prompt=_table(quantiles.BURSTGPT_PROMPT),
        output=_table(quantiles.BURSTGPT_OUTPUT),
        notes=(
            "a curve through three published figures a column, not the data",
            "arrivals are plain Poisson: the burstiness of the trace is not reproduced",
        ),
    ),
    Preset(
        name="anyscale-exp",
        summary="static against continuous batching: prompts 512, outputs exponential, mean 128",
        source=(
            'Anyscale, "How continuous batching enables 23x throughput in LLM inference", 2023: '
            "1,000 prompts of 512 tokens at once, outputs exponential with mean 128, at most 1,536"
        ),
        prompt=fixed(512),
        output=exponential(128, cap=1536),
        process="all_at_once",
    ),
    Preset(
        name="fixed",
        summary="every prompt 512 tokens, every answer 128: nothing varies but the arrivals",
        source="a baseline without any length variance",
        prompt=fixed(512),
        output=fixed(128),
    ),
)
PRESETS: dict[str, Preset] = {one.name: one for one in _ALL}
