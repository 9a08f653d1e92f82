"""Which precision and which steps of the quantizer answer a call, and what is said of the others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sagegen import registry
from sagegen.abi import LAUNCH_ABI
from sagegen.env import Env
from sagegen.errors import ArgumentError, ConfigError
from sagegen.gpu import GPUS
from sagegen.registry import Entry, Provenance, Range, Timing
from sagegen.rules import Target, default_config
from sagegen.runtime.arguments import check_call
from sagegen.runtime.choose import choose
from sagegen.runtime.device import Device
from sagegen.runtime.options import Options
from sagegen.runtime.pinning import check_pin
from sagegen.runtime.varlen_arguments import Sequences, check_varlen
from sagegen.space import parse_config

H200 = Device("cuda", 0, "NVIDIA H200", "sm_90", GPUS["h200"])
UNKNOWN = Device("cuda", 0, "NVIDIA X", "sm_90", None)
#: V is smoothed by single-level accumulation, `acone`, alone.
SMOOTH_V = "wgmma_c2_bk128_st2_scoverlap_acone_ks128_rsskip_suones_exmufu"
PLAIN_V = "wgmma_c2_bk128_st2_scoverlap_actwo_ks128_rsskip_suones_exmufu"


@pytest.fixture
def env(tmp_path, monkeypatch) -> Env:
    monkeypatch.setattr(registry, "shipped_dir", lambda: tmp_path / "shipped")
    return Env(cache_dir=tmp_path / "cache", tuned_dir=tmp_path / "tuned", strict=False, log="warning", nvcc=None)


def entry(precision="int8", tops=None, *, cosine=None, kind="measured", gpu="h200", kv=(1, None), **rest) -> Entry:
    problem = f"d64_fp16_full_{precision}"
    config = rest.pop("config", SMOOTH_V)
    figures = Timing(
        full_tops=tops if kind == "measured" else None,
        predicted_full_us=None if kind == "measured" or tops is None else 1e5 / tops,
        speed_vs_sdpa=rest.pop("vs_sdpa", None),
    )
    values = {
        "problem": problem,
        "bucket": Range(kv_min=kv[0], kv_max=kv[1]),
        "answer": "kernel",
        "config": config,
        "kernel": f"{problem}_{config}",
        "cubin_sha256": "0" * 64,
        "min_cosine": cosine if cosine is not None else {"int8": 0.9995, "int4": 0.98}[precision],
        "figures": figures,
        "provenance": Provenance(
            kind=kind, gpu=gpu, sms=132, launch_abi=LAUNCH_ABI, protocol=1, date="2026-11-30", shape="b1 h1/1 q1 kv1"
        ),
    }
    return Entry(**{**values, **rest})


def keep(env: Env, *entries: Entry, gpu: str = "h200") -> None:
    registry.save_entries(env.tuned_dir / f"{gpu}.yaml", gpu, entries, {})


def ask(env: Env, device: Device = H200, *, kv_len: int = 100, head_dim: int = 64, **options):
    q, k = (torch.zeros(1, 2, tokens, head_dim, dtype=torch.float16) for tokens in (8, kv_len))
    wanted = Options(**options)
    return choose(check_call(q, k, k, wanted), wanted, device, env, needs_grad=False, on_registry_error=_fail)


def _fail(error: Exception) -> None:
    raise error


def precision_of(explanation) -> str:
    assert explanation.answer == "kernel"
    return explanation.precision


# --- precision


def test_auto_takes_int8_where_int4_is_too_coarse_for_the_caller(env):
    keep(env, entry("int8", 700), entry("int4", 900, cosine=0.98))
    explanation = ask(env)
    assert precision_of(explanation) == "int8"
    (other,) = explanation.passed_over
    assert other == "int4: the entry reaches cosine 0.98, which is not enough for min_cosine=0.999"
    assert f"passed over: {other}" in str(explanation)


@pytest.mark.parametrize(("int4_tops", "answers"), [(900, "int4"), (700, "int8"), (600, "int8")])
def test_auto_takes_the_fastest_that_is_accurate_enough_and_int8_of_equals(env, int4_tops, answers):
    keep(env, entry("int8", 700), entry("int4", int4_tops, cosine=0.98))
    explanation = ask(env, min_cosine=0.98)
    assert precision_of(explanation) == answers
    (other,) = explanation.passed_over
    slow, fast = (700, 900) if answers == "int4" else (int4_tops, 700)
    loser = "int8" if answers == "int4" else "int4"
    assert (
        other == f"{loser}: not known to be faster: {slow} TOPS with quantizers, the other {fast} TOPS with quantizers"
    )


def test_the_entrys_accuracy_decides_not_its_precision(env):
    keep(env, entry("int8", 700), entry("int4", 900, cosine=0.9991))
    assert precision_of(ask(env)) == "int4"


def test_a_measured_entry_goes_before_a_predicted_one_that_promises_more(env):
    keep(env, entry("int8", 700), entry("int4", 9000, kind="predicted"))
    explanation = ask(env, min_cosine=0.9)
    assert precision_of(explanation) == "int8"
    assert explanation.passed_over == ("int4: its entry is predicted, not measured",)
    keep(env, entry("int4", 1))
    assert precision_of(ask(env, min_cosine=0.9)) == "int8"


def test_a_measured_int4_goes_before_a_predicted_int8(env):
    keep(env, entry("int8", 900, kind="predicted"), entry("int4", 100))
    explanation = ask(env, min_cosine=0.9)
    assert precision_of(explanation) == "int4"
    assert explanation.passed_over == ("int8: its entry is predicted, not measured",)


def test_predictions_are_compared_for_the_same_shape_only(env):
    keep(env, entry("int8", 700, kind="predicted"), entry("int4", 900, kind="predicted"))
    assert precision_of(ask(env, min_cosine=0.9)) == "int4"
    theirs = entry("int4", 900, kind="predicted")
    longer = Provenance(
        **{**{n: getattr(theirs.provenance, n) for n in theirs.provenance.__struct_fields__}, "shape": "b9"}
    )
    keep(env, entry("int4", 900, kind="predicted", provenance=longer))
    assert precision_of(ask(env, min_cosine=0.9)) == "int8"


def test_an_entry_without_times_is_not_known_to_be_faster(env):
    keep(env, entry("int8"), entry("int4", 900))
    explanation = ask(env, min_cosine=0.9)
    assert precision_of(explanation) == "int8"
    assert "unknown speed" in explanation.passed_over[0]


@pytest.mark.parametrize(("int4_tops", "answer"), [(600, "kernel"), (400, "sdpa")])
def test_where_torch_answers_int8_it_is_torchs_speed_that_int4_must_beat(env, int4_tops, answer):
    # a kernel of 400 TOPS that is 0.8 times as fast as torch: torch reaches 500
    keep(env, entry("int8", 400, answer="sdpa", vs_sdpa=0.8), entry("int4", int4_tops))
    assert ask(env, min_cosine=0.9).answer == answer


def test_where_torch_is_faster_than_int4_int8_answers(env):
    keep(env, entry("int8", 700), entry("int4", 900, answer="sdpa", vs_sdpa=0.5))
    explanation = ask(env, min_cosine=0.9)
    assert precision_of(explanation) == "int8"
    assert "torch SDPA is faster" in explanation.passed_over[0]


def test_an_entry_of_the_gpu_itself_goes_before_a_borrowed_one(env):
    keep(env, entry("int8", 100))
    keep(env, entry("int4", 900, gpu="h100"), gpu="h100")
    explanation = ask(env, min_cosine=0.9)
    assert precision_of(explanation) == "int8"
    assert explanation.passed_over == ("int4: its entry is borrowed from another GPU",)


def test_an_entry_for_the_length_goes_before_one_for_longer_calls(env):
    keep(env, entry("int8", 100), entry("int4", 900, kv=(1000, None)))
    assert ask(env, min_cosine=0.9).passed_over == ("int4: no bucket of its entries holds this length",)


def test_auto_never_runs_an_untuned_int4_kernel(env):
    explanation = ask(env, min_cosine=0)
    assert precision_of(explanation) == "int8"
    assert explanation.provenance == "untuned"
    assert explanation.passed_over == (
        "int4: nothing is tuned for d64_fp16_full_int4 at this length; "
        "to tune it: sagegen tune --gpu h200 --dtype fp16 --precision int4",
    )


def test_a_tuned_int4_kernel_goes_before_an_untuned_int8_one(env):
    keep(env, entry("int4", 100, cosine=0.9991))
    explanation = ask(env)
    assert precision_of(explanation) == "int4"
    assert explanation.passed_over == ("int8: nothing is tuned for it at this length",)


def test_int4_stands_in_where_int8_has_no_entry_that_is_accurate_enough(env):
    keep(env, entry("int8", 900, cosine=0.9985), entry("int4", 100, cosine=0.9995))
    explanation = ask(env)
    assert precision_of(explanation) == "int4"
    assert explanation.passed_over[0].startswith("int8: the entry reaches cosine 0.9985")


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_named_precision_takes_no_other(env, precision):
    keep(env, entry("int8", 100), entry("int4", 100))
    explanation = ask(env, precision=precision, min_cosine=0.9)
    assert precision_of(explanation) == precision
    assert explanation.passed_over == ()


def test_int4_by_name_says_what_min_cosine_it_needs(env):
    keep(env, entry("int8", 100), entry("int4", 900, cosine=0.98))
    explanation = ask(env, precision="int4")
    assert (explanation.answer, explanation.is_fallback) == ("sdpa", True)
    assert explanation.reason == (
        "the entry reaches cosine 0.98, which is not enough for min_cosine=0.999: give a lower one to take int4"
    )


def test_int4_without_an_entry_is_the_default_config_for_those_who_take_its_accuracy(env):
    refused = ask(env, precision="int4")
    assert (refused.answer, refused.is_fallback) == ("sdpa", True)
    assert refused.reason.endswith("to tune it: sagegen tune --gpu h200 --dtype fp16 --precision int4")
    explanation = ask(env, precision="int4", min_cosine=0.97)
    assert (precision_of(explanation), explanation.provenance) == ("int4", "untuned")
    assert explanation.notes[-1].endswith("to tune it: sagegen tune --gpu h200 --dtype fp16 --precision int4")


def test_an_int4_entry_of_unknown_accuracy_counts_as_the_floor_of_int4(env):
    keep(env, entry("int4", 900, min_cosine=None))
    assert ask(env, precision="int4", min_cosine=0.97).answer == "kernel"
    assert ask(env, precision="int4", min_cosine=0.98).answer == "sdpa"


def test_an_unknown_gpu_takes_its_architectures_int4_too(env):
    keep(env, entry("int4", 900))
    assert precision_of(ask(env, UNKNOWN, precision="int4", min_cosine=0.9)) == "int4"
    refused = ask(env, UNKNOWN)
    assert refused.is_fallback
    assert "is no known GPU" in refused.reason


# --- steps of the quantizer


def test_none_follows_the_entry(env):
    keep(env, entry(config=SMOOTH_V))
    assert ask(env).config.smooths_v


@pytest.mark.parametrize(("wanted", "config"), [(True, SMOOTH_V), (False, PLAIN_V)])
def test_a_step_restricts_to_the_entries_that_take_it_or_do_not(env, wanted, config):
    keep(env, entry(config=SMOOTH_V, tier="coarse"), entry(config=PLAIN_V, tier="fine"))
    explanation = ask(env, smooth_v=wanted)
    assert explanation.answer == "kernel"
    assert explanation.config.name == config


def test_a_borrowed_entry_that_takes_the_step_answers_before_torch(env):
    keep(env, entry(config=PLAIN_V))
    keep(env, entry(config=SMOOTH_V, gpu="h100"), gpu="h100")
    explanation = ask(env, smooth_v=True)
    assert explanation.config.smooths_v
    assert explanation.found.borrowed


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"smooth_v": True}, "smooth_v=True"),
        ({"smooth_q": True}, "smooth_q=True"),
        ({"rotate": True}, "rotate=True"),
        ({"smooth_q": True, "rotate": True}, "smooth_q=True, rotate=True"),
        ({"smooth_v": False, "smooth_q": True}, "smooth_q=True, smooth_v=False"),
    ],
)
def test_without_such_an_entry_a_default_kernel_does_as_asked(env, asked, named):
    keep(env, entry(config=PLAIN_V))
    explanation = ask(env, precision="int8", **asked)
    assert (explanation.answer, explanation.provenance) == ("kernel", "untuned")
    assert explanation.reason == f"the default config with {named}, untuned"
    assert f"{named} has no kernel among those tuned for d64_fp16_full_int8 at this length" in explanation.notes
    taken = {"smooth_q": "smooths_q", "smooth_v": "smooths_v", "rotate": "rotates"}
    for step, wanted in asked.items():
        assert getattr(explanation.config, taken[step]) == wanted


def test_torch_answers_where_it_is_faster_than_kernels_without_the_step(env):
    keep(env, entry(config=PLAIN_V, answer="sdpa"))
    explanation = ask(env, precision="int8", smooth_q=True)
    assert (explanation.answer, explanation.is_fallback) == ("sdpa", False)
    assert explanation.reason == "torch SDPA is faster at this length than kernels without smooth_q=True"
    assert ask(env, precision="int8", smooth_q=True, backend="kernel").config.smooths_q


def test_steps_that_no_config_takes_together_are_refused(env):
    """Emulated FP8 aside, an A100's kernels take V in 16 bits as it is."""
    a100 = Device("cuda", 0, "NVIDIA A100", "sm_80", GPUS["a100"])
    explanation = ask(env, a100, precision="int8", smooth_v=True)
    assert (explanation.answer, explanation.is_fallback) == ("sdpa", True)
    assert explanation.reason.startswith("smooth_v=True has no kernel: nothing is tuned for d64_fp16_full_int8")
    assert explanation.reason.endswith("to tune it: sagegen tune --gpu a100 --dtype fp16")


