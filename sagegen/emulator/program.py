"""A kernel in the emulator: what `sagegen.launch` is for a GPU, on CPU tensors.

A launch runs to its end before it returns, and an error in a kernel is raised by the launch that met it.
"""

from __future__ import annotations

import os
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sagegen.abi import POINTER_STRUCT, POINTERS, SEQUENCES_FROM_END, fields_of, unpack_constants
from sagegen.emulator.compiler import LIBRARIES, build_library, find_compiler, open_libraries
from sagegen.emulator.library import BankCount, Buffer, KernelRun, Library, Session, Site
from sagegen.emulator.places import KernelText
from sagegen.emulator.report import BankUse, make_error, sum_banks
from sagegen.env import Env
from sagegen.gpu import Gpu
from sagegen.plan import ROLES, Launch, Plan, Role
from sagegen.problem import Problem
from sagegen.render import Source, render
from sagegen.space import Config

#: Blocks of a persistent launch: few, so that each takes several works.
_PERSISTENT_BLOCKS = 2
#: Lines of text around the one at fault that a remedy shows.
_CONTEXT = 5


@dataclass(slots=True)
class EmulatedProgram:
    """A source compiled for the host and loaded, ready to be launched on CPU tensors.

    Attributes:
        architecture: compute capability of the GPU that is emulated; decides which accumulator FP8 products have.
        workers: operating system threads that share a launch's blocks.
        count_banks: count shared-memory wavefronts; slower.
        device: torch's index of the CPU.
        show_command: prints the text, its lines numbered as in messages; empty when only the store has it.
    """

    source: Source
    library: Library
    architecture: int
    workers: int
    count_banks: bool = False
    device: int = -1
    show_command: str = ""
    text: KernelText = field(init=False)
    _functions: dict[Role, int] = field(init=False)
    _banks: defaultdict[tuple[Role, Site], list[int]] = field(init=False)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.text = KernelText(self.source)
        self._functions = {role: self.library.function(self.source.entry(role)) for role in ROLES}
        self._banks = defaultdict(lambda: [0, 0, 0])

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def problem(self) -> Problem:
        return self.source.problem

    @property
    def config(self) -> Config:
        return self.source.config

    def prepare(self, plan: Plan) -> EmulatedCall:
        return EmulatedCall(self, plan)

    def bank_counts(self) -> tuple[BankUse, ...]:
        """Shared-memory traffic of all launches so far by line, in the order of the text; empty unless counted."""
        with self._lock:
            banks = {key: (sums[0], sums[1], sums[2]) for key, sums in self._banks.items()}
        return sum_banks(banks, self.text, self.library.path)

    def run(
        self,
        launches: Sequence[Launch],
        buffers: Sequence[Buffer],
        params: bytes,
        inspect: Callable[[Session], None] | None = None,
    ) -> None:
        """Run launches one after another on memory in which outputs and scratch hold nothing yet.

        Args:
            inspect: gets the session after the last launch, while it still knows who wrote what.

        Raises:
            EmulatorError: a kernel did what no kernel may do.
        """
        with self.library.open(buffers) as session:
            seen: dict[Site, BankCount] = {}
            for launch in launches:
                if report := session.run(self._describe(launch, params)):
                    raise make_error(report, launch.role, self.text, self.library.path, self.show_lines)
                if self.count_banks:
                    counts = {count.site: count for count in session.bank_counts()}
                    self._add_banks(launch.role, counts, seen)
                    seen = counts
            if inspect is not None:
                inspect(session)

    def _describe(self, launch: Launch, params: bytes) -> KernelRun:
        return KernelRun(
            name=launch.role,
            function=self._functions[launch.role],
            grid=min(launch.grid, _PERSISTENT_BLOCKS) if launch.is_persistent else launch.grid,
            threads=launch.threads,
            smem_bytes=launch.smem_bytes,
            params=params,
            is_programmatic=launch.starts_early,
            architecture=self.architecture,
            workers=self.workers,
            count_banks=self.count_banks,
        )

    def _add_banks(self, role: Role, counts: Mapping[Site, BankCount], before: Mapping[Site, BankCount]) -> None:
        """Add what one launch counted; a session's counts run on from launch to launch."""
        with self._lock:
            for site, count in counts.items():
                for index, value in enumerate(count.sums):
                    earlier = before[site].sums[index] if site in before else 0
                    self._banks[role, site][index] += value - earlier

    def show_lines(self, line: int) -> str:
        """The command that shows the text around a line."""
        if self.show_command:
            return f"see it with: {self.show_command} | sed -n {max(1, line - _CONTEXT)},{line + _CONTEXT}p"
        line = self.text.host_line(line)
        file = self.library.path.with_name(LIBRARIES.source)
        return f"see it with: sed -n {max(1, line - _CONTEXT)},{line + _CONTEXT}p {file}"


