"""A naive server: whole steps, one after the other, nothing skipped and nothing remembered.

Source: the contract of the engine, docs/architecture.md and the docstrings of `EngineConfig`,
`EngineView` and `PlanBuilder`. Paged memory, one batch at a time, preemption by recomputation.
"""

from dataclasses import dataclass, field

FOREVER = (1 << 62) - 1


class Asked:
    """A request: what was asked, what its answer is in truth, and how far it has come."""

    def __init__(self, arrival):
        self.request, self.turn = arrival.request, arrival.turn
        self.tool = arrival.turn.tool if arrival.turn else None
        self.id, self.arrival_ns = arrival.request.id, arrival.ready_ns
        self.prompt, self.declared = arrival.request.prompt_tokens, arrival.request.max_tokens
        self.answer = min(arrival.output_tokens, self.declared)
        self.computed = 0
        self.generated = 0
        self.first_token_ns = None
        self.joined = self.last_step = -1

    def __repr__(self):
        return f"<{self.id}: {self.computed} of {self.prompt}+{self.generated}>"

    @property
    def left(self):
        """Tokens to compute before the next one comes out."""
        return self.prompt + self.generated - self.computed

    @property
    def decodes(self):
        return self.left == 1 and self.generated > 0


@dataclass
class Done:
    """A step that is over, by ids: what it computed of whom and when, and of whose prompts."""

    tokens: dict
    preempted: list
    padding: int
    start_ns: int
    end_ns: int
    admitted: list = field(default_factory=list)
    prompts: list = field(default_factory=list)


class Server:
    """Who waits, who runs (in the order of admission), and what was done so far."""

    def __init__(self, config, cost):
        self.config, self.cost = config, cost
        self.now_ns = 0
        self.waiting, self.running = [], []
        self.arrived, self.finished, self.rejected = [], [], []
        self.held = []
        self.batch = []  # of a policy that begins one and goes on with it
        self.steps = []

    def blocks(self, tokens):
        return -(-tokens // self.config.block_size)

    def finish(self, states):
        """Let requests go: at one instant those first who have decoded without a break longer."""
        ended = sorted(states, key=lambda r: (r.joined, self.running.index(r)))
        for state in ended:
            self.running.remove(state)
        self.finished += ended

    @property
    def capacity_tokens(self):
        return self.config.num_blocks * self.config.block_size


class Step:
    """What is taken of one step, one request at a time."""

    def __init__(self, server):
        self.server, self.config = server, server.config
        self.tokens = {}
        self.admitted, self.preempted, self.rejected = [], [], []
        self.budget, self.rows = self.config.max_num_batched_tokens, self.config.max_num_seqs
        self.padding = 0
        self.until_ns = FOREVER
        self.set_aside = []
        self.holds, self.pads_held = False, False

    def residents(self):
        """Return who holds memory, those included who hold it until their sealed batch ends."""
        there = [r for r in self.server.running if r not in self.preempted]
        return there + self.admitted + self.server.held

    @property
    def free_blocks(self):
        taken = 0
        for state in self.residents():
            tokens = state.computed + self.tokens.get(state, 0)
            if state in self.set_aside:
                tokens = state.computed + state.left
            taken += self.server.blocks(tokens)
        return self.config.num_blocks - taken

    def admit(self, state):
        """Give a request a seat, and set memory for all of it aside for this step."""
        anyone = self.server.running or self.admitted
        free = self.free_blocks - (self.config.watermark_blocks if anyone else 0)
        is_full = len(self.residents()) >= self.config.most_resident
        if is_full or self.server.blocks(state.left) > free:
            return False
        self.admitted.append(state)
        self.set_aside.append(state)
        return True

    def give(self, state, most=FOREVER):
        """Grant up to `most` tokens of a request; 0 if something does not suffice."""
        config, blocks = self.config, self.server.blocks
        assert state not in self.tokens
        assert state not in self.preempted
        n = min(state.left, most)
        if not state.decodes and config.long_prefill_token_threshold:
            n = min(n, config.long_prefill_token_threshold)
        if self.budget < 1 or self.rows < 1:
            return 0
        is_new = state in self.server.waiting and state not in self.admitted
        if is_new and len(self.residents()) >= config.most_resident:
            return 0
        if is_new and n > self.budget and not config.enable_chunked_prefill:
            return 0
        n = min(n, self.budget)
        free = self.free_blocks
        if state in self.set_aside:
            free, end = 0, state.computed
        else:
            end = state.computed + n
        if is_new:
            # With nobody there memory may be used to the last block.
            free -= config.watermark_blocks if self.server.running or self.admitted else 0
            if config.scheduler_reserve_full_isl:
                end = state.computed + state.left
        if blocks(end) - blocks(state.computed) > free:
            return 0
        self.tokens[state] = n
        self.budget -= n
        self.rows -= 1
        if is_new:
            self.admitted.append(state)
        return n

    def preempt(self, state):
        self.budget += self.tokens.get(state, 0)
        self.rows += state in self.tokens
        self.tokens.pop(state, None)
        self.preempted.append(state)


def serve(decide, workload, config, cost):
    """Serve a workload to its end by ``decide(server, step)``; return the server."""
    server = Server(config, cost)
    coming = [Asked(arrival) for arrival in workload]
    while coming or server.waiting or server.running:
        while coming and coming[0].arrival_ns <= server.now_ns:
            server.arrived.append(coming[0])
            server.waiting.append(coming.pop(0))
        step = Step(server)
        if server.waiting or server.running:
            decide(server, step)
        for state in step.rejected:
            server.waiting.remove(state)
            server.rejected.append(state)
            state.end_ns = server.now_ns
        for state in step.preempted:
            server.running.remove(state)
            server.waiting.append(state)
            state.computed = 0
        server.waiting.sort(key=lambda r: (r.arrival_ns, r.id))
        if not server.running:
            server.held.clear()
        if not step.tokens:
            if step.rejected or step.preempted:
                continue
            then = min(step.until_ns, coming[0].arrival_ns if coming else FOREVER)
            assert server.now_ns < then < FOREVER, "nothing can ever happen"
            server.now_ns = then
            continue
        begin(server, step)
        end(server, step)
    return server


def begin(server, step):
    """Take a step: write it down, and seat who was admitted."""
    start_ns = server.now_ns
    padding, contexts = step.padding, 0
    if step.pads_held and any(r.decodes for r in step.tokens):
        padding += len(server.held)
        contexts = sum(r.computed for r in server.held)
    server.now_ns += server.cost(step.tokens, padding, contexts, step.admitted)
    server.steps.append(
        Done(
            {r.id: n for r, n in step.tokens.items()},
            [r.id for r in step.preempted],
            step.padding,
            start_ns,
            server.now_ns,
            [r.id for r in step.admitted],
            [r.id for r in step.tokens if not r.decodes],
        )
    )
    for state in step.admitted:
        server.waiting.remove(state)
        server.running.append(state)


def end(server, step):
    """Count what was computed, and let those go who have their last token."""
    number, ended = len(server.steps), []
    for state, n in step.tokens.items():
        if not state.decodes or state.last_step < number - 1:
            state.joined = number
        state.last_step = number
        state.computed += n
        if state.left == 0:
            state.generated += 1
            if state.first_token_ns is None:
                state.first_token_ns = server.now_ns
        if state.generated == state.answer:
            state.end_ns = server.now_ns
            ended.append(state)
    server.finish(ended)
    if step.holds:
        server.held = server.held + ended if server.running else []
