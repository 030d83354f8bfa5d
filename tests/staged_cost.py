"""A pipeline whose stages take so many tenths of a simple step, and links a time a token."""

from tests.laws import LinearCost


class StagedCost(LinearCost):
    """`LinearCost` divided among stages.

    Parameters
    ----------
    shares : tuple of int
        What each stage takes of a step, in tenths; a whole step takes their sum.
    link_ns, link_token_ns : int
        Time of a link, in any case and for each token.
    base_ns, token_ns, context_ns : int
        As for `LinearCost`.
    """

    def __init__(
        self, shares=(10, 10), link_ns=0, link_token_ns=0, base_ns=1000, token_ns=10, context_ns=1
    ):
        super().__init__(base_ns, token_ns, context_ns)
        self.shares, self.link_ns, self.link_token_ns = shares, link_ns, link_token_ns
        self.num_stages = len(shares)

    def stations_ns(self, shape):
        """Return what stages and links take of a step."""
        whole_ns = super().step_ns(shape)[0]
        link_ns = self.link_ns + self.link_token_ns * shape.num_new_tokens
        stations = [link_ns] * (2 * len(self.shares) - 1)
        stations[::2] = [max(1, share * whole_ns // 10) for share in self.shares]
        return stations

    def step_ns(self, shape, k=1):
        """Return what successive steps take that meet no other."""
        link_ns = (len(self.shares) - 1) * (
            self.link_ns + self.link_token_ns * shape.num_new_tokens
        )
        return [
            sum(max(1, share * whole_ns // 10) for share in self.shares) + link_ns
            for whole_ns in super().step_ns(shape, k)
        ]
