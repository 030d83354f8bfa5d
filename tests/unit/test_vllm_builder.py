"""The ledger over vLLM's memory grants what fits to the last token, row and block, or nothing."""

from types import SimpleNamespace

import pytest

from schedlab import core
from schedlab.sim.errors import InfeasiblePlan

if core.running() != "python":
    pytest.skip("policies run in vLLM with the Python core only", allow_module_level=True)

from schedlab.gpu_backend.vllm.builder import VllmPlanBuilder

WANTED = {"a": 4, "b": 5, "c": 1}
NEW_BLOCKS = {("a", 1): 1, ("b", 1): 0, ("c", 1): 1, ("a", 4): 2, ("b", 2): 1, ("b", 5): 2}


class Ledger(VllmPlanBuilder):
    """Writes down what is granted, and leaves out vLLM."""

    def __init__(self, tokens_left=10, rows_left=3, free_blocks=99, preempted=()):
        kv = SimpleNamespace(
            free_blocks=free_blocks, new_blocks_of=lambda state, n: NEW_BLOCKS[state, n]
        )
        self._vllm = SimpleNamespace(kv=kv, running={name: name for name in WANTED})
        self.tokens_left, self.rows_left = tokens_left, rows_left
        self.preempted = preempted
        self.granted = []
        self.holds = True

    def _require_no_decodes(self, name):
        pass

    def _chunk_limit(self, state, want, cached_tokens=0):
        return WANTED[state]

    def grant(self, state, num_tokens=None):
        self.granted.append((state, num_tokens))
        return self.holds


@pytest.mark.parametrize(
    ("left", "fits"),
    [
        ({"tokens_left": 3, "rows_left": 3, "free_blocks": 2}, True),
        ({"tokens_left": 2}, False),
        ({"rows_left": 2}, False),
        ({"free_blocks": 1}, False),
    ],
)
def test_decodes_are_granted_all_or_none(left, fits):
    builder = Ledger(**left)
    assert builder.grant_all(list(WANTED)) is fits
    assert builder.granted == [(name, 1) for name in WANTED] * fits


@pytest.mark.parametrize(
    ("left", "granted"),
    [
        ({"tokens_left": 10, "free_blocks": 5}, [("a", 4), ("b", 5), ("c", 1)]),
        ({"tokens_left": 6, "free_blocks": 3}, [("a", 4), ("b", 2)]),
        ({"tokens_left": 6, "free_blocks": 2}, None),
        ({"tokens_left": 9}, [("a", 4), ("b", 5)]),
        ({"rows_left": 2}, [("a", 4), ("b", 5)]),
        ({"preempted": ("a", "b")}, [("c", 1)]),
    ],
)
def test_running_requests_are_granted_in_order_while_there_is_budget(left, granted):
    builder = Ledger(**left)
    assert builder.grant_running() is (granted is not None)
    assert builder.granted == (granted or [])


def test_nobody_is_granted_by_who_decoded_last():
    builder = Ledger()
    assert builder.grant_again([], list(WANTED)) is False
    assert builder.granted == []


def test_memory_that_was_counted_and_is_not_there_is_an_error():
    builder = Ledger()
    builder.holds = False
    with pytest.raises(InfeasiblePlan, match="no memory for 'a', although it was counted"):
        builder.grant_all(["a"])
    with pytest.raises(InfeasiblePlan, match="no memory for 'a', although it was counted"):
        builder.grant_running()