def test_auto_takes_the_precision_that_has_the_step(env):
    keep(env, entry("int8", 900, config=PLAIN_V), entry("int4", 100, config=SMOOTH_V, cosine=0.9991))
    explanation = ask(env, smooth_v=True)
    assert precision_of(explanation) == "int4"
    assert explanation.passed_over == ("int8: nothing is tuned for it at this length",)


@pytest.mark.parametrize("steps", [{}, {"smooth_v": True}, {"smooth_v": True, "smooth_q": False, "rotate": False}])
def test_an_untuned_kernel_answers_with_the_default_config_if_that_does_as_asked(env, steps):
    """The H200's has single-level accumulation, which smooths V."""
    explanation = ask(env, **steps)
    assert explanation.provenance == "untuned"
    assert explanation.config == default_config(Target(GPUS["h200"], explanation.problem))


def test_smooth_k_is_what_all_kernels_do(env):
    keep(env, entry())
    assert ask(env, smooth_k=True).answer == "kernel"
    assert ask(env, smooth_k=False).reason.startswith("smooth_k=False has no kernel")


# --- head dims between those of kernels


def ask_wide(env: Env, length: int, head_dim: int, **options):
    """Of 4 x 32 heads, without their memory."""
    q = torch.empty(4, 32, length, head_dim, dtype=torch.float16, device="meta")
    wanted = Options(**options)
    return choose(check_call(q, q, q, wanted), wanted, H200, env, needs_grad=False, on_registry_error=_fail)


