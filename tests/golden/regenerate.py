"""Accept the present results: ``make golden``. Say in CHANGELOG.md why they changed."""

import json

from tests import determinism
from tests.golden import by_hand, paced, pinned, small_runs
from tests.golden.cases import EXPECTED, cases, result_of


def main() -> None:
    """Write expected.json and the other tables beside it, and determinism.json."""
    results = {f"{policy} {workload}": result_of(policy, workload) for policy, workload in cases()}
    EXPECTED.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"{EXPECTED}: {len(results)} cases")
    small_runs.write()
    print(f"{small_runs.KEPT}: {len(small_runs.kept())} policies")
    paced.write()
    print(f"{paced.KEPT}: {len(paced.kept())} policies")
    pinned.write()
    print(f"{pinned.KEPT}: {len(pinned.kept())} tables")
    by_hand.write()
    print(f"{by_hand.KEPT}: {len(by_hand.kept())} figures")
    digests = dict(determinism.digests())
    determinism.save(determinism.KEPT, digests)
    print(f"{determinism.KEPT}: {len(digests)} experiments")


if __name__ == "__main__":
    main()
