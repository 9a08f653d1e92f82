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
from sagegen.runtime.answers import Answer, CastAnswer, ReferenceAnswer, Result, Runtime, SdpaAnswer, ZerosAnswer
from sagegen.runtime.arguments import Checked, check_call, check_out, needs_grad, read_strides
from sagegen.runtime.choose import DISABLED, EMULATED_GPU, choose
from sagegen.runtime.device import Device
from sagegen.runtime.explanation import KERNEL_ANSWERS, Explanation
from sagegen.runtime.fallback import LOGGER, fall_back, warn_once
from sagegen.runtime.fetch import build_cubin, describe_compiler, find_cubin, load_emulated
from sagegen.runtime.machine import CudaRuntime, NoStreams
from sagegen.runtime.options import Options, check_backend
from sagegen.runtime.pinning import check_pin
from sagegen.runtime.prepare import Ground, prepare_kernel
from sagegen.runtime.splitting import plan_parts, workspace_bytes

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
        check_pin(env.pin)
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
        return self._find_answer(q, k, v, attn_mask, out, options).run(q, k, v, out)

    def warm_up(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None, *options: Any
    ) -> Explanation:
        """Prepare the answer to a call, as `attention` would, and run nothing on its tensors. Raises as `attention`."""
        return self._find_answer(q, k, v, attn_mask, None, options).explanation

    def _find_answer(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None,
        out: torch.Tensor | None,
        options: tuple[Any, ...],
    ) -> Answer:
        """What this thread remembers for such a call, else a new answer."""
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
        return answer

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

    def answer_by_torch(self, reason: str, device: str, asked: str | None = None) -> None:
        """Record that the caller goes to torch itself, with tensors on a device of this kind.

        It is a fallback where the caller or SAGEGEN_BACKEND asks for a kernel, and on a GPU where neither says.

        Args:
            asked: the backend that the caller names.

        Raises:
            UnsupportedError: it is a fallback, and the backend or SAGEGEN_STRICT insists on a kernel.
        """
        if self.env.disabled:
            reason, backend, is_fallback = DISABLED, asked, asked in KERNEL_ANSWERS
        else:
            backend = asked or self.env.backend
            is_fallback = device != "meta" and (backend in KERNEL_ANSWERS if backend else device == "cuda")
        if is_fallback:
            self._fall_back(reason, backend)
        self._local.last = Explanation("sdpa", reason, is_fallback)

    def _fall_back(self, reason: str, backend: str | None) -> None:
        """Say that torch answers; UnsupportedError where `backend` or SAGEGEN_STRICT insists on a kernel."""
        if backend in KERNEL_ANSWERS:
            remedy = "leave backend= and SAGEGEN_BACKEND out to let torch SDPA answer"
            raise UnsupportedError(f"backend={backend!r} cannot answer: {reason}", remedy)
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
        if checked.cast is not None:
            answer, lasts = self._prepare(q.to(checked.cast), k.to(checked.cast), v, attn_mask, out, values)
            return CastAnswer(answer), lasts
        if out is not None:
            check_out(out, q)
        lasts = True
        if explanation.answer in KERNEL_ANSWERS:
            device = self._runtime.device(q.device)
            program, lasts = self._find_program(explanation, device)
            if not isinstance(program, SagegenError):
                for note in explanation.notes:
                    warn_once(note)
                streams = NoStreams() if explanation.answer == "emulator" else self._runtime

                def again(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None) -> Result:
                    return self.attention(q, k, v, None, out, *values)

                ground = Ground(program, explanation, streams, self.env.workspace_limit, again)
                return prepare_kernel((q, k, v), out, checked, options, ground), True
            explanation = _without_kernel(explanation, program)
        if explanation.is_fallback:
            self._fall_back(explanation.reason, options.backend or self.env.backend)
        if explanation.answer == "zeros":
            return ZerosAnswer(explanation, options), lasts
        if explanation.answer == "reference":
            return ReferenceAnswer(explanation, options), lasts
        return SdpaAnswer(explanation, options, attn_mask), lasts

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
        program = self._runtime.load_program(cubin, name, problem, config, device.index)
        if self.env.self_test:
            self._runtime.check_program(program, name, problem, device.index)
        return program

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