@pytest.mark.parametrize(
    ("length", "head_dim", "tops", "vs_sdpa", "answer"),
    [
        # 4 x 32 heads on an H200 (docs/gpu-runs/2026-11-30e-h200.md): torch's time over that of the padded kernel
        (2048, 64, 552, 1.24, "kernel"),  # not padded
        (2048, 40, 552, 1.24, "sdpa"),  # 0.77
        (8192, 40, 870, 1.80, "kernel"),  # 1.43
        (8192, 40, None, None, "kernel"),  # predicted entries do not know
        (8192, 40, 870, 1.05, "sdpa"),
    ],
)
def test_a_padded_kernel_must_gain_more_than_its_copies_cost(env, length, head_dim, tops, vs_sdpa, answer):
    keep(env, entry("int8", tops, vs_sdpa=vs_sdpa))
    explanation = ask_wide(env, length, head_dim)
    assert explanation.answer == answer
    assert not explanation.is_fallback
    if answer == "sdpa":
        assert explanation.reason == f"torch SDPA is likely faster at head_dim {head_dim} than a kernel of 64"
    assert ask_wide(env, length, head_dim, backend="kernel").answer == "kernel"


@pytest.mark.parametrize("head_dim", [129, 160, 256])
def test_a12_an_untuned_default_kernel_answers_heads_above_128(env, head_dim):
    keep(env, entry("int8"))
    explanation = ask(env, head_dim=head_dim)
    assert explanation.answer == "kernel"
    assert not explanation.is_fallback
    assert explanation.problem.head_dim == 256
    assert explanation.config.family == "mma"
    assert explanation.notes[-1].endswith("to tune it: sagegen tune --gpu h200 --head-dim 256 --dtype fp16")
    padded = f"head_dim {head_dim} is padded to 256: q, k, v and out are copied"
    assert (padded in explanation.notes) == (head_dim < 256)


