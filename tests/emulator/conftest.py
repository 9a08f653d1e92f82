"""What tests in the emulator share: kernels that cover the space, compiled two at a time."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations

import pytest

from sagegen.emulator.program import load_emulated
from sagegen.env import read_env
from sagegen.gpu import find_gpu
from sagegen.problem import DTYPES, HEAD_DIMS, PRECISIONS, TUNED_HEAD_DIMS, Problem
from sagegen.reference import fp8_accumulator
from sagegen.rules import RULES, Target, default_config
from sagegen.space import FAMILIES, config_values

#: FP8 products have an FP22 accumulator on the first, FP32 on the second. A family that neither runs needs a third.
GPUS = ("l20", "h200")
_POOL = 1500
#: Traits that need no company: each once is enough, beside tests of their own and `smooths_q` in every company.
_ALONE = {"p_max", "v_max", "softmax", "mean_span", "delta", "balance"}
_MOST_DRAWS = 100_000


@dataclass(frozen=True)
class Variant:
    """A kernel and the GPU it is run as."""

    gpu_name: str
    problem: Problem
    config: object

    @property
    def gpu(self):
        return find_gpu(self.gpu_name)

    @property
    def name(self):
        return f"{self.gpu_name}-{self.problem.name}-{self.config.name}"

    @property
    def accumulator(self):
        """Of FP8 products, as the reference calls it."""
        return fp8_accumulator(self.config, self.gpu.compute_capability)

    @property
    def traits(self):
        """What it has of every choice that a variant is."""
        own = {"gpu": self.gpu_name, "family": self.config.family}
        for axis in ("head_dim", "dtype", "is_causal", "precision"):
            own[axis] = getattr(self.problem, axis)
        own |= config_values(self.config)
        own["smooths_q"] = self.config.smooths_q
        if {"pv", "accum_depth"} <= own.keys():  # sums that are promoted and others are rescaled in other places
            own["sums"] = (own["pv"], own["accum_depth"] > 0)
        if "conversion" in own:  # and scores become weights in other ways
            own["softmax"] = (own["conversion"], self.config.smooths_q, self.config.sums_in_fp16)
        return own


def draw_variant(space, head_dims, rng):
    problem = Problem(rng.choice(head_dims), rng.choice(DTYPES), rng.choice((False, True)), rng.choice(PRECISIONS))
    config = space.config_type(*[draw_value(p, rng) for p in space.params])
    return Variant(rng.choice(GPUS), problem, config)


def draw_value(param, rng):
    """Of a long list the neutral value half of the time, since the others go with few values of other parameters."""
    is_long = param.neutral is not None and len(param.values) > 2
    return rng.choice((param.neutral, rng.choice(param.values)) if is_long else param.values)


def is_valid(variant):
    """As `broken_rules` says, but no rule is asked after one that refuses: most draws are refused."""
    target = Target(variant.gpu, variant.problem)
    return all(rule.margin(variant.config, target) <= 0 for rule in RULES[variant.config.family])


def wanted_of(traits, in_pairs=True):
    """What a variant covers: its traits, and every pair of those that count in company."""
    paired = [trait for trait in traits.items() if in_pairs and trait[0] not in _ALONE]
    return {*((trait,) for trait in traits.items()), *combinations(paired, 2)}


def pick_variants(space, head_dims, in_pairs=True):
    """Few variants of a family that cover what is found in a pool of valid ones; always the same ones."""
    rng = random.Random(0)
    pool = {}
    for _ in range(_MOST_DRAWS):
        variant = draw_variant(space, head_dims, rng)
        if is_valid(variant):
            pool[variant] = wanted_of(variant.traits, in_pairs)
        if len(pool) == _POOL:
            break
    missing = set().union(*pool.values())
    picked = []
    while missing:
        picked.append(max(pool, key=lambda variant: len(pool[variant] & missing)))
        missing -= pool[picked[-1]]
    return picked


#: Nothing is tuned for these, so their default configs answer: FP8 V on the first GPU, 16-bit V on the second.
WIDE_DEFAULTS = (("l20", Problem(256, "bf16", is_causal=True)), ("rtx3090", Problem(256, "fp16", is_causal=False)))
WIDE_HEAD_DIMS = tuple(d for d in HEAD_DIMS if d not in TUNED_HEAD_DIMS)
VARIANTS = [
    *(variant for space in FAMILIES.values() for variant in pick_variants(space, TUNED_HEAD_DIMS)),
    *pick_variants(FAMILIES["mma"], WIDE_HEAD_DIMS, in_pairs=False),  # they are slow, and the same text but for sizes
    *(Variant(gpu, p, default_config(Target(find_gpu(gpu), p))) for gpu, p in WIDE_DEFAULTS),
]


#: Without what is drawn for wide head dims, whose text differs in sizes alone and which take a fifth of the time.
TYPICAL = [v for v in VARIANTS if v.problem.head_dim in TUNED_HEAD_DIMS or (v.gpu_name, v.problem) in WIDE_DEFAULTS]


def pytest_generate_tests(metafunc):
    if "variant" in metafunc.fixturenames:
        is_typical = metafunc.definition.get_closest_marker("typical") is not None
        metafunc.parametrize("variant", TYPICAL if is_typical else VARIANTS, ids=lambda variant: variant.name)


class Programs(dict):
    """Programs by variant, compiled when asked for."""

    def __missing__(self, variant):
        self[variant] = load_emulated(variant.problem, variant.config, variant.gpu, read_env(), workers=2)
        return self[variant]


@pytest.fixture(scope="session")
def variants():
    """The covering set."""
    return VARIANTS


@pytest.fixture(scope="session")
def programs(request):
    """Programs by variant; in a single process those of the tests that were selected are compiled two at a time."""
    found = Programs()
    if hasattr(request.config, "workerinput"):  # of pytest-xdist: the other cores have other tests
        return found
    callspecs = (getattr(item, "callspec", None) for item in request.session.items)
    wanted = {spec.params["variant"] for spec in callspecs if spec and "variant" in spec.params}
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(found.__missing__, wanted))
    return found


@pytest.fixture
def program(programs, variant):
    return programs[variant]


@pytest.fixture(scope="session", autouse=True)
def calm_torch(one_torch_thread):
    """The cores are the emulator's."""
