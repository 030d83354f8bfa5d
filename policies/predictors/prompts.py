"""What a trained model may look at: requests as a server sees them when they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from schedlab.sim.errors import SpecError

FORMATS_WITH_TEXT = ("sharegpt", "vllm_custom", "schedlab with a prompt column")


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts in columns of equal length; there is no output length among them.

    Attributes
    ----------
    text : sequence of str
        The prompts.
    prompt_tokens : ndarray of int64, shape (n,)
        Their lengths.
    application : sequence of str or None
        Where each comes from; `None` where the trace does not tell.
    """

    text: Sequence[str]
    prompt_tokens: npt.NDArray[np.int64]
    application: Sequence[str | None]

    def __len__(self) -> int:
        return len(self.text)

    def take(self, rows: npt.NDArray[np.int64]) -> Prompts:
        """Return some of the rows."""
        return Prompts(
            [self.text[i] for i in rows],
            self.prompt_tokens[rows],
            [self.application[i] for i in rows],
        )


def prompts(
    text: npt.NDArray[np.object_] | None,
    prompt_tokens: npt.NDArray[np.int64],
    application: npt.NDArray[np.object_] | None,
) -> Prompts:
    """Return the columns of a trace as prompts.

    Raises
    ------
    SpecError
        If the text of a prompt is not there; says which trace formats have it.
    """
    readers = f"formats with text are {', '.join(FORMATS_WITH_TEXT)}"
    if text is None:
        raise SpecError(f"a trained predictor reads prompts, and this trace has no text; {readers}")
    absent = [i for i, prompt in enumerate(text) if not isinstance(prompt, str)]
    if absent:
        raise SpecError(
            f"a trained predictor reads prompts, and {len(absent):,} of {len(text):,} requests "
            f"have no text (row {absent[0]} is the first; clip_prompt removes it); {readers}"
        )
    apps = [None] * len(text) if application is None else list(application)
    return Prompts(list(text), prompt_tokens, apps)
