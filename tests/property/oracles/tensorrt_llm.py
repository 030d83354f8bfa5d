"""TensorRT-LLM's capacity policies.

Source: NVIDIA TensorRT-LLM, capacityScheduler.cpp: who is under way has blocks reserved for its
declared end; a request starts, in order of arrival, if its own fit as well, and the first that
does not ends it. `max_utilization` asks for what is computed now alone; `static_batch` lets
nobody join.
"""

from tests.property.oracles.loops import continuous


def knobs(rng):
    return {
        "capacity_policy": rng.choice(["guaranteed_no_evict", "max_utilization", "static_batch"])
    }


def decide(server, step, capacity_policy):
    config = server.config

    def declared_blocks(state):
        return server.blocks(min(state.prompt + state.declared, config.max_model_len))

    def candidates():
        if capacity_policy == "static_batch" and server.running:
            return
        for state in server.waiting:
            if capacity_policy != "max_utilization":
                reserved = sum(declared_blocks(r) for r in step.residents())
                if reserved + declared_blocks(state) > config.num_blocks:
                    return
            yield state

    continuous(server, step, candidates())
