"""The errors a run can end with. Each message names who is at fault and what to do."""


class SchedlabError(Exception):
    """Base of every error that is meant to be read by a user, not debugged."""


class PolicyError(SchedlabError):
    """A policy raised, or returned something that is no plan."""


class InfeasiblePlan(PolicyError):  # noqa: N818
    """A policy asked for what the engine cannot do: unknown request, no memory, over budget."""


class PolicyLied(PolicyError):  # noqa: N818
    """A policy broke its skip-ahead promise, or planned twice and did not agree with itself."""


class Stalled(SchedlabError):  # noqa: N818
    """Nothing can happen any more although requests wait, or work is thrown away for ever."""


class TraceError(SchedlabError):
    """A trace file cannot be read as what it claims to be."""


class SpecError(SchedlabError):
    """An experiment specification is wrong; the message names file, line and key."""
