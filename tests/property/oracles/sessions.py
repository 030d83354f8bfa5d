"""A naive server of sessions that finds prefixes again and keeps memory between requests.

Source: vLLM V1, kv_cache_manager.py and block_pool.py: a block that is given back goes to the end
of the queue of free ones, the last of a request first; its content is found until it is handed out.
The docstrings of `PrefixCachingKVCache`, `Turn`, `ProgramFirstComeFirstServed` and `Retaining` say
the rest: what content has which name, when a request is sent, and what gives way to whom. So does
arXiv:2511.02230v6, sections 4.3 (order) and 5.2 (unpinning, deadlocks).
"""

from tests.property.oracles.loops import all_served
from tests.property.oracles.server import FOREVER, Asked, Server, Step, begin, end


class Block:
    """A piece of memory: the name of its content, if it has one, and who holds it."""

    def __init__(self):
        self.name, self.holders = None, set()


class SessionServer(Server):
    """A server with a pool of blocks, and answered requests whose memory is kept."""

    def __init__(self, config, cost, workload, keeps_until, keeps_longer):
        super().__init__(config, cost)
        self.free = [Block() for _ in range(config.num_blocks)]
        self.pool = list(self.free)
        self.unsent = [Asked(arrival) for arrival in workload]
        self.kept, self.kept_until_ns = [], {}
        self.keeps_until, self.keeps_longer = keeps_until, keeps_longer
        self.first_ns = {}
        self.start_ns = {r.request.session: r.arrival_ns for r in self.unsent}
        for state in self.unsent:
            state.blocks = []
            state.answered_ns = None
            state.was_preempted = state.found_kept = False
        self.everyone = {state.id: state for state in self.unsent}

    def due_ns(self, state):
        """Return when a request is sent, FOREVER while that is not known."""
        parents = [self.everyone[i].answered_ns for i in state.turn.parents]
        if None in parents:
            return FOREVER
        return max(parents) + state.turn.delay_ns if parents else state.arrival_ns

    def send(self):
        """Let those come whose time it is."""
        for state in sorted(self.unsent, key=lambda r: (self.due_ns(r), r.id)):
            if self.due_ns(state) <= self.now_ns and state in self.unsent:
                state.arrival_ns = self.due_ns(state)
                if state.prompt + state.answer > self.config.max_model_len:
                    self.turn_away({state.id})
                    continue
                self.unsent.remove(state)
                self.arrived.append(state)
                self.waiting.append(state)
                state.found_kept = state.request.session in self.kept_sessions

    def turn_away(self, gone):
        """Let requests come no more, nor those that need their answers."""
        self.unsent = [r for r in self.unsent if r.id not in gone]
        needy = {r.id for r in self.unsent if gone.intersection(r.turn.parents)}
        if needy:
            self.turn_away(needy)

    @property
    def kept_sessions(self):
        """Return the sessions of which memory is kept."""
        return {state.request.session for state in self.kept}

    def place(self, state):
        """Return where a request stands: by the start of its session."""
        return self.start_ns[state.request.session], state.arrival_ns, state.id

    def found(self, state):
        """Return the first blocks of a waiting request that are there, but for its last token."""
        most = (state.prompt + state.generated - 1) // self.config.block_size
        ids = state.request.prefix_hash_ids
        names = [*ids, *[(state.id, i) for i in range(len(ids), most)]]
        blocks = []
        for name in names[:most]:
            block = next((block for block in self.pool if block.name == name), None)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def release(self, state):
        for block in reversed(state.blocks):
            block.holders.remove(state)
            if not block.holders:
                self.free.append(block)
        state.blocks = []

    def expire(self):
        """Let memory go whose time is up, in this order, unless it is kept on."""
        for state in sorted(self.kept, key=self.kept_until_ns.__getitem__):
            if self.kept_until_ns[state] > self.now_ns:
                continue
            if any(state.id in r.turn.parents for r in self.waiting):
                self.kept_until_ns[state] = FOREVER
            else:
                self.kept_until_ns[state] = self.keeps_longer(self, state)
            if self.kept_until_ns[state] <= self.now_ns:
                self.drop(state)

    def drop(self, state):
        """Keep the memory of an answered request no more."""
        self.kept.remove(state)
        self.release(state)

    def finish(self, states):
        """Let requests go, in the order of their admission."""
        ended = sorted(states, key=self.running.index)
        for state in ended:
            self.running.remove(state)
        for state in ended:
            state.answered_ns = self.now_ns
            until_ns = self.keeps_until(self, state)
            ids, size = state.request.prefix_hash_ids, self.config.block_size
            answer = dict(enumerate(state.turn.answer_hash_ids, len(ids)))
            for i in range(len(ids), state.computed // size):
                state.blocks[i].name = answer.get(i)
            self.finished.append(state)
            if until_ns > self.now_ns:
                self.kept.append(state)
                self.kept_until_ns[state] = until_ns
            else:
                self.release(state)


class SessionStep(Step):
    """What is taken of a step, block by block."""

    @property
    def free_blocks(self):
        return len(self.server.free)

    def need(self, state):
        """Return the blocks that a running request lacks for what the budget leaves of it."""
        n = self.piece(state)
        return self.server.blocks(state.computed + n) - len(state.blocks)

    def piece(self, state):
        threshold = self.config.long_prefill_token_threshold or FOREVER
        n = min(state.left, threshold) if not state.decodes else 1
        return min(n, self.budget)

    def give(self, state):
        server, config = self.server, self.config
        if self.budget < 1 or self.rows < 1:
            return 0
        if state in server.waiting and not self.seat(state):
            return 0
        n = self.piece(state)
        if self.need(state) > len(server.free):
            return 0
        size, ids = config.block_size, state.request.prefix_hash_ids
        for _ in range(self.need(state)):
            block = server.free.pop(0)
            block.name, block.holders = None, {state}
            state.blocks.append(block)
        for i in range(min((state.computed + n) // size, len(ids))):
            state.blocks[i].name = ids[i]
        self.tokens[state] = n
        self.budget -= n
        self.rows -= 1
        return n

    def seat(self, state):
        """Admit a request, with what is found of it, or leave all as it was."""
        server, config = self.server, self.config
        if len(self.residents()) >= config.most_resident:
            return False
        found = server.found(state)
        state.computed = len(found) * config.block_size
        n = self.piece(state)
        end = state.computed + n
        if config.scheduler_reserve_full_isl:
            end = state.prompt + state.generated
        free = len(server.free) - sum(not block.holders for block in found)
        free -= config.watermark_blocks if server.running or self.admitted else 0
        if server.blocks(end) - len(found) > free:
            state.computed = 0
            return False
        for block in found:
            if not block.holders:
                server.free.remove(block)
            block.holders.add(state)
        state.blocks = list(found)
        self.forget_own(state)
        self.admitted.append(state)
        return True

    def forget_own(self, state):
        """Let what a request left behind be found no more, if it was not taken back."""
        for block in self.server.pool:
            if isinstance(block.name, tuple) and block.name[0] == state.id:
                block.name = None

    def preempt(self, state):
        """Take the memory of who runs or is kept; who comes back finds what is left of it."""
        server, ids = self.server, state.request.prefix_hash_ids
        self.preempted.append(state)
        if state in server.kept:
            server.drop(state)
            return
        self.forget_own(state)
        full = state.computed // self.config.block_size
        for i in range(len(ids), full):
            state.blocks[i].name = state.id, i
        server.release(state)


def retain(server, step):
    """Serve sessions in the order in which they began; what is kept gives way to who is alone."""
    kept = server.kept_sessions
    waiting = sorted(
        server.waiting,
        key=lambda r: (
            not r.was_preempted, not r.was_preempted and r.request.session not in kept,
            server.place(r),
        ),
    )  # fmt: skip
    while not fits(step):
        there = [r for r in server.running if r not in step.preempted]
        is_alone = len(there) == 1 and server.kept
        step.preempt(last_kept(server) if is_alone else max(there, key=server.place))
    all_served(server, step)
    if step.preempted:
        return
    for state in waiting:
        granted = step.give(state)
        while not granted and not step.residents() and server.kept:
            step.preempt(last_kept(server, state.request.session))
            granted = step.give(state)
        if not granted:
            return


def last_kept(server, own=None):
    """Return whose memory goes first: of the session that began last; `own` is the last to go."""

    def place(state):
        session = state.request.session
        return session != own, server.start_ns[session], state.id

    return max(server.kept, key=place)


def fits(step):
    """Say whether memory suffices for all who run, as far as tokens and rows go."""
    budget, rows, need = step.budget, step.rows, 0
    for state in step.server.running:
        if state in step.preempted:
            continue
        if not step.budget or not rows:
            break
        need += step.need(state)
        step.budget -= step.piece(state)
        rows -= 1
    step.budget = budget
    return need <= step.free_blocks


def recompute_ns(server, state):
    """Return how long computing all tokens of a request takes, in steps of the budget."""
    size, tokens = server.config.max_num_batched_tokens, state.prompt + state.generated
    starts = range(0, tokens, size)
    return sum(server.cost.price(min(size, tokens - start), start) for start in starts)


def serve_sessions(workload, config, cost, keeps_until, keeps_longer):
    """Serve sessions to their end.

    Memory is kept until ``keeps_until(server, state)``, and then if no request that waits needs it
    until ``keeps_longer(server, state)``.
    """
    server = SessionServer(config, cost, workload, keeps_until, keeps_longer)
    while server.unsent or server.waiting or server.running:
        server.send()
        server.expire()
        step = SessionStep(server)
        if server.waiting or server.running:
            retain(server, step)
        for state in step.preempted:
            if state in server.running:
                server.running.remove(state)
                server.waiting.append(state)
                state.computed, state.was_preempted = 0, True
        if not step.tokens:
            if step.preempted:
                continue
            assert not server.waiting
            if not server.unsent:
                break
            # With nothing to plan it does not look whether time is up; see 5.2.
            server.now_ns = min(server.due_ns(state) for state in server.unsent)
            assert server.now_ns < FOREVER, "nothing can ever happen"
            continue
        for state in step.admitted:
            server.first_ns.setdefault(state, server.now_ns)
        begin(server, step)
        for state in step.admitted:
            for parent in state.turn.parents:
                if server.everyone[parent] in server.kept:
                    server.drop(server.everyone[parent])
        server.send()
        end(server, step)
    return server
