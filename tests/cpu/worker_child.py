"""A worker without a GPU: started by test_worker.py, it does what a gate job's config field says."""

import os
import signal
import sys
import time

from sagegen.measuring.jobs import Gate, Job, Reply, Tell
from sagegen.measuring.worker_main import claim_stdout, die_with_parent, serve


def do(job: Job, tell: Tell) -> Reply:
    if not isinstance(job, Gate):
        return Reply("ok", data={"pid": os.getpid()})
    tell(job.candidate.name)
    act = job.candidate.config
    if act == "sleep":
        time.sleep(600)
    elif act == "segfault":
        print("about to fall", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    elif act == "exit":
        os._exit(3)
    elif act == "raise":
        raise ValueError("a bug of the worker")
    elif act == "print":
        print("noise on stdout")
        os.write(1, b"noise from C\n")
    elif act == "cuda-error":
        return Reply("crash", "CUDA error: an illegal memory access was encountered")
    elif act == "inaccurate":
        return Reply("accuracy", "normal: cosine 0.97 is below 0.9993")
    elif act == "garbage":
        os.write(pipe.fileno(), b"{not json\n")
        time.sleep(600)
    return Reply("ok")


die_with_parent()
pipe = claim_stdout()
serve(sys.stdin.buffer, pipe, do)
