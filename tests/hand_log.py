"""A run's log written by hand: when each token came out, and what the steps were."""

import numpy as np

from schedlab.sim.record.token_times import TokenTimes

NOTHING = np.zeros(0, dtype=np.int64)


def table(name, values):
    values, counts = np.unique(values, return_counts=True)
    return {name: values, "count": counts}


class HandLog:
    """The log of requests whose tokens came out at stated times.

    `token_gaps` and `token_counts` are taken from the list of times, token by token.
    """

    def __init__(self, tokens_ns, steps=None, preemptions=None):
        self._tokens_ns = {number: np.array(times) for number, times in tokens_ns.items()}
        self._steps = steps or {name: NOTHING for name in ("start_ns", "end_ns", "num_decodes")}
        self._preemptions = preemptions

    def steps(self):
        return self._steps

    def preemptions(self):
        if self._preemptions is None:
            return {"id": NOTHING, "evicted_ns": NOTHING, "resumed_ns": NOTHING}
        return {name: np.array(column) for name, column in self._preemptions.items()}

    def token_gaps(self, ids=None):
        gaps = [np.diff(times) for number, times in self._of(ids)]
        return table("gap_ns", np.concatenate([NOTHING, *gaps]))

    def token_counts(self, ids=None):
        times = [times for _, times in self._of(ids)]
        return table("time_ns", np.concatenate([NOTHING, *times]))

    def token_times(self, request_id):
        return self._tokens_ns[request_id]

    def token_times_of_all(self):
        stints = [(i, time, 0, 0) for i, times in self._tokens_ns.items() for time in times]
        return TokenTimes(np.array(stints, dtype=np.int64).reshape(-1, 4), NOTHING)

    def _of(self, ids):
        wanted = self._tokens_ns if ids is None else np.asarray(ids).tolist()
        return [(number, self._tokens_ns[number]) for number in wanted]
