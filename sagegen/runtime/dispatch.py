"""From a call to its answer: one dict lookup when the kind of call was seen before in this thread."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import forward_ad

from sagegen.counts import Ragged
from sagegen.env import Env, read_env
from sagegen.errors import RegistryError, SagegenError, UnsupportedError
from sagegen.plan import Loaded, make_plan
from sagegen.registry_kernels import find_cubin
from sagegen.runtime.answers import Answer, CastAnswer, ReferenceAnswer, Result, Runtime, ZerosAnswer
from sagegen.runtime.arguments import Checked, check_call, check_out, needs_grad, read_strides
from sagegen.runtime.choose import DISABLED, choose
from sagegen.runtime.explanation import KERNEL_ANSWERS, Explanation
from sagegen.runtime.fallback import LOGGER, fall_back, warn_once
from sagegen.runtime.fetch import describe_compiler
from sagegen.runtime.key_mask import KeyMaskAnswer, prepare_key_mask
from sagegen.runtime.machine import CudaRuntime, NoStreams
from sagegen.runtime.memo import Memo
from sagegen.runtime.options import Options, check_backend, kinds_of
from sagegen.runtime.pinning import check_pin
from sagegen.runtime.prepare import Ground, prepare_kernel
from sagegen.runtime.programs import Programs
from sagegen.runtime.sdpa_answer import SdpaAnswer, prepare_sdpa
from sagegen.runtime.splitting import plan_parts, workspace_bytes

#: Answers that a call's mask is added to.
MASKED_ANSWERS = (SdpaAnswer, KeyMaskAnswer, CastAnswer)


class Dispatcher:
    """Answers calls on one machine.

    Args:
        runtime: the machine.
        read: reads the environment; called once, at the first call that is new.
    """

    def __init__(self, runtime: Runtime, read: Callable[[], Env] = read_env) -> None:
        self._runtime = runtime
        self._read = read
        self._local = Memo[Answer]()
        self._programs = Programs(runtime, self._on_registry_error)
        self._refused: set[str] = set()  # cubins of entries that others stand in for

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
                forward_ad._current_level >= 0 and needs_grad(q, k, v),
                None if out is None else _kind_of(out),
                None if attn_mask is None else _kind_of(attn_mask),
                options, kinds_of(options),
            )
            # fmt: on
            answer = local.answers.get(key)
        except (
            AttributeError,
            TypeError,
            ValueError,
            RuntimeError,
        ):  # no tensors, nested, no hash: the checks name them
            key, answer = None, None
        if answer is None:
            answer, lasts = self._prepare(q, k, v, attn_mask, out, options)
            if lasts and key is not None and (attn_mask is None or isinstance(answer, MASKED_ANSWERS)):
                # what is remembered must not keep a caller's mask alive
                local.remember(key, answer.with_mask(None) if isinstance(answer, MASKED_ANSWERS) else answer)
        elif attn_mask is not None and isinstance(answer, MASKED_ANSWERS):
            answer = answer.with_mask(attn_mask)
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
        if problem.is_ragged:
            ragged = Ragged(checked.shape.q_len, checked.shape.kv_len, is_packed=False)
            arguments = (problem, config, checked.shape, strides, checked.scale, asked.return_lse)
            return make_plan(*arguments, ragged=ragged).workspace_bytes
        parts = plan_parts(
            problem, config, checked.shape, strides, checked.scale, asked.return_lse, limit, checked.window
        )
        return workspace_bytes(parts)

    @property
    def last(self) -> Explanation | None:
        """Why this thread's last call was answered as it was."""
        return self._local.last

    @last.setter
    def last(self, explanation: Explanation) -> None:
        self._local.last = explanation

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
        self.last = Explanation("sdpa", reason, is_fallback)

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
        return checked, self.choose(checked, options, q.device, needs_grad(q, k, v, attn_mask))

    def choose(self, checked: Checked, options: Options, device: torch.device, with_grad: bool) -> Explanation:
        """What answers a checked call on this machine. Raises ConfigError as `choose.choose`."""
        return choose(
            checked, options, self._runtime.device(device), self.env,
            needs_grad=with_grad, refused=self._refused, on_registry_error=self._on_registry_error,
        )  # fmt: skip

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
        explanation, program, lasts = self.find_program(
            explanation, options, q.device, lambda: self._choose(q, k, v, attn_mask, options)[1]
        )
        if program is not None:
            ground = self.ground(program, explanation, values)
            if checked.hides_keys:
                return prepare_key_mask((q, k, v), out, checked, options, ground).with_mask(attn_mask), True
            return prepare_kernel((q, k, v), out, checked, options, ground), True
        if explanation.answer == "zeros":
            return ZerosAnswer(explanation, options), lasts
        if explanation.answer == "reference":
            return ReferenceAnswer(explanation, options), lasts
        return prepare_sdpa((q, k, v), explanation, options, attn_mask), lasts

    def find_program(
        self, explanation: Explanation, options: Options, device: torch.device, again: Callable[[], Explanation]
    ) -> tuple[Explanation, Loaded | None, bool]:
        """The kernel that `explanation` names, loaded, or what answers instead; None where no kernel does.

        Args:
            again: chooses anew, when the cubin of an entry has been found to be no good.

        Returns:
            What answers in the end, its program, and whether that holds for the next such call too.

        Raises:
            UnsupportedError: torch would have to answer, and the caller or SAGEGEN_STRICT insists on a kernel.
        """
        lasts = True
        while explanation.answer in KERNEL_ANSWERS:
            program, lasts = self._programs.find(explanation, self._runtime.device(device), self.env)
            if not isinstance(program, SagegenError):
                return explanation, program, lasts
            explanation = (
                self._pass_over(explanation, program, again) if lasts else _without_kernel(explanation, program)
            )
        if explanation.is_fallback:
            self._fall_back(explanation.reason, options.backend or self.env.backend)
        return explanation, None, lasts

    def ground(self, program: Loaded, explanation: Explanation, values: tuple[Any, ...]) -> Ground:
        """What an answer by a loaded kernel needs beside the call; `values` are the fields of Options in order."""
        for note in explanation.notes:
            warn_once(note)
        streams = NoStreams() if explanation.answer == "emulator" else self._runtime

        def again(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None) -> Result:
            return self.attention(q, k, v, None, out, *values)

        return Ground(program, explanation, streams, self.env.workspace_limit, again)

    def _pass_over(
        self, explanation: Explanation, error: SagegenError, again: Callable[[], Explanation]
    ) -> Explanation:
        """What answers instead of an entry whose kernel cannot be had: the next entry, else torch SDPA."""
        digest = explanation.found.entry.cubin_sha256 if explanation.found else None
        if digest is not None and digest not in self._refused:
            self._refused.add(digest)
            later = again()
            # a pinned config is built where its entries' cubins are no good
            if later.answer in KERNEL_ANSWERS and (later.found is not None or self.env.pin is not None):
                warn_once(f"{explanation.kernel} is passed over: {error}")
                return replace(later, passed_over=(*later.passed_over, f"{explanation.kernel}: {error}"))
            self._refused.discard(digest)  # else nothing would be tuned for its problem, which is another reason
        return _without_kernel(explanation, error)

    def _on_registry_error(self, error: RegistryError) -> None:
        """A broken registry must not take a model down, unless it is told to be strict: the others still serve."""
        if self.env.strict:
            raise error
        warn_once(str(error))


def _kind_of(x: torch.Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device, x.requires_grad


def _without_kernel(explanation: Explanation, error: SagegenError) -> Explanation:
    """What becomes of a call whose kernel could not be had."""
    reason = f"the kernel {explanation.kernel} is not at hand: {error}"
    return replace(explanation, answer="sdpa", reason=reason, is_fallback=True)


@functools.cache
def dispatcher() -> Dispatcher:
    """This process's dispatcher."""
    return Dispatcher(CudaRuntime())