@pytest.mark.parametrize("head_dim", [257, 384, 512])
def test_a12_torch_answers_heads_above_256(env, head_dim):
    explanation = ask(env, head_dim=head_dim)
    assert (explanation.answer, explanation.is_fallback) == ("sdpa", True)
    assert explanation.reason == f"head_dim {head_dim} has no kernel, 256 is the widest"


def test_a_padded_kernel_says_that_inputs_are_copied(env):
    keep(env, entry("int8"))
    assert "head_dim 48 is padded to 64: q, k, v and out are copied" in ask(env, head_dim=48).notes


# --- windows, masks of keys and packed sequences, which nobody tunes

L20 = Device("cuda", 0, "NVIDIA L20", "sm_89", GPUS["l20"])
#: As tuned ones are: valid on an H200, but a ragged problem has queries quantized by a kernel of their own.
TUNED_WGMMA = "wgmma_c2_bk128_st2_scplain_acone_ks128_rsskip_suones_expacked_laearly_qqprologue"
TUNED_MMA = "mma_bq64_bk64_w4_st3_pve4m3f32_ad64_cvmagic_grthread_qs32_ks64_rsalways_qoreg_mb1"


def ask_masked(env: Env, device: Device = H200, kv_len: int = 100, **options):
    """With a mask of keys."""
    q, k = (torch.zeros(3, 2, tokens, 64, dtype=torch.float16) for tokens in (8, kv_len))
    wanted = Options(**options)
    checked = check_call(q, k, k, wanted, torch.ones(3, 1, 1, kv_len, dtype=torch.bool))
    return choose(checked, wanted, device, env, needs_grad=False, on_registry_error=_fail)


