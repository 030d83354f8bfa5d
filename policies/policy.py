"""What every policy is."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, ClassVar

from schedlab.policies.knobs import Knobs
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState


class Policy(Knobs):
    """Decides, step by step, who gets seats, memory and tokens.

    A subclass overrides `plan` (full power), or derives from `ContinuousBatching` and overrides
    a hook. Its constructor only stores its parameters, so that `get_params` can tell them.

    `plan` must be a function of the view and of state that changes only in the ``on_*`` hooks:
    the engine may call it twice at one instant. A hook that is not defined costs nothing.

    A plan may promise to stay the same for a while, and the engine skips ahead: `horizon` is the
    one place where a policy says for how long. Who says nothing is asked at every step.

    `on_arrival` may come while several steps are under way and not accounted for: it must not
    look at the progress of other requests. `on_tokens` sees everyone's.
    """

    source: ClassVar[str] = ""
    """Paper section or code that the policy follows."""
    needs_prediction: bool = False
    """Whether requests must carry `predicted_tokens`."""
    needs_prefixes: bool = False
    """Whether it goes by what the prefix cache holds; a run without one says so."""
    starves: ClassVar[bool] = False
    """Whether a request can wait for ever under sustained load."""
    pauses: bool = False
    """Whether a step's rows go to some of those who hold memory while the others keep theirs, so
    that as many may hold memory as fit it (unless `max_num_resident` says how many)."""
    sets_memory_aside: ClassVar[bool] = False
    """Whether it calls `PlanBuilder.admit`, which is refused where prefixes are cached; said here,
    it is told before anything runs."""
    can_pipeline: ClassVar[bool] = False
    """Whether it decides as well while other batches are in flight, whose requests are
    `EngineView.in_pipeline` and none of `running`. Not so who reckons with the memory, tokens or
    time of all who run, or seals batches."""
    seats_loaded: bool = False
    """Whether it gives `EngineView.loaded` their seats. Where nobody does, who is loaded from a
    lower tier has a seat meanwhile, whatever `load_takes_seat` says."""
    by_arrival: bool = True
    """Whether `key` is the arrival; noted of each class when it is made."""
    static_keys: bool = True
    """Whether `key` has not changed for waiting requests; if not, the queue is sorted again.

    The engine looks at it before every plan, so a policy whose keys change only now and then
    sets it to False for the step in which they did.
    """

    rekeyed: Collection[RequestState] = ()
    """Requests whose `key` has changed while those of all others have not; set in a hook."""

    hooks: ClassVar[tuple[str, ...]] = ("plan", "on_start", "on_tokens")
    """What lets a policy see time pass: `promise` looks at who overrides these."""

    on_start: Callable[[EngineView], None] | None = None
    """Called once with the view that `plan` will get, for hooks that need the limits."""
    on_arrival: Callable[[RequestState, int], None] | None = None
    """Called with a request about to enter the queue for the first time, and the time in ns."""
    on_tokens: Callable[[BatchPlan, int, int], None] | None = None
    """Called with a plan that was executed, for how many steps, and the time it ended in ns.

    Where `plan.decodes` is `None`, `plan.decoding()` no longer tells who decoded: some have
    finished, and prompts have been completed since.
    """
    on_finish: Callable[[RequestState, int], None] | None = None
    """Called with a request that leaves the engine, and the time in ns.

    Its answer is complete (`RequestState.is_complete`), or it goes on in another engine: its prompt
    was computed here for that, or it migrates. Forget who leaves in any case, but learn of answers
    only from those that are complete: of the others no more came out so far than
    `num_output_tokens`, 1 or none on an engine that computes prompts. The policy where it goes on
    is told by its `on_arrival`, and of the whole answer in the end.

    Where batches of a pipeline are planned ahead it is called before that time, when the first plan
    is made that does not count on the request any more.
    """
    on_reject: Callable[[RequestState, int], None] | None = None
    """Called with a request that a plan rejected, and the time in ns."""

    keeps_until: Callable[[RequestState, int], int] | None = None
    """Called with a request of a session that has its last token, and the time in ns; returns until
    when its memory is kept for the next requests of the session. The time itself: not at all."""
    keeps_longer: Callable[[RequestState, int, bool], int] | None = None
    """Called when that time has come, with the request, the time and whether one waits that needs
    its answer; returns until when its memory is kept from now on. The time itself: no longer.
    FOREVER is for a `plan` that preempts what is kept when nobody runs."""

    _knows_its_hooks: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        """Note whether the class overrides a hook below the class that defines its horizon."""

        def depth(name: str) -> int:
            return next(i for i, base in enumerate(cls.__mro__) if name in base.__dict__)

        cls.by_arrival = cls.key is Policy.key
        cls._knows_its_hooks = all(depth(hook) >= depth("horizon") for hook in cls.hooks)

    def key(self, state: RequestState, now_ns: int) -> Any:  # noqa: ANN401 - anything that sorts
        """Return the request's place in the waiting queue: smaller is sooner.

        Ties are broken by arrival, then id. First come, first served by default.
        """
        return state.request.arrival_ns

    def plan(self, view: EngineView, builder: PlanBuilder) -> BatchPlan:
        """Decide one step, granting through `builder`, and return ``builder.build(...)``."""
        raise NotImplementedError(f"{type(self).__name__} does not override plan()")

    def horizon(self, view: EngineView) -> tuple[int, int]:
        """Return for how many steps, and until when (ns), the same plan holds if nothing happens.

        It speaks for the hooks of the class that defines it and of its bases. One step, which is
        no promise, by default.
        """
        return 1, FOREVER

    def promise(self, view: EngineView, hooks_matter: bool = True) -> tuple[int, int]:
        """Return for how many steps, and until when (ns), a plan holds if nothing happens.

        A promise is opt-in. Who wrote a `horizon` knew the hooks up to that class; one overridden
        further down may look at the clock. Then every step is planned, which is exact and only
        slower, until the subclass overrides `horizon` as well.

        Parameters
        ----------
        view : EngineView
            What the plan was made from.
        hooks_matter : bool
            Whether there is anything that hooks could decide otherwise; if not, `horizon` is not
            asked.
        """
        own = self.__dict__
        if not self._knows_its_hooks or (own and not own.keys().isdisjoint(self.hooks)):
            return 1, FOREVER
        return self.horizon(view) if hooks_matter else (FOREVER, FOREVER)