@dataclass(frozen=True, slots=True)
class EmulatedCall:
    """The launches of one plan, as `sagegen.launch.PreparedCall`: addresses are of CPU memory, a stream is ignored."""

    program: EmulatedProgram
    plan: Plan

    def launch(
        self, q: int, k: int, v: int, out: int, lse: int, workspace: int, stream: int, sequences: int = 0
    ) -> None:
        """Run all kernels in order; `lse` 0 when it is not wanted, `sequences` where a ragged plan's lengths are.

        Raises:
            EmulatorError: a kernel did what no kernel may do.
        """
        self._run(self.plan.launches, (q, k, v, out, lse, workspace), sequences=sequences)

    def launch_and_inspect(self, inspect: Callable[[Session], None], *addresses: int) -> None:
        """As `launch`, then give the session to `inspect`; addresses are those of POINTERS, in order."""
        self._run(self.plan.launches, addresses, inspect)

    def launch_role(self, role: Role, q: int, k: int, v: int, out: int, lse: int, workspace: int, stream: int) -> None:
        """Run the kernels up to `role`: what earlier calls left in the scratch counts as nothing here.

        Raises:
            EmulatorError: as `launch`.
        """
        count = [launch.role for launch in self.plan.launches].index(role) + 1
        self._run(self.plan.launches[:count], (q, k, v, out, lse, workspace))

    def _run(
        self,
        launches: Sequence[Launch],
        addresses: tuple[int, ...],
        inspect: Callable[[Session], None] | None = None,
        sequences: int = 0,
    ) -> None:
        problem, config = self.program.problem, self.program.config
        buffers = call_buffers(problem, config, self.plan, addresses, sequences)
        params = bytearray(POINTER_STRUCT.pack(*addresses) + self.plan.constants)
        if sequences:
            struct.pack_into("<Q", params, len(params) - SEQUENCES_FROM_END, sequences)
        self.program.run(launches, buffers, bytes(params), inspect)


def call_buffers(
    problem: Problem, config: Config, plan: Plan, addresses: tuple[int, ...], sequences: int = 0
) -> list[Buffer]:
    """The memory of a call, as its parameters describe it.

    Args:
        addresses: of POINTERS, in order; those that are 0 are left out.
        sequences: address of a ragged plan's lengths.
    """
    constants = unpack_constants(plan.constants, fields_of(config, problem))
    values = {name: int(value) for name, value in constants.items()}
    batch = values["q_heads_total"] // values["heads_q"]
    q_tokens, kv_tokens = values.get("q_tokens", values["q_len"]), values.get("kv_tokens", values["kv_len"])
    items = 1 if problem.is_ragged and not values["q_item_tokens"] else batch
    at = dict(zip((pointer.name for pointer in POINTERS), addresses, strict=True))

    def tensor(name: str, heads: int, tokens: int, is_writable: bool = False) -> Buffer:
        strides = (*(values[f"{name}_{axis}_stride"] for axis in ("batch", "head", "token")), 1)
        return Buffer(name, at[name], 2, (items, heads, tokens, problem.head_dim), strides, is_writable)

    def flat(name: str, item_bytes: int, size: int) -> Buffer:
        return Buffer(name, at[name], item_bytes, (size,), (1,), is_writable=True)

    buffers = [
        tensor("q", values["heads_q"], q_tokens),
        tensor("k", values["heads_kv"], kv_tokens),
        tensor("v", values["heads_kv"], kv_tokens),
        tensor("out", values["heads_q"], q_tokens, is_writable=True),
        flat("lse", 4, items * values["heads_q"] * q_tokens),
        flat("workspace", 1, plan.workspace_bytes),
        Buffer("sequences", sequences, 4, (4 * batch,), (1,), is_writable=False),
    ]
    return [buffer for buffer in buffers if buffer.address]


def load_emulated(
    problem: Problem, config: Config, gpu: Gpu, env: Env, *, workers: int | None = None, count_banks: bool = False
) -> EmulatedProgram:
    """Render, compile and load `config` as it would run on `gpu`.

    Args:
        workers: operating system threads that share a launch's blocks; None: one per core.
        count_banks: count shared-memory wavefronts by line, see `EmulatedProgram.bank_counts`.

    Raises:
        ToolchainError: this machine has no C++ compiler that will do.
        BuildError, StoreError: the kernel cannot be compiled or kept.
    """
    program = load_source(
        render(problem, config, target="host"), gpu.compute_capability, env, workers=workers, count_banks=count_banks
    )
    mask = " --causal" if problem.is_causal else ""
    precision = "" if problem.precision == "int8" else f" --precision {problem.precision}"
    program.show_command = (
        f"sagegen render --gpu {gpu.name} --config {config.name} --head-dim {problem.head_dim} "
        f"--dtype {problem.dtype}{mask}{precision}"
    )
    return program


def load_source(
    source: Source, architecture: int, env: Env, *, workers: int | None = None, count_banks: bool = False
) -> EmulatedProgram:
    """Compile and load a source that was rendered for the host, changed or not.

    Args:
        architecture: compute capability that is emulated, e.g. 89.
        workers, count_banks: as `load_emulated`.

    Raises:
        ToolchainError, BuildError, StoreError: as `load_emulated`.
    """
    built = build_library(source, open_libraries(env), find_compiler())
    workers = workers or len(os.sched_getaffinity(0))
    return EmulatedProgram(source, Library(built.path), architecture, workers, count_banks)
