"""What a worker does with a job: load candidates, gate them, time them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sagegen.errors import DriverError, UnsupportedError
from sagegen.launch import Program, load_program
from sagegen.measuring import bench, rivals
from sagegen.measuring.call import BoundCall, bind_call
from sagegen.measuring.gate import Cases, run_gate
from sagegen.measuring.inputs import DTYPES, INPUT_KINDS, Inputs, draw_normal, fitting_names, load_captured
from sagegen.measuring.jobs import Candidate, Finals, Gate, Host, Job, Ping, Probe, Race, Reply, Screen, Tell
from sagegen.measuring.telemetry import GpuState, Watch, glance, open_handle
from sagegen.probing.run import run_probe
from sagegen.problem import Problem, Shape, parse_problem
from sagegen.runtime.op import attention
from sagegen.space import parse_config

#: Inputs of so many shapes stay on the GPU between jobs.
_KEPT_SHAPES = 4
#: Small, so that the device keeps up with the host that is timed.
_HOST_SHAPE = Shape(batch=1, heads_q=8, heads_kv=8, q_len=128, kv_len=128)
# torch 2.8 gave CUDA errors a type of their own
_CUDA_ERRORS = (DriverError, torch.OutOfMemoryError, getattr(torch, "AcceleratorError", RuntimeError))


class LoadError(Exception):
    """A candidate's cubin was refused before anything ran."""


