"""A tuning run that shares its search, in a process of its own; started by test_sharing.py, two at a time."""

import json
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import test_tune

from sagegen.measuring.jobs import Gate, Job, Reply
from sagegen.problem import TUNED_LENGTHS
from sagegen.tuning.events import Heard, Started
from sagegen.tuning.sharing import open_storage


def main(folder: Path, place: str, other: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        bench = test_tune.make_bench(folder, patch)
        answer = bench.worker.run

        def run(job: Job, timeout_s: float) -> Reply:
            if isinstance(job, Gate):
                time.sleep(0.05)  # so that both have their turn
            return answer(job, timeout_s)

        def listen(event: object) -> None:
            if isinstance(event, Started):  # both begin when both are there
                (folder / "ready").touch()
                while not (other / "ready").exists():
                    time.sleep(0.01)
            bench.events.append(event)

        bench.worker.run = run
        bench.listen = listen
        starts = {test_tune.PROBLEM: [test_tune.BEST]}  # both would begin with it: one does
        bench.tune(trials=10, storage=open_storage(place), starts=starts, lengths=TUNED_LENGTHS[:1])
        heard = [event.config for event in bench.events if isinstance(event, Heard)]
        measured = [config.name for config in bench.worker.gated]
        searcher = bench.searchers[test_tune.PROBLEM]
        known = {config.name for config in (*searcher.records, *searcher.elsewhere)}
        facts = {"default": test_tune.DEFAULT.name, "best": test_tune.BEST.name}
        print(json.dumps({"measured": measured, "heard": heard, "known": sorted(known), **facts}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
