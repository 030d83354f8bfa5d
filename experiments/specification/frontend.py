"""The keys under `frontend`: what stands between clients and engine."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from schedlab.experiments.specification.fields import Count, NonNegative, Section, shorthand
from schedlab.sim.drive.frontend import Frontend, read_frontend


class FrontendKeys(Section):
    """HTTP, tokenisation and streaming; what is given beside a file wins over it."""

    file: str | None = Field(
        default=None,
        min_length=1,
        description="JSON with measured figures, or the name of one that is shipped; see "
        "frontend.md.",
    )
    latency_s: NonNegative | None = Field(
        default=None, description="Seconds there and back in which nobody else waits."
    )
    request_s: NonNegative | None = Field(
        default=None, description="Seconds a server is busy with a request on its way in."
    )
    prompt_token_s: NonNegative | None = Field(
        default=None, description="Seconds a server is busy with a token of a prompt."
    )
    output_token_s: NonNegative | None = Field(
        default=None, description="Seconds a server is busy with a generated token."
    )
    servers: Count | None = Field(default=None, description="Processes that share the work.")

    def frontend(self) -> Frontend:
        """Return the front end that the keys describe.

        Raises
        ------
        SpecError
            If the file is unreadable or wrong.
        """
        given = self.model_dump(exclude_none=True, exclude={"file"})
        if self.file is None:
            return Frontend(**given)
        base = read_frontend(self.file)
        values = {key: getattr(base, key) for key in Frontend.__dataclass_fields__}
        source = f"{base.source}, but for {', '.join(given)}" if given else base.source
        return Frontend(**{**values, **given, "source": source})


FrontendField = Annotated[FrontendKeys, shorthand("file")]