class Bench:
    """A GPU with everything that outlives a job: truths of the gate, inputs, the timer."""

    def __init__(self) -> None:
        self._device = torch.device("cuda", 0)
        self._cases = Cases(self._device)
        self._timer: bench.EventTimer | None = None
        self._draw = functools.lru_cache(_KEPT_SHAPES)(self._draw_inputs)
        self._look: Callable[[], GpuState] | None = None

    def do(self, job: Job, tell: Tell) -> Reply:
        """Do one job; errors of a candidate come back as outcomes, others are raised.

        A job for which the memory does not suffice is done once more when everything that is kept has been dropped:
        what earlier candidates took is not held against this one.
        """
        try:
            try:
                return self._do(job, tell)
            except torch.OutOfMemoryError:
                self._drop_memory()
            return self._do(job, tell)
        except LoadError as error:
            return Reply("launch", str(error))
        except UnsupportedError as error:  # of a `Host` job: no kernel can answer the call
            return Reply("launch", str(error))
        except _CUDA_ERRORS as error:
            reason = str(error).strip().partition("\n")[0]
            if _context_is_alive():
                return Reply("launch", reason)
            return Reply("crash", reason)

    def _do(self, job: Job, tell: Tell) -> Reply:
        if isinstance(job, Ping):
            return self._ping()
        if isinstance(job, Gate):
            return self._gate(job, tell)
        if isinstance(job, Screen):
            return self._screen(job, tell)
        if isinstance(job, Host):
            return self._host(job)
        if isinstance(job, Race):
            return self._race(job, tell)
        if isinstance(job, Probe):
            tell(job.probe)
            return Reply("ok", data=run_probe(job.probe, Path(job.cubin), job.gpu_index, self._device))
        return self._finals(job, tell)

    def _drop_memory(self) -> None:
        self._cases.forget()
        self._draw.cache_clear()
        self._timer = None
        torch.cuda.empty_cache()

    def _ping(self) -> Reply:
        properties = torch.cuda.get_device_properties(self._device)
        data = {
            "product": properties.name,
            "compute_capability": 10 * properties.major + properties.minor,
            "sms": properties.multi_processor_count,
            "torch": str(torch.__version__),  # a subclass of str, which JSON encoders refuse
        }
        return Reply("ok", data=data)

    def _gate(self, job: Gate, tell: Tell) -> Reply:
        start = time.monotonic()
        with _loaded([job.candidate], tell) as (program,):
            kinds = list(job.kinds or INPUT_KINDS)
            if job.captured:
                kinds += self._add_captured(job.captured, program.problem)
            result = run_gate(program, program.problem, program.config, self._cases, kinds=kinds)
        data = {"figures": result.figure_values(), "seconds": time.monotonic() - start}
        return Reply("ok" if result.passed else "accuracy", result.reason, data)

    def _screen(self, job: Screen, tell: Tell) -> Reply:
        timer = self._event_timer()
        with _loaded([job.candidate], tell) as (program,):
            call = self._bind(program, job.shape)
            attention = functools.partial(call.launch_role, "attention")
            watch = self._watch()
            data: dict[str, Any] = {
                "call_us": bench.time_cold(call.launch, timer, job.launches, watch.is_throttled),
                "kernel_us": bench.time_cold(attention, timer, job.launches, watch.is_throttled),
                "warm_us": bench.time_warm(attention, timer, job.launches, watch.is_throttled),
                "sustained_us": timer.sustained(attention, job.sustained_s) if job.sustained_s else None,
            }
            kept = sum(len(data[series]) for series in ("call_us", "kernel_us", "warm_us"))
            data["conditions"] = watch.conditions(kept)
        return Reply("ok", data=data)

    def _finals(self, job: Finals, tell: Tell) -> Reply:
        timer = self._event_timer()
        with _loaded(job.candidates, tell) as programs:
            calls = []
            for program in programs:
                tell(program.name)
                calls.append(self._bind(program, job.shape))
                bench.warm_up(calls[-1].launch, timer)
            is_causal = programs[0].problem.is_causal
            peers, absent = bench.find_peers(*calls[0].inputs, is_causal) if job.peers else ({}, {})
            for name, launch in peers.items():
                tell(name)
                bench.warm_up(launch, timer)
            time_one: Callable[[bench.Launch], float] = timer.cold
            if job.sustained_s:
                time_one = functools.partial(timer.sustained, seconds=job.sustained_s)

            def sample(rival: tuple[str, bench.Launch]) -> float:
                tell(rival[0])  # a fault of this launch is this rival's, and no one's who was loaded later
                return time_one(rival[1])

            names = [program.name for program in programs]
            kernels = {
                f"kernel {i}": (names[i], functools.partial(call.launch_role, "attention"))
                for i, call in enumerate(calls)
            }
            wholes = {f"call {i}": (names[i], call.launch) for i, call in enumerate(calls)}
            # all in the same rounds: a peer's time is paired with the kernel's and with the whole call's
            everyone: dict[str, tuple[str, bench.Launch]] = {
                **kernels,
                **wholes,
                **{name: (name, launch) for name, launch in peers.items()},
            }
            watch = self._watch()
            times = bench.interleave(everyone, sample, job.rounds, job.seed, watch.is_throttled)
        data = {
            "kernel_us": [times[name] for name in kernels],
            "call_us": [times[name] for name in wholes],
            "peers": {name: times[name] for name in peers},
            "absent": absent,
            "conditions": watch.conditions(len(times["call 0"])),
        }
        return Reply("ok", data=data)

    def _race(self, job: Race, tell: Tell) -> Reply:
        problem = parse_problem(job.problem)
        timer = self._event_timer()
        with _loaded(job.candidates, tell) as programs:
            calls = []
            for program in programs:
                tell(program.name)
                calls.append(self._bind(program, job.shape))
            own = rivals.own_rivals(calls, [program.name for program in programs], job)
            inputs = self._draw(problem.head_dim, problem.dtype, job.shape)
            peers, absent, versions = rivals.find_peers(inputs, problem.is_causal, job.peers, tell)
            everyone = {**own, **peers}
            data = rivals.run_race(everyone, job, timer, tell)
            try:
                data["agreement"] = rivals.agreement(everyone, inputs, problem.is_causal)
            except torch.OutOfMemoryError:  # no reason to lose the times
                data["agreement"] = {}
        return Reply("ok", data={**data, "absent": absent, "versions": versions})

    def _host(self, job: Host) -> Reply:
        problem = parse_problem(job.problem)
        inputs = self._draw(problem.head_dim, problem.dtype, _HOST_SHAPE)
        call = functools.partial(attention, inputs.q, inputs.k, inputs.v, is_causal=problem.is_causal, backend="kernel")
        peer = functools.partial(
            torch.nn.functional.scaled_dot_product_attention, inputs.q, inputs.k, inputs.v, is_causal=problem.is_causal
        )
        wait = functools.partial(torch.cuda.synchronize, self._device)
        data = {"attention_us": bench.time_host(call, wait), "sdpa_us": bench.time_host(peer, wait)}
        return Reply("ok", data=data)

    def _event_timer(self) -> bench.EventTimer:
        if self._timer is None:
            self._timer = bench.EventTimer(self._device)
        return self._timer

    def _watch(self) -> Watch:
        """What looks at this GPU once a round; at nothing where NVML does not know it."""
        if self._look is None:
            uuid = getattr(torch.cuda.get_device_properties(self._device), "uuid", "")
            handle = open_handle(str(uuid))
            self._look = GpuState if handle is None else functools.partial(glance, handle)
        return Watch(self._look)

    def _bind(self, program: Program, shape: Shape) -> BoundCall:
        """A call whose scratch is filled, so that the attention kernel can run alone."""
        inputs = self._draw(program.problem.head_dim, program.problem.dtype, shape)
        call = bind_call(program, program.problem, program.config, inputs.q, inputs.k, inputs.v)
        call.launch()
        torch.cuda.synchronize(self._device)
        return call

    def _draw_inputs(self, head_dim: int, dtype: str, shape: Shape) -> Inputs:
        generator = torch.Generator(self._device).manual_seed(0)
        return draw_normal(shape, head_dim, generator, DTYPES[dtype])

    def _add_captured(self, path: str, problem: Problem) -> list[str]:
        """Names of the kinds that a file of captured inputs adds for the problem."""
        captured = load_captured(Path(path))
        fitting = fitting_names(captured, problem)
        for name in fitting:
            self._cases.add_captured(problem, f"captured:{name}", captured[name])
        return [f"captured:{name}" for name in fitting]


@contextmanager
def _loaded(candidates: Sequence[Candidate], tell: Tell) -> Iterator[list[Program]]:
    """The candidates' programs, unloaded at the end; LoadError when one is refused."""
    programs: list[Program] = []
    for candidate in candidates:
        tell(candidate.name)
        try:
            programs.append(
                load_program(
                    Path(candidate.cubin).read_bytes(),
                    candidate.name,
                    parse_problem(candidate.problem),
                    parse_config(candidate.config),
                    device=0,
                )
            )
        except DriverError as error:
            raise LoadError(str(error)) from error
    yield programs
    for program in programs:  # not after an error: the context may be gone, and with it the modules
        program.unload()


def _context_is_alive() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
