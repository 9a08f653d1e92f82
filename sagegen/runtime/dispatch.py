"""From a call to its answer: one dict lookup when the kind of call was seen before in this thread."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from sagegen.env import Env, read_env
from sagegen.errors import DriverError, RegistryError, SagegenError, UnsupportedError
from sagegen.plan import Loaded
from sagegen.runtime.answers import (
    Answer,
    CopyAnswer,
    CopyOutAnswer,
    KernelAnswer,
    ReferenceAnswer,
    Result,
    Runtime,
    SdpaAnswer,
    ZerosAnswer,
    copy_inputs,
    empty_output,
)
from sagegen.runtime.arguments import (
    Checked,
    Options,
    check_backend,
    check_call,
    check_out,
    is_readable,
    needs_grad,
    read_strides,
)
from sagegen.runtime.choose import EMULATED_GPU, Device, choose
from sagegen.runtime.explanation import KERNEL_ANSWERS, Explanation
from sagegen.runtime.fallback import LOGGER, fall_back, warn_once
from sagegen.runtime.fetch import build_cubin, describe_compiler, find_cubin, load_emulated
from sagegen.runtime.machine import CudaRuntime, NoStreams
from sagegen.runtime.splitting import plan_parts, prepare_parts, workspace_bytes

#: Kinds of call that a thread remembers; a model has a few, a server with free lengths has many.
_MEMO_LIMIT = 4096


class _PerThread(threading.local):
    """Answers by kind of call, and why the last one. Per thread, since a prepared call owns its parameters."""

    def __init__(self) -> None:
        self.memo: dict[tuple[Any, ...], Answer] = {}
        self.last: Explanation | None = None


class Dispatcher:
    """Answers calls on one machine.

    Args:
        runtime: the machine.
        read: reads the environment; called once, at the first call that is new.
    """

    def __init__(self, runtime: Runtime, read: Callable[[], Env] = read_env) -> None:
        self._runtime = runtime
        self._read = read
        self._local = _PerThread()
        self._lock = threading.Lock()
        self._programs: dict[tuple[str, str | None, int], Loaded | SagegenError] = {}

    @functools.cached_property
    def env(self) -> Env:
        """The settings, read once."""
        env = self._read()
        check_backend("SAGEGEN_BACKEND", env.backend)
        if not LOGGER.level:
            LOGGER.setLevel(env.log.upper())
        return env

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None,
        out: torch.Tensor | None,
        *options: Any,
    ) -> Result:
        """Answer a call; `options` are the fields of Options in order.

        Raises:
            TypeError, ArgumentError: a malformed argument.
            UnsupportedError: no kernel can answer, and the caller or SAGEGEN_STRICT insists on one.
        """
        local = self._local
        key: tuple[Any, ...] | None
        try:
            # fmt: off
            key = (
                q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
                q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
                torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
                None if out is None else (out.shape, out.stride(), out.dtype, out.device, out.requires_grad),
                options,
            )
            # fmt: on
            answer = local.memo.get(key) if attn_mask is None else None
        except (AttributeError, TypeError):  # no tensors, or options that can't be hashed: the checks name them
            key, answer = None, None
        if answer is None:
            answer, lasts = self._prepare(q, k, v, attn_mask, out, options)
            if lasts and attn_mask is None and key is not None:
                if len(local.memo) >= _MEMO_LIMIT:
                    local.memo.clear()
                local.memo[key] = answer
        local.last = answer.explanation
        return answer.run(q, k, v, out)

    def explain(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None, *options: Any
    ) -> Explanation:
        """What would answer, as far as it is known without loading or building a kernel. Raises as `attention`."""
        explanation = self._choose(q, k, v, attn_mask, Options(*options))[1]
        if explanation.answer not in KERNEL_ANSWERS:
            return explanation
        if explanation.answer == "kernel" and find_cubin(explanation.found, self.env, self._on_registry_error):
            return explanation
        try:
            compiler = describe_compiler(explanation.answer, self.env)
        except SagegenError as error:
            return _without_kernel(explanation, error)
        note = f"the kernel is compiled at the first call, with {compiler}"
        return replace(explanation, notes=(*explanation.notes, note))

    def workspace_bytes(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None, *options: Any
    ) -> int:
        """Scratch bytes of the kernel that would answer, 0 without one; loads and builds nothing. Raises as explain."""
        explanation = self.explain(q, k, v, attn_mask, *options)
        if explanation.answer not in KERNEL_ANSWERS:
            return 0
        asked = Options(*options)
        checked = check_call(q, k, v, asked, attn_mask)
        problem, config = explanation.problem, explanation.config
        assert problem is not None
        assert config is not None
        strides = read_strides(q, k, v, q, asked.layout)  # what they are does not matter to the size
        limit = self.env.workspace_limit
        parts = plan_parts(problem, config, checked.shape, strides, checked.scale, asked.return_lse, limit)
        return workspace_bytes(parts)

    @property
    def last(self) -> Explanation | None:
        """Why this thread's last call was answered as it was."""
        return self._local.last

    def answer_by_torch(self, reason: str, device: str) -> None:
        """Record that the caller goes to torch itself, with tensors on a device of this kind.

        It is a fallback where SAGEGEN_BACKEND asks for a kernel, and on a GPU where that is not set.

        Raises:
            UnsupportedError: it is a fallback, and SAGEGEN_BACKEND or SAGEGEN_STRICT insists on a kernel.
        """
        backend = self.env.backend
        is_fallback = device != "meta" and (backend in KERNEL_ANSWERS if backend else device == "cuda")
        if is_fallback:
            self._fall_back(reason, backend)
        self._local.last = Explanation("sdpa", reason, is_fallback)

    def _fall_back(self, reason: str, backend: str | None) -> None:
        """Say that torch answers; UnsupportedError where `backend` or SAGEGEN_STRICT insists on a kernel."""
        if backend in KERNEL_ANSWERS:
            raise UnsupportedError(f"backend={backend!r} cannot answer: {reason}")
        fall_back(reason, self.env.strict)

    def _choose(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None, options: Options
    ) -> tuple[Checked, Explanation]:
        checked = check_call(q, k, v, options, attn_mask)
        device = self._runtime.device(q.device)
        with_grad, on_error = needs_grad(q, k, v, attn_mask), self._on_registry_error
        explanation = choose(checked, options, device, self.env, needs_grad=with_grad, on_registry_error=on_error)
        return checked, explanation

    def _prepare(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None,
        out: torch.Tensor | None,
        values: tuple[Any, ...],
    ) -> tuple[Answer, bool]:
        """The answer, and whether it holds for the next such call too."""
        options = Options(*values)
        checked, explanation = self._choose(q, k, v, attn_mask, options)
        if out is not None:
            check_out(out, q)
        lasts = True
        if explanation.answer in KERNEL_ANSWERS:
            device = self._runtime.device(q.device)
            program, lasts = self._find_program(explanation, device)
            if not isinstance(program, SagegenError):
                for note in explanation.notes:
                    warn_once(note)
                return self._prepare_kernel(q, k, v, out, checked, options, values, program, explanation), True
            explanation = _without_kernel(explanation, program)
        if explanation.is_fallback:
            self._fall_back(explanation.reason, options.backend or self.env.backend)
        if explanation.answer == "zeros":
            return ZerosAnswer(explanation, options), lasts
        if explanation.answer == "reference":
            return ReferenceAnswer(explanation, options), lasts
        return SdpaAnswer(explanation, options, attn_mask), lasts

    def _prepare_kernel(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None,
        checked: Checked,
        options: Options,
        values: tuple[Any, ...],
        program: Loaded,
        explanation: Explanation,
    ) -> Answer:
        assert explanation.problem is not None
        q, k, v = copy_inputs(q, k, v, checked.copies)
        copies_out = out is not None and not is_readable(out)
        target = empty_output(q) if out is None or copies_out else out
        strides = read_strides(q, k, v, target, options.layout)
        shape, want_lse = checked.shape, options.return_lse
        parts = plan_parts(
            explanation.problem, program.config, shape, strides, checked.scale, want_lse, self.env.workspace_limit
        )

        def again(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None) -> Result:
            return self.attention(q, k, v, None, out, *values)

        kernel = KernelAnswer(
            explanation=explanation,
            prepared=prepare_parts(program, parts),
            workspace_bytes=workspace_bytes(parts),
            lse_shape=(shape.batch, shape.heads_q, shape.q_len) if want_lse else None,
            device=q.device,
            index=program.device,
            streams=NoStreams() if explanation.answer == "emulator" else self._runtime,
            again=again,
        )
        answer = CopyAnswer(kernel, checked.copies) if checked.copies else kernel
        return CopyOutAnswer(answer) if copies_out else answer

    def _find_program(self, explanation: Explanation, device: Device) -> tuple[Loaded | SagegenError, bool]:
        """The loaded program or why there is none, and whether that holds for later calls too."""
        digest = explanation.found.entry.cubin_sha256 if explanation.found else None
        key = (str(explanation.kernel), digest, device.index)
        if device.kind == "cuda" and key not in self._programs and self._runtime.is_capturing():
            return DriverError("CUDA graphs are being captured", "make such a call once before capturing"), False
        with self._lock:  # threads that want the same kernel wait for one of them to build and load it
            if key not in self._programs:
                try:
                    self._programs[key] = self._load(explanation, device)
                except SagegenError as error:  # remembered: a build that failed is not tried for every new length
                    self._programs[key] = error
            return self._programs[key], True

    def _load(self, explanation: Explanation, device: Device) -> Loaded:
        problem, config, name = explanation.problem, explanation.config, explanation.kernel
        assert problem is not None
        assert config is not None
        assert name is not None
        if explanation.answer == "emulator":
            return load_emulated(problem, config, EMULATED_GPU, self.env)
        cubin = find_cubin(explanation.found, self.env, self._on_registry_error)
        if cubin is None:
            cubin = build_cubin(problem, config, device, self.env)
        return self._runtime.load_program(cubin, name, problem, config, device.index)

    def _on_registry_error(self, error: RegistryError) -> None:
        """A broken registry must not take a model down, unless it is told to be strict: the others still serve."""
        if self.env.strict:
            raise error
        warn_once(str(error))


def _without_kernel(explanation: Explanation, error: SagegenError) -> Explanation:
    """What becomes of a call whose kernel could not be had."""
    reason = f"the kernel {explanation.kernel} is not at hand: {error}"
    return replace(explanation, answer="sdpa", reason=reason, is_fallback=True)


@functools.cache
def dispatcher() -> Dispatcher:
    """This process's dispatcher."""
    return Dispatcher(CudaRuntime())
