"""Ragged and windowed kernels that the emulator's tests run: problem and config."""

from __future__ import annotations

from dataclasses import replace

from sagegen.gpu import GPUS
from sagegen.problem import Problem, parse_problem
from sagegen.registry import load_registry
from sagegen.rules import Target, default_config, default_config_with, fitted_config
from sagegen.space import Config, parse_config
from sagegen.wgmma_space import WgmmaConfig

Variant = tuple[Problem, Config]

#: By the GPU whose default config runs: FP8 values, 16-bit values, wgmma.
DEFAULTS = {"l20": "d64_fp16_full_int8", "a100": "d128_bf16_full_int8", "h200": "d64_bf16_full_int8"}
MASKS = ("full", "causal", "window")
#: What wgmma configs do otherwise than the default; tuned ones have neither of the last.
_OTHERS = (
    "wgmma_c3_bk128_st3_scplain_acone_ks64_rsskip_sufadd_exmufu_laearly",
    "wgmma_c2_bk128_st2_scplain_actwo_ks128_rsskip_suones_exmufu",
)
_WINDOW = Problem(64, "bf16", False, is_windowed=True)


def problem_of(gpu_name: str, mask: str, *, is_ragged: bool = True) -> Problem:
    own = parse_problem(DEFAULTS[gpu_name])
    return replace(own, is_causal=mask == "causal", is_windowed=mask == "window", is_ragged=is_ragged)


def ragged_variants() -> list[Variant]:
    """What `wgmma` has tuned for the H200, as ragged problems have it: one of those that compute alike. And others."""
    found: dict[tuple[str, ...], Variant] = {}
    for entry in load_registry("h200").layers[-1].entries:
        if entry.config is None:
            continue
        problem = replace(parse_problem(entry.problem), is_ragged=True)
        config = fitted_config(parse_config(entry.config), Target(GPUS["h200"], problem))
        assert config is not None, entry.config
        if isinstance(config, WgmmaConfig):
            way = (config.schedule, config.accumulation, config.exponent.rstrip("0123456789"))
            found.setdefault(way, (problem, config))
    others = [(Problem(64, "fp16", i == 0, is_ragged=True), parse_config(name)) for i, name in enumerate(_OTHERS)]
    return [*found.values(), *others]


def windowed_variants() -> list[Variant]:
    """Ways through wgmma's loop with a window: exponents, schedules, sums, queries of the prologue, Q smoothed."""
    target = Target(GPUS["h200"], _WINDOW)
    base = default_config(target)
    packed = replace(base, consumers=2, block_k=64, k_span=64, exponent="packed", q_quantizer="prologue")
    smoothed = default_config_with(target, {"smooths_q": True})
    assert smoothed is not None
    return [
        (_WINDOW, packed),
        (_WINDOW, replace(packed, exponent="mixed4", schedule="overlap", stages=2)),
        (_WINDOW, replace(base, consumers=2, accumulation="two", row_sum="fadd", rescale="always", k_span=128)),
        (_WINDOW, smoothed),
        (_WINDOW, replace(smoothed, delta="f16", launch="serial")),
    ]


def default_relatives() -> list[Variant]:
    """Default configs of windows and ragged batches, and an L20's with Q smoothed."""
    problems = [
        (gpu, problem_of(gpu, mask, is_ragged=is_ragged))
        for gpu in DEFAULTS
        for mask in MASKS
        for is_ragged in (True, False)
    ]
    window = problem_of("l20", "window", is_ragged=False)
    smoothed = default_config_with(Target(GPUS["l20"], window), {"smooths_q": True})
    assert smoothed is not None
    return [
        *((problem, default_config(Target(GPUS[gpu], problem))) for gpu, problem in problems),
        (window, smoothed),
    ]
