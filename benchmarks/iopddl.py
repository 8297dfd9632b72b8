"""Somebody else's instances: `python -m benchmarks.iopddl FILE --time-limit 60 --output choices.json`.

FILE is a problem in IOPDDL JSON (.json or .json.gz). The output is a JSON list of choices; the last line printed is a
JSON object with cost, lower_bound, gap, seconds, stop_reason and solver.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path

from autoparallel import clock
from autoparallel.errors import AutoparallelError
from autoparallel.search import SEARCHES, evaluate, solve
from autoparallel.search.model import iopddl


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.iopddl", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds, from the start of the process")
    parser.add_argument("--counted", action="store_true",
                        help="count work in place of time: equal runs find equal plans, however busy the machine")
    parser.add_argument("--output", type=Path, help="where to write the choices")
    parser.add_argument("--search", choices=SEARCHES, default="auto")
    given = parser.parse_args(arguments)
    start = time.monotonic() - time.process_time()  # of imports
    try:
        problem = iopddl.read(given.file)
        left = max(0.1, given.time_limit - (0.0 if given.counted else time.monotonic() - start))
        with clock.counted(left) if given.counted else nullcontext():
            found = solve(problem, given.search, time_limit_s=left)
    except AutoparallelError as error:
        print(f"{given.file}: {error}", file=sys.stderr)
        return 1
    if given.output is not None:
        given.output.write_text(json.dumps(list(found.choice)))
    print(json.dumps({
        "cost": evaluate(problem, found.choice).objective, "lower_bound": found.lower_bound, "gap": found.gap,
        "seconds": time.monotonic() - start, "stop_reason": found.stop_reason, "solver": found.solver,
        "phases": found.seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
