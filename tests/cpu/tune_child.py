"""A tuning run in a process of its own, started and killed by test_tune_killed.py; `worker` is the worker it starts."""

import os
import sys
import time
from pathlib import Path

from sagegen.measuring.jobs import Finals, Gate, Job, Ping, Reply, Screen, Tell

ABORTS = "_st3_pve4m3f32_ad64_cvmagic_grthread_qs32_ks64_rsskip_qosmem_mb2"
FIGURES = {"cosine": 0.9994, "relative_l1": 0.03, "relative_l2": 0.03, "max_error": 0.1, "scale_ratio": 1.0}


def do(job: Job, tell: Tell) -> Reply:
    """All configs are equally fast; one aborts the process."""
    if isinstance(job, Ping):
        return Reply("ok", data={"product": "NVIDIA L20", "compute_capability": 89, "sms": 92})
    if isinstance(job, Gate):
        tell(job.candidate.name)
        if job.candidate.config.endswith(ABORTS):
            os.abort()
        return Reply("ok", data={"figures": {"normal": FIGURES}, "seconds": 0.1})
    if isinstance(job, Screen):
        time.sleep(0.02)  # leaves time to be killed
        return Reply("ok", data={"kernel_us": [10.0] * job.launches, "call_us": [12.0] * job.launches})
    assert isinstance(job, Finals)
    times = [[10.0] * job.rounds] * len(job.candidates)
    return Reply("ok", data={"kernel_us": times, "call_us": times, "peers": {}, "absent": {}})


def serve_jobs() -> None:
    from sagegen.measuring.worker_main import claim_stdout, die_with_parent, serve

    die_with_parent()
    serve(sys.stdin.buffer, claim_stdout(), do)


def tune(folder: Path) -> None:
    import pytest

    from sagegen.measuring.worker import Worker

    sys.path.insert(0, str(Path(__file__).parent))
    import test_tune

    with pytest.MonkeyPatch.context() as patch:
        bench = test_tune.make_bench(folder, patch)
        bench.workers = [Worker(0, command=(sys.executable, __file__, "worker", str(folder)))]
        result = bench.tune(trials=100)
    print(f"{len(result.records)} {len(result.entries)}")


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        serve_jobs()
    else:
        tune(Path(sys.argv[1]))