def ask_packed(env: Env, device: Device = H200, longest: int = 100, **options):
    """Three sequences of up to 100 keys."""
    q, k = (torch.zeros(tokens, 2, 64, dtype=torch.float16, device="meta") for tokens in (24, 300))
    starts = torch.zeros(4, dtype=torch.int32, device="meta")
    wanted = Options(layout="NHD", **options)
    checked = check_varlen(q, k, k, Sequences(starts, starts, 8, longest), wanted)
    return choose(checked, wanted, device, env, needs_grad=False, on_registry_error=_fail)


def ask_window(env: Env, device: Device = H200, **options):
    return ask(env, device, window=(3, 5), **options)


#: What asks, by the problem that it asks for.
ASKING = {"window_int8": ask_window, "full_int8_ragged": ask_packed, "full_int8_ragged ": ask_masked}


@pytest.mark.parametrize("kind", ASKING)
def test_a_relative_takes_the_config_that_is_tuned_for_the_dense_problem(env, kind):
    keep(env, entry("int8", 700, config=TUNED_MMA, gpu="l20", kv=(50, 200), vs_sdpa=2), gpu="l20")
    explanation = ASKING[kind](env, L20)
    assert (explanation.answer, explanation.is_fallback, explanation.found) == ("kernel", False, None)
    assert explanation.problem.name == f"d64_fp16_{kind.strip()}"
    assert explanation.config.name == TUNED_MMA
    assert explanation.reason == "the config that l20 has for d64_fp16_full_int8, kv50-200"


@pytest.mark.parametrize("ask_ragged", [ask_packed, ask_masked])
def test_a_ragged_relative_of_wgmma_quantizes_its_queries_in_a_kernel_of_their_own(env, ask_ragged):
    keep(env, entry(config=TUNED_WGMMA))
    explanation = ask_ragged(env)
    assert explanation.config == replace(parse_config(TUNED_WGMMA), q_quantizer="kernel")


def test_a_window_takes_what_is_tuned_prologue_included(env):
    keep(env, entry(config=TUNED_WGMMA))
    assert ask_window(env).config.name == TUNED_WGMMA


def test_what_is_tuned_for_nothing_alike_is_said_to_take_the_default_config(env):
    explanation = ask_window(env)
    assert explanation.config == default_config(Target(GPUS["h200"], explanation.problem))
    assert explanation.notes[-1].endswith("takes the default config: windows and ragged batches are not tuned")


