"""What requests take of one step, one by one, while its plan is drawn up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import index
from typing import SupportsIndex, get_args

from schedlab.sim.config import PreemptionMode
from schedlab.sim.core.plan import BatchPlan, Parts
from schedlab.sim.core.population import Population
from schedlab.sim.core.track import SpeculatingState, slots_ahead
from schedlab.sim.errors import InfeasiblePlan
from schedlab.sim.kv.ledger import NO_HIT, Hit
from schedlab.sim.request import DONE, RUNS, WAITS, RequestState

_IN_PIPELINE = "its last batch is still in the pipeline"
_PREEMPTION_MODES: tuple[str, ...] = get_args(PreemptionMode)


class StepLedger:
    """The tokens, rows, seats and memory of one step, and what each request is given of them.

    Whatever is asked for is granted at once or denied: no state of the ledger exceeds a limit.

    Parameters
    ----------
    requests : Population
        Who may be given something.

    Attributes
    ----------
    tokens_left, rows_left : int
        What is left of the token budget, and of the requests that fit this step.
    residents_left : int
        How many more requests may hold memory.
    preempted : dict of RequestState to {"recompute", "swap"}
        Requests preempted in this step so far, in order, and what becomes of their KV.
    swap_blocks_left : int
        Host memory left for swapping requests out, in KV blocks.
    cached_tokens : dict of int to int
        Request id to tokens that it need not compute, of those admitted with a prefix hit.
    denied : (RequestState, str) or None
        The last request that was denied something, and why.
    plan : BatchPlan or None
        What was built, if nothing was asked for since.
    set_aside_blocks : int
        KV blocks that `admit` has set aside so far.
    """

    def __init__(self, requests: Population) -> None:
        self._requests = requests
        self._config = requests.config
        self._kv = requests.kv
        self._tiers = requests.tiers
        self._in_pipeline = requests.in_pipeline
        self._speculates = requests.config.num_speculative_tokens > 0
        self._looks_ahead = requests.config.num_lookahead_tokens > 0
        # The limits that every plan begins with: worked out once.
        self._most_tokens = requests.config.max_num_batched_tokens
        self._most_rows = requests.config.max_num_seqs
        self._most_resident = requests.config.most_resident
        self._prefill_threshold = requests.config.long_prefill_token_threshold
        self._watermark_blocks = requests.config.watermark_blocks
        self._spares_lone_request = requests.config.threshold_spares_lone_request
        self.preempted: dict[RequestState, PreemptionMode] = {}
        self.cached_tokens: dict[int, int] = {}
        self._admitted: dict[int, RequestState] = {}
        self._rejected: dict[RequestState, str] = {}
        self._chunks: dict[int, tuple[RequestState, int]] = {}
        self._decodes: dict[int, RequestState] = {}
        # Who was in the batch, while it is to decode again but for `_left`, and `_joining` as well,
        # and none of these is in `_decodes` yet.
        self._members: tuple[RequestState, ...] | None = None
        self._left: list[RequestState] = []
        self._joining: list[RequestState] = []
        self._trimmed: dict[RequestState, int] = {}
        self._set_aside: list[RequestState] = []
        self._loading: dict[int, tuple[RequestState, Parts]] = {}
        self._has_entries = False  # whether anything may be in one of these
        self.reset(0)

    def reset(self, now_ns: int) -> None:
        """Open the ledger of a step that would start at `now_ns`."""
        requests = self._requests
        self._start_ns = now_ns
        self._batch = requests.decodes  # in a pipeline not always the same
        self.tokens_left = self._most_tokens
        self.rows_left = self._most_rows
        seated = len(requests.running) if requests.is_plain else requests.num_seated
        self.residents_left = self._most_resident - seated
        self.swap_blocks_left = requests.free_swap_blocks
        if self._tiers is not None:
            self.swap_blocks_left = self._tiers.room_for_swapping
        self.denied: tuple[RequestState, str] | None = None
        self.plan: BatchPlan | None = None
        self._all_decodes = False
        self._num_compared = -1  # decodes granted at once and compared with the batch, if any were
        self._padding_tokens = 0
        self.set_aside_blocks = 0
        if self._members is not None:
            self._members = None
        if self._has_entries:
            self._has_entries = False
            self._forget_entries()
        self._threshold = self._prefill_threshold
        if self._spares_lone_request and requests.num_known == 1:
            self._threshold = 0
        self._kv.begin()

    def _forget_entries(self) -> None:
        """Begin with nothing granted; most are empty, and whoever was given a full one keeps it."""
        if self.preempted:
            self.preempted = {}
        if self.cached_tokens:
            self.cached_tokens = {}
        if self._admitted:
            self._admitted = {}
        if self._rejected:
            self._rejected = {}
        if self._chunks:
            self._chunks = {}
        if self._decodes:
            self._decodes = {}
        if self._trimmed:
            self._trimmed = {}
        if self._set_aside:
            self._set_aside = []
        if self._loading:
            self._loading = {}

    @property
    def seats_left(self) -> int:
        """How many more requests can be admitted and computed in this step."""
        rows, residents = self.rows_left, self.residents_left
        return rows if rows < residents else residents

    def grant(self, state: RequestState, want: SupportsIndex | None = None) -> int:
        """Schedule up to `want` tokens of one request.

        Parameters
        ----------
        state : RequestState
            Running (a decode gets one token and those drafted for it, as far as they fit; a prefill
            a chunk) or waiting (it is admitted).
        want : int, optional
            Most tokens to compute; all that are left by default.

        Returns
        -------
        int
            Tokens granted. 0 means it does not fit (seats, budget or memory); nothing changed.
            If its KV is loaded from a lower tier first, those of them that it is loaded of: it has
            its seat and memory, and runs from the plan on that finds them there.

        Raises
        ------
        InfeasiblePlan
            If the request cannot be scheduled at all: finished, preempted in this very step, or
            granted twice; or if `want` is no number of tokens.
        """
        self.plan = None
        self._has_entries = True
        if want is None or (isinstance(want, int) and want > 0):  # as nearly always
            most = want
        else:
            most = whole_number(want, 1, "grant() needs", "tokens")
        if self._members is not None and state.is_decoding:
            self._name_decodes()
        if (
            (self._chunks and state.id in self._chunks)
            or (self._decodes and state.id in self._decodes)
            or (self._all_decodes and state.status is not WAITS and state.is_decoding)
        ):
            raise InfeasiblePlan(f"{state!r} is granted tokens twice in one step")
        if state.status is WAITS:
            if self._loading and state.id in self._loading:
                return self._deny(state, "its KV is on its way from a lower tier")
            if self._admitted and state.id in self._admitted:
                return self._grant_set_aside(state, most)
            if state.id in self._requests.holding:
                return self._grant_seat(state, most)
            if self._rejected:
                self._require_not_rejected(state)
            if self._in_pipeline.draining and state.id in self._in_pipeline.draining:
                return self._deny(state, _IN_PIPELINE)
            return self._grant_waiting(state, most)
        if state.status is not RUNS or state in self.preempted:
            raise InfeasiblePlan(f"{state!r} cannot be scheduled: it neither runs nor waits")
        if self._in_pipeline.size and state in self._in_pipeline:
            return self._deny(state, _IN_PIPELINE)
        if state.id in self._requests.loading:
            return self._deny(state, "its KV is on its way from a lower tier")
        if state.id in self._requests.prefilling:
            return self._grant_chunk(state, most)
        if not self._has_room_for_one():
            return self._deny(state, self._why_no_room())
        if state.id in self._requests.fetching:
            return self._deny(state, "its KV is on its way from another engine")
        if self._speculates:
            return self._grant_verification(state, most)
        if self._kv.grows and not self._kv.allocate(state, 1):
            return self._deny(state, "no KV block is free")
        self._decodes[state.id] = state
        self.tokens_left -= 1
        self.rows_left -= 1
        return 1

    def _name_decodes(self) -> None:
        """Let all decodes that were granted be found by their ids."""
        gone = set(self._left)
        decodes = {state.id: state for state in self._members or () if state not in gone}
        decodes.update([(state.id, state) for state in self._joining])
        decodes.update(self._decodes)
        self._decodes, self._members = decodes, None
        self._has_entries = True

    def _grant_verification(self, state: RequestState, want: int | None) -> int:
        """Schedule a decode with its drafts; of them only those that the budget has room for."""
        tokens = state.decode_tokens
        n = min(tokens, self.tokens_left) if want is None else min(tokens, self.tokens_left, want)
        if 0 < self._threshold < n:  # as in vLLM, where it is of any piece
            n = self._threshold
        if not self._kv.allocate(state, n, ahead_tokens=self._ahead_of_drafts(state, n)):
            return self._deny(state, "its token and drafts do not fit the free KV blocks")
        self._decodes[state.id] = state
        if n < tokens:
            self._trimmed[state] = n - 1
        self.tokens_left -= n
        self.rows_left -= 1
        return n

    def _ahead(self, state: RequestState, num_tokens: int, cached_tokens: int = 0) -> int:
        """Count the slots that a request is given behind tokens to compute, for its drafts' KV."""
        if not self._looks_ahead:
            return 0
        return slots_ahead(self._config, (state.num_computed_tokens or cached_tokens) + num_tokens)

    def _ahead_of_drafts(self, state: RequestState, num_tokens: int) -> int:
        """Count the same for a verification, and slots that the one under way may fill."""
        assert isinstance(state, SpeculatingState)
        unresolved = state.unresolved_tokens
        ahead = self._ahead(state, unresolved + num_tokens)
        if not unresolved:
            return ahead
        return min(
            unresolved + ahead,
            self._config.max_model_len - state.num_computed_tokens - num_tokens,
        )

    def _has_room_for_one(self) -> bool:
        return self.tokens_left > 0 and self.rows_left > 0

    def _why_no_room(self) -> str:
        if self.tokens_left < 1:
            return "the token budget of the step is used up"
        return "all rows of the step (max_num_seqs) are taken"

    def _chunk_limit(self, state: RequestState, want: int | None, cached_tokens: int = 0) -> int:
        # `num_uncomputed_tokens`, less those.
        limit = state.request.prompt_tokens + state._generated - state._computed - cached_tokens
        if want is not None and want < limit:
            limit = want
        threshold = self._threshold
        return threshold if 0 < threshold < limit else limit

    def _grant_chunk(self, state: RequestState, want: int | None) -> int:
        self._has_entries = True
        if self.tokens_left < 1 or self.rows_left < 1:
            return self._deny(state, self._why_no_room())
        n = self._chunk_limit(state, want)
        begins = not (self._config.enable_chunked_prefill or state._computed)
        if begins and self._is_cut(state, n, want):  # what is under way is cut, as in vLLM
            return self._deny(state, "its prompt exceeds what is left of the token budget")
        if n > self.tokens_left:
            n = self.tokens_left
        ahead = self._ahead(state, n) if self._looks_ahead else 0
        if not self._kv.allocate(state, n, ahead_tokens=ahead):
            return self._deny(state, "its next chunk does not fit the free KV blocks")
        self._chunks[state.id] = (state, n)
        self.tokens_left -= n
        self.rows_left -= 1
        return n

    def _is_cut(
        self, state: RequestState, limit: int, want: int | None, cached_tokens: int = 0
    ) -> bool:
        """Whether the token budget cuts a prompt, not the threshold or the policy's own rule."""
        left = self.tokens_left
        return limit > left or want == left < state.num_uncomputed_tokens - cached_tokens

    def _grant_waiting(self, state: RequestState, most: int | None) -> int:
        if self.residents_left < 1:
            return self._deny(state, self._why_no_seat())
        config = self._config
        hit = NO_HIT if state.swapped else self._kv.lookup(state)
        if self._tiers is not None:
            if state.swapped:
                return self._grant_load(state, NO_HIT, (), most)
            parts = self._tiers.find(state, hit)
            if self._tiers.found_awaited or self._are_coming(parts):
                return self._deny(state, "what it begins with is on its way for another request")
            if parts and self._can_keep(parts):
                return self._grant_load(state, hit, parts, most)
        if self.tokens_left < 1 or self.rows_left < 1:
            return self._deny(state, self._why_no_room())
        hit_tokens = hit.tokens
        # `num_uncomputed_tokens`, less those.
        uncomputed = state.request.prompt_tokens + state._generated - state._computed - hit_tokens
        n = uncomputed if most is None or most > uncomputed else most
        if 0 < self._threshold < n:
            n = self._threshold
        if not config.enable_chunked_prefill and self._is_cut(state, n, most, hit_tokens):
            return self._deny(state, "its prompt exceeds what is left of the token budget")
        if n > self.tokens_left:
            n = self.tokens_left
        keep = self._watermark_blocks if self._requests.running else self._watermark()
        if config.scheduler_reserve_full_isl and n < uncomputed:
            need = self._kv.blocks_to_hold(state.request, state.num_tokens) - hit.blocks_in_use
            if need > self._kv.free_blocks - keep:
                return self._deny(state, "its whole sequence does not fit the free KV blocks")
        ahead = self._ahead(state, n, hit_tokens) if self._looks_ahead else 0
        if not self._kv.allocate(state, n, keep, hit, ahead):
            return self._deny(state, "it does not fit the free KV blocks")
        if hit_tokens:
            self.cached_tokens[state.id] = hit_tokens
        return self._seat(state, n)

    def _seat(self, state: RequestState, n: int) -> int:
        """Write down that a request gets a seat and `n` tokens."""
        self._admitted[state.id] = state
        if not state._generated or not state.next_is_decode:
            self._chunks[state.id] = (state, n)
        elif not self._all_decodes:
            self._decodes[state.id] = state
        self.tokens_left -= n
        self.rows_left -= 1
        self.residents_left -= 1
        return n

    def defers(self, state: RequestState) -> bool:
        """Whether a waiting request is denied, room or not, as what it begins with is being copied.

        It will find that in the cache: no memory made free helps it, and others need not wait
        behind it (vLLM's OffloadingConnector delays it in the same way). Nor behind one that was
        preempted while its batch was in the pipeline, before that is back.
        """
        if self._in_pipeline.draining and state.id in self._in_pipeline.draining:
            return True
        tiers = self._tiers
        if tiers is None or not (tiers.coming or self._loading or tiers.follows_connector):
            return False
        if state.status is not WAITS or state.swapped or state.id in self._requests.holding:
            return False
        if self._admitted and state.id in self._admitted:
            return False
        parts = tiers.find(state, self._kv.lookup(state))
        return tiers.found_awaited or self._are_coming(parts)

    def undeferred(self, states: Iterable[RequestState]) -> Iterable[RequestState]:
        """Pass over those of some requests, most often the queue, whom this step `defers`.

        Each is looked at when it is asked for, so that what others were granted before counts.
        """
        if self._tiers is None and not self._in_pipeline.draining:
            return states
        return self._pass_deferred(states)

    def _pass_deferred(self, states: Iterable[RequestState]) -> Iterator[RequestState]:
        for state in states:
            if not self.defers(state):
                yield state

    def _are_coming(self, parts: Parts) -> bool:
        """Whether somebody loads any of these blocks already, or will by this very plan."""
        tiers = self._tiers
        if not parts or tiers is None or not (tiers.coming or self._loading):
            return False
        coming = set(tiers.coming)
        for _, others in self._loading.values():
            coming.update(*[names for _, names in others])
        return not all([coming.isdisjoint(names) for _, names in parts])

    def _can_keep(self, parts: Parts) -> bool:
        """Whether those who are swapped out in this step leave what is to be loaded in place."""
        return not self.preempted or _in_first_tier(parts) <= self.swap_blocks_left

    def _grant_load(self, state: RequestState, hit: Hit, parts: Parts, most: int | None) -> int:
        """Admit a request whose KV is loaded before it is computed."""
        kv, config, keep = self._kv, self._config, self._watermark()
        n = sum([len(names) for _, names in parts]) * config.block_size
        takes_seat = config.load_takes_seat or state.swapped
        if not takes_seat and not self._has_room_for_one():
            return self._deny(state, self._why_no_room())
        if state.swapped:
            # Who comes back without room for what is computed next gives way again, and others so
            # to him, for ever.
            tokens = self._next_end(state, most)
            if config.scheduler_reserve_full_isl:
                tokens = state.num_tokens
            free_blocks = kv.free_blocks - keep - self._blocks_of_next_steps()
            if kv.blocks_to_hold(state.request, tokens) > free_blocks:
                return self._deny(state, "its KV and its next chunk do not fit the free KV blocks")
        elif takes_seat or config.scheduler_reserve_full_isl:
            what, end = "its whole sequence", state.num_tokens
            if not config.scheduler_reserve_full_isl:  # likewise
                there = min(hit.tokens + n, state.num_tokens - 1)
                what, end = "its KV with its next chunk", self._next_end(state, most, there)
            need = kv.blocks_to_hold(state.request, end) - hit.blocks_in_use
            if need > kv.free_blocks - keep:
                return self._deny(state, f"{what} does not fit the free KV blocks")
        if not takes_seat:
            keep += self._promised_blocks()
        if not kv.reserve(state, n, keep, hit):
            return self._deny(state, "what is loaded of it does not fit the free KV blocks")
        self._admitted[state.id] = state
        self._loading[state.id] = (state, parts)
        self.residents_left -= takes_seat
        self.swap_blocks_left -= _in_first_tier(parts)
        if parts:  # who is loaded to the end of his prompt computes its last token
            self.cached_tokens[state.id] = min(hit.tokens + n, state.num_tokens - 1)
        else:
            n = state.num_computed_tokens
        return n if most is None else min(n, most)

    def _next_end(
        self, state: RequestState, most: int | None = None, loaded_tokens: int = 0
    ) -> int:
        """Return where a request ends, slots ahead included, that computes what it can next."""
        limit = self._chunk_limit(state, most, loaded_tokens)
        n = min(limit, self._config.max_num_batched_tokens)
        end = state.num_computed_tokens + loaded_tokens + n
        return end + slots_ahead(self._config, end) if self._looks_ahead else end

    def _blocks_of_next_steps(self) -> int:
        """Count the blocks that those need to go on who come back already."""
        loading = [*self._requests.loading.values()]
        loading += [state for state, parts in self._loading.values() if not parts]
        size = self._config.block_size
        return sum(
            [-(-self._next_end(s) // size) - -(-s.num_computed_tokens // size) for s in loading]
        )

    def _promised_blocks(self) -> int:
        """Count the blocks that prompts under way still need, which no load may take.

        Source: vLLM 0.32, Scheduler._inflight_prefill_reserved_blocks().
        """
        requests, size = self._requests, self._config.block_size
        total = 0
        for state in (*requests.prefilling.values(), *requests.holding.values()):
            if state not in self.preempted and state.id not in self._admitted:
                granted = self._chunks[state.id][1] if state.id in self._chunks else 0
                total += -(-state.num_tokens // size)
                total -= -(-(state.num_computed_tokens + granted) // size)
        for state in self._admitted.values():
            granted = self._chunks[state.id][1] if state.id in self._chunks else 0
            there = state.num_computed_tokens or self.cached_tokens.get(state.id, 0)
            total += -(-state.num_tokens // size) - -(-(there + granted) // size)
        return total

    def _grant_seat(self, state: RequestState, most: int | None) -> int:
        """Let a request run that was loaded, and has memory but no seat."""
        config, kv, keep = self._config, self._kv, self._watermark()
        if state.id not in self._requests.come:
            return self._deny(state, "its KV is on its way from a lower tier")
        if self.residents_left < 1:
            return self._deny(state, self._why_no_seat())
        if not self._has_room_for_one():
            return self._deny(state, self._why_no_room())
        n = self._chunk_limit(state, most)
        if not config.enable_chunked_prefill and self._is_cut(state, n, most):
            return self._deny(state, "its prompt exceeds what is left of the token budget")
        n = min(n, self.tokens_left)
        if config.scheduler_reserve_full_isl:
            held = -(-state.num_computed_tokens // config.block_size)
            need = -(-state.num_tokens // config.block_size) - held
            if need > kv.free_blocks - keep:
                return self._deny(state, "its whole sequence does not fit the free KV blocks")
        if not kv.allocate(state, n, keep, ahead_tokens=self._ahead(state, n)):
            return self._deny(state, "its next chunk does not fit the free KV blocks")
        return self._seat(state, n)

    def prefetch(self, state: RequestState) -> bool:
        """Admit a waiting request only to load its KV from a lower tier, whether that pays or not.

        It takes no tokens of the budget.

        Returns
        -------
        bool
            False if nothing of it is in a lower tier, or seats or memory do not suffice; nothing
            changed.

        Raises
        ------
        InfeasiblePlan
            If it does not wait.
        """
        self.plan = None
        self._has_entries = True
        holds = state.id in self._requests.holding
        if state.status is not WAITS or state.id in self._admitted or holds:
            raise InfeasiblePlan(f"{state!r} cannot be loaded: it does not wait")
        self._require_not_rejected(state)
        if self._tiers is None:
            return False
        if self.residents_left < 1:
            self._deny(state, self._why_no_seat())
            return False
        hit = NO_HIT if state.swapped else self._kv.lookup(state)
        parts = () if state.swapped else self._tiers.find(state, hit, always=True)
        if not (state.swapped or (parts and self._can_keep(parts))) or self._are_coming(parts):
            return False
        return self._grant_load(state, hit, parts, None) > 0

    def offload(self, state: RequestState) -> bool:
        """Preempt a running request by swap if host memory suffices; see `preempt`.

        Returns
        -------
        bool
            False if it does not, or nothing of the request is computed; nothing changed.
        """
        self.plan = None
        blocks = self._num_blocks(state)
        if not 0 < blocks <= self.swap_blocks_left:
            self._deny(state, "host memory does not suffice to swap it out")
            return False
        self.preempt(state, "swap")
        return True

    def _grant_set_aside(self, state: RequestState, want: int | None) -> int:
        if not self._has_room_for_one():
            return self._deny(state, self._why_no_room())
        n = self._chunk_limit(state, want)
        if not self._config.enable_chunked_prefill and self._is_cut(state, n, want):
            return self._deny(state, "its prompt exceeds what is left of the token budget")
        n = min(n, self.tokens_left)
        self._chunks[state.id] = (state, n)
        self.tokens_left -= n
        self.rows_left -= 1
        return n

    def _why_no_seat(self) -> str:
        limit = "max_num_resident" if self._config.max_num_resident else "max_num_seqs"
        return f"all seats ({limit}) are taken"

    def admit(self, state: RequestState) -> bool:
        """Give a waiting request a seat now and compute it in later grants (or in this step).

        Memory for its whole sequence must be free; it is set aside for the rest of this step.

        Returns
        -------
        bool
            False if seats or memory do not suffice; nothing changed.

        Raises
        ------
        InfeasiblePlan
            If it does not wait for a prefill, or prefixes are cached: what is set aside for a step
            cannot be told from what evicts cached blocks.
        """
        self.plan = None
        self._has_entries = True
        if self._config.enable_prefix_caching:
            raise InfeasiblePlan(
                "admit() sets memory aside, which prefix caching does not allow: set "
                "engine.enable_prefix_caching=false (profiles of vLLM switch it on)"
            )
        if state.status is not WAITS or state.id in self._admitted or state.swapped:
            raise InfeasiblePlan(f"{state!r} cannot be admitted: it is not waiting for a prefill")
        self._require_not_rejected(state)
        if self.residents_left < 1:
            self._deny(state, self._why_no_seat())
            return False
        free, n = self._kv.free_blocks, state.num_uncomputed_tokens
        keep = self._watermark()
        if not self._kv.allocate(state, n, keep, ahead_tokens=self._ahead(state, n)):
            self._deny(state, "its whole sequence does not fit the free KV blocks")
            return False
        if self._kv.grows:
            self.set_aside_blocks += free - self._kv.free_blocks
        self._set_aside.append(state)
        self._admitted[state.id] = state
        self.residents_left -= 1
        return True

    def pad(self, num_tokens: SupportsIndex) -> None:
        """Compute `num_tokens` for nobody; they use up the token budget like any other.

        Raises
        ------
        InfeasiblePlan
            If that is no number of tokens, or exceeds the budget. Only the first token of a step
            may be padded beyond it, or a very short prompt beside a very long one never started.
        """
        self.plan = None
        padding_tokens = whole_number(num_tokens, 0, "pad() needs", "tokens")
        if padding_tokens > self.tokens_left < self._config.max_num_batched_tokens - 1:
            raise InfeasiblePlan(
                f"{padding_tokens} padding token(s): "
                f"the budget of the step has {self.tokens_left} left"
            )
        self._padding_tokens += padding_tokens
        self.tokens_left = max(self.tokens_left - padding_tokens, 0)

    def preempt(self, state: RequestState, mode: PreemptionMode | None = None) -> None:
        """Evict a running request: its KV memory is free, it goes back to the queue.

        Parameters
        ----------
        state : RequestState
            A running request, or one of `EngineView.seated` or `EngineView.in_pipeline`. Tokens
            that it was granted in this step go back to the budget; a token that comes out of its
            batch in the pipeline is its own, and it waits for that.
        mode : {"recompute", "swap"}, optional
            What becomes of its KV; the engine's `preemption_mode` by default. Where host memory
            does not suffice to swap, it is recomputed.

        Raises
        ------
        InfeasiblePlan
            If it does not run, or all decodes were granted at once; or if there is no such mode.
        """
        self.plan = None
        self._has_entries = True
        if mode is not None:
            require_one_of(mode, _PREEMPTION_MODES, "the mode of preempt()")
        requests = self._requests
        is_kept = state.id in requests.kept
        runs = state.status is RUNS and state.id not in requests.loading
        holds_memory = runs or state in requests.leaving or is_kept
        if not holds_memory or state in self.preempted:
            raise InfeasiblePlan(f"{state!r} cannot be preempted: it does not run")
        if self._all_decodes:
            raise InfeasiblePlan(f"{state!r} cannot be preempted after all decodes were granted")
        if self._members is not None:
            self._name_decodes()
        decodes = state.id in self._decodes
        in_flight = self._in_pipeline.granted_tokens(state)
        granted = in_flight or self._withdraw(state)
        unnamed = requests.unnamed_tokens(state, granted, self._start_ns)
        if self._speculates:
            # Drafts are no content that anybody finds again; the token to compute is.
            known = 1 if decodes else granted or -state.fresh_tokens
            if self._config.async_scheduling and (decodes or not granted):
                assert isinstance(state, SpeculatingState)
                known = state.known_ahead(decodes, self._start_ns)
            if granted:
                granted += self._ahead_of_drafts(state, granted)
            granted = max(granted, state.spare_tokens)
            unnamed = granted - known
        self._kv.release(state, True, granted, unnamed)
        if not is_kept:
            self.residents_left += 1
        mode = mode or self._config.preemption_mode
        if state.status is DONE or self._in_pipeline.computes(state):
            mode = "recompute"  # which nobody will; or its KV is still being written
        if mode == "swap":
            blocks = self._num_blocks(state)
            if 0 < blocks <= self.swap_blocks_left:
                self.swap_blocks_left -= blocks
            else:
                mode = "recompute"
        self.preempted[state] = mode

    def fits_without(self, victims: Iterable[RequestState], state: RequestState) -> bool:
        """Whether all of a waiting request would fit if `victims` lost their memory.

        Blocks of a prefix that others hold as well do not become free, nor need they be free for
        the request. Whom the step `defers` it does not tell apart: ask that before. Never where
        memory is reserved in contiguous ranges: theirs need not be next to each other.
        """
        config = self._config
        if not config.enable_chunked_prefill and state.num_uncomputed_tokens > self.tokens_left:
            return False
        return self._kv.fits_without(victims, state, config.watermark_blocks)

    def _num_blocks(self, state: RequestState) -> int:
        """Return how many blocks hold what is computed of a request."""
        return -(-state.num_computed_tokens // self._config.block_size)

    def _withdraw(self, state: RequestState) -> int:
        """Give a request's tokens back to the budget and count those it has memory for."""
        if state.id in self._chunks:
            granted = self._chunks.pop(state.id)[1]
        elif self._decodes.pop(state.id, None) is not None:
            granted = 1
            if self._speculates:
                granted += self._trimmed.pop(state, state.decode_tokens - 1)
        else:
            return 0
        self.tokens_left += granted
        self.rows_left += 1
        return granted

    def reject(self, state: RequestState, reason: str) -> None:
        """Give a waiting request up for good, saying why.

        Raises
        ------
        InfeasiblePlan
            If it does not wait, or not any more: admitted or rejected in this step.
        """
        self.plan = None
        self._has_entries = True
        holds = state.id in self._requests.holding
        if state.status is not WAITS or state.id in self._admitted or holds:
            raise InfeasiblePlan(f"{state!r} cannot be rejected: it is not waiting")
        if state in self._rejected:
            raise InfeasiblePlan(f"{state!r} is rejected twice in one step")
        self._rejected[state] = reason

    def _require_not_rejected(self, state: RequestState) -> None:
        if state in self._rejected:
            raise InfeasiblePlan(f"{state!r} was rejected in this step")

    def _watermark(self) -> int:
        requests = self._requests
        admitted: Iterable[int] = self._admitted
        if self._loading and not self._config.load_takes_seat:
            admitted = [i for i in self._admitted if i not in self._loading]
        anyone = requests.running or admitted or requests.leaving or requests.in_pipeline
        return self._watermark_blocks if anyone else 0

    def _deny(self, state: RequestState, why: str) -> int:
        self.denied = (state, why)
        return 0


def _in_first_tier(parts: Parts) -> int:
    return sum([len(names) for place, names in parts if place == 0])


def whole_number(value: SupportsIndex, least: int, what: str, unit: str) -> int:
    """Return what a policy gave as a plain integer, numpy's included, or say what is wrong."""
    if isinstance(value, int):  # most are, and to ask is dear
        number: int = value
    else:
        try:
            number = index(value)
        except TypeError:
            raise InfeasiblePlan(f"{what} a whole number of {unit}, got {value!r}") from None
    if number < least:
        raise InfeasiblePlan(f"{what} a whole number of {unit} >= {least}, got {value}")
    return number


def require_one_of(word: str, choices: tuple[str, ...], what: str) -> None:
    """Raise InfeasiblePlan if a policy gave a word that is none of the choices."""
    if word not in choices:
        raise InfeasiblePlan(f"{what} must be one of {', '.join(choices)}, got {word!r}")