@pytest.mark.parametrize("kind", ASKING)
def test_a_relative_of_what_nobody_tuned_takes_the_default_config(env, kind):
    explanation = ASKING[kind](env)
    assert (explanation.answer, explanation.provenance) == ("kernel", "untuned")
    assert explanation.config == default_config(Target(GPUS["h200"], explanation.problem))


def test_causal_sequences_take_what_is_tuned_for_causal_calls(env):
    problem = "d64_fp16_causal_int8"
    causal = entry(config=TUNED_MMA, gpu="l20", problem=problem, kernel=f"{problem}_{TUNED_MMA}")
    keep(env, entry(config=TUNED_MMA.replace("mb1", "mb2"), gpu="l20"), causal, gpu="l20")
    for options in ({"is_causal": True}, {"window": (-1, 0)}):
        explanation = ask_packed(env, L20, **options)
        assert explanation.problem.name == "d64_fp16_causal_int8_ragged"
        assert explanation.config.name == TUNED_MMA


def test_the_length_of_the_longest_sequence_decides(env):
    other = TUNED_MMA.replace("cvmagic", "cvi2f")
    keep(env, entry(config=TUNED_MMA, gpu="l20", kv=(1, 50)), entry(config=other, gpu="l20", kv=(51, None)), gpu="l20")
    assert [ask_packed(env, L20, longest=n).config.name for n in (100, 101, 1 << 40)] == [other] * 3
    assert [ask_masked(env, L20, n).config.name for n in (50, 51)] == [TUNED_MMA, other]


def test_where_torch_answers_dense_calls_it_answers_short_masked_ones_but_neither_windows_nor_sequences(env):
    keep(env, entry(config=TUNED_MMA, gpu="l20", answer="sdpa", vs_sdpa=0.8), gpu="l20")
    explanation = ask_masked(env, L20)
    assert (explanation.answer, explanation.is_fallback) == ("sdpa", False)
    assert explanation.reason == "below 1024 keys the host takes longer for a mask of keys than torch SDPA on the GPU"
    assert ask_masked(env, L20, 1023).answer == "sdpa"
    for forced in (
        ask_masked(env, L20, backend="kernel"), ask_masked(env, L20, 1024), ask_window(env, L20), ask_packed(env, L20)
    ):  # fmt: skip
        assert (forced.answer, forced.config.name) == ("kernel", TUNED_MMA)


@pytest.mark.parametrize("kind", ASKING)
def test_a_relative_of_an_entry_that_is_too_coarse_is_not_taken(env, kind):
    keep(env, entry(config=TUNED_MMA, gpu="l20", cosine=0.9991), gpu="l20")
    assert ASKING[kind](env, L20).config.name == TUNED_MMA
    refused = ASKING[kind](env, L20, min_cosine=0.9995)
    assert (refused.answer, refused.is_fallback) == ("sdpa", True)
    assert refused.reason == (
        "d64_fp16_full_int8, its dense relative, reaches cosine 0.9991, which is not enough for min_cosine=0.9995"
    )


@pytest.mark.parametrize("ask_ragged", [ask_packed, ask_masked])
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"smooth_q": True}, "smooth_q=True has no kernel for d64_fp16_full_int8_ragged"),
        ({"precision": "int4", "min_cosine": 0.9}, "precision='int4' has no kernel for d64_fp16_full_int4_ragged"),
    ],
)
def test_means_of_queries_have_no_kernel_for_sequences(env, ask_ragged, options, reason):
    """INT4's default config needs them as well."""
    explanation = ask_ragged(env, **options)
    assert (explanation.answer, explanation.is_fallback, explanation.reason) == ("sdpa", True, reason)
    assert ask_window(env, **options).answer == "kernel"


# --- SAGEGEN_PIN

#: Valid on an H200, which PLAIN_V is not, and of V not smoothed either.
PINNED = PLAIN_V.replace("scoverlap", "scplain")


def pin(env: Env, name: str = PINNED) -> Env:
    return replace(env, pin=name)


@pytest.mark.parametrize("answer", ["kernel", "sdpa"])
def test_a_pinned_config_goes_before_what_is_tuned(env, answer):
    keep(env, entry(config=SMOOTH_V, answer=answer, vs_sdpa=0.5))
    explanation = ask(pin(env))
    assert (explanation.answer, explanation.config.name, explanation.found) == ("kernel", PINNED, None)
    assert explanation.kernel == f"d64_fp16_full_int8_{PINNED}"
    assert str(explanation).startswith("kernel: pinned by SAGEGEN_PIN\n")
    assert explanation.notes[-1].startswith("SAGEGEN_PIN decides on the config")


def test_a_pinned_config_is_int8_unless_int4_is_asked_for(env):
    keep(env, entry("int8", 100), entry("int4", 900, cosine=0.9995))
    assert precision_of(ask(env)) == "int4"
    assert precision_of(ask(pin(env))) == "int8"
    explanation = ask(pin(env, "default"), precision="int4")  # whatever min_cosine says
    assert precision_of(explanation) == "int4"
    assert explanation.passed_over == ()


@pytest.mark.parametrize(("kv", "kv_len"), [((1, 200), 100), ((1, 50), 100), ((200, None), 100)])
def test_an_entry_of_the_pinned_config_lends_its_cubin_whatever_its_lengths(env, kv, kv_len):
    keep(env, entry(config=PINNED, kv=kv, cubin_sha256="1" * 64))
    explanation = ask(pin(env), kv_len=kv_len)
    assert explanation.found.entry.cubin_sha256 == "1" * 64
    assert explanation.reason == "pinned by SAGEGEN_PIN; the cubin is that of an entry of h200"


def test_default_pins_the_default_config(env):
    untuned = ask(env).config
    keep(env, entry(config=PLAIN_V))
    explanation = ask(pin(env, "default"))
    assert (explanation.config, explanation.provenance) == (untuned, "untuned")


def test_a_step_that_the_pinned_config_does_not_take_is_not_dropped(env):
    explanation = ask(pin(env), smooth_v=True)
    assert (explanation.answer, explanation.is_fallback) == ("sdpa", True)
    assert explanation.reason == "smooth_v=True is not what the config of SAGEGEN_PIN does"
    assert ask(pin(env, SMOOTH_V), smooth_v=True).answer == "kernel"


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_a_pin_leaves_other_backends_alone(env, backend):
    assert ask(pin(env), backend=backend).answer == backend


def test_a_pinned_config_that_breaks_a_rule_is_named_with_the_rule(env):
    with pytest.raises(
        ConfigError, match=f"SAGEGEN_PIN: config {PLAIN_V} is not valid for h200 .*: overlap: .*; unset SAGEGEN_PIN"
    ):
        ask(pin(env, PLAIN_V))
    with pytest.raises(ConfigError, match=f"SAGEGEN_PIN: config {PINNED} is not valid for l20"):
        ask(pin(env), L20)


def test_a_pin_on_a_gpu_that_no_rule_knows_is_an_error(env):
    with pytest.raises(ConfigError, match=r"SAGEGEN_PIN=default: NVIDIA X is no known GPU.*sagegen gpus"):
        ask(pin(env, "default"), UNKNOWN)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fast", "SAGEGEN_PIN='fast': config 'fast' names no kernel family; start it with one of mma, wgmma"),
        (PLAIN_V.replace("bk128", "bk129"), "SAGEGEN_PIN='wgmma_c2_bk129.*bk129"),
        (PLAIN_V.removesuffix("_exmufu"), "SAGEGEN_PIN='wgmma_c2"),
    ],
)
def test_a_pin_that_spells_no_config_is_named(name, says):
    with pytest.raises(ArgumentError, match=says):
        check_pin(name)


def test_a_pin_may_be_any_config_the_default_or_none():
    for name in (PLAIN_V, "default", None):
        check_pin(name)


def test_a_pinned_config_holds_for_its_relatives_as_they_can_have_it(env):
    pinned = replace(env, pin=TUNED_WGMMA)
    assert ask_window(pinned).config.name == TUNED_WGMMA
    for ask_ragged in (ask_packed, ask_masked):
        assert ask_ragged(pinned).config == replace(parse_config(TUNED_WGMMA), q_quantizer="kernel")
    with pytest.raises(ConfigError, match="SAGEGEN_PIN: config wgmma_"):
        ask_packed(pinned, L20)


@pytest.mark.parametrize("device", [L20, H200], ids=["l20", "h200"])
def test_a_pinned_default_that_sequences_cannot_have_is_refused(env, device):
    """INT4's default smooths Q."""
    with pytest.raises(ConfigError, match=r"SAGEGEN_PIN: config .*ragged"):
        ask_packed(replace(env, pin="default"), device, precision="int4")
