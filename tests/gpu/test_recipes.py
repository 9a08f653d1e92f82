"""What a card's kernels lose on a language model's layers is what the reference of `sagegen ablate` loses.

With OUT set, the figures go to $OUT/recipes.json.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from kernel_kinds import KernelKind
from sagegen.ablation.deviation import find_deviation
from sagegen.ablation.emulation import emulate
from sagegen.ablation.recipe import Recipe
from sagegen.build import BuildFailure, build_batch
from sagegen.env import read_env
from sagegen.gpu import Gpu
from sagegen.launch import load_program
from sagegen.measuring.call import call_program
from sagegen.measuring.inputs import DTYPES, Inputs, load_captured
from sagegen.problem import Problem
from sagegen.reference import attention, fp8_accumulator, quantized_attention
from sagegen.render import Source, render
from sagegen.rules import Target
from sagegen.space import Value
from sagegen.store import open_store
from sagegen.toolkit import Toolkit

pytestmark = pytest.mark.gpu

TESTS = Path(__file__).parents[1]
#: Whole layers where the shared folder travels along, else the three heads of the repository's own copy.
FILES = [TESTS.parent / "shared" / "data" / "smollm2_qkv.safetensors", TESTS / "data" / "smollm2_qkv.safetensors"]
LAYERS = load_captured(next(path for path in FILES if path.exists()))
#: Equal to three digits: less than half of the third one apart.
WITHIN = 5e-4
#: The papers' tile, scales per thread and FP8 P V, as the recipe's defaults.
PAPER: dict[str, Value] = {
    "block_q": 128, "block_k": 64, "granularity": "thread", "q_span": 32, "k_span": 64, "pv": "e4m3f32",
    "accum_depth": 64, "smooth_v": "no",
}  # fmt: skip
WGMMA: dict[str, Value] = {"exponent": "mufu"}


@dataclass(frozen=True)
class Way:
    """How scores are smoothed: fields of the mma and the wgmma family, and of a recipe."""

    name: str
    mma: dict[str, Value] = field(default_factory=dict)
    wgmma: dict[str, Value] = field(default_factory=dict)
    recipe: dict[str, object] = field(default_factory=dict)


OFF: dict[str, Value] = {"mean_span": 0, "rotate": "no"}
WAYS = (
    Way("K", OFF, OFF, {"smooth_q": False}),
    Way("Q+K", OFF | {"mean_span": 128}, OFF | {"mean_span": 192}),
    Way("Q+K+rotation", {"mean_span": 128, "rotate": "yes"}, {"mean_span": 192, "rotate": "yes"}, {"rotate": True}),
    Way(
        "Q+K+rotation+balance",
        {"mean_span": 128, "rotate": "yes", "balance": "yes"},
        {"mean_span": 192, "rotate": "yes", "balance": "yes"},
        {"rotate": True, "balance": "rms"},
    ),
)
CASES = [(precision, way, family) for precision in ("int8", "int4") for way in WAYS for family in ("mma", "wgmma")]


@pytest.fixture(scope="module")
def figures() -> Iterator[list[dict[str, object]]]:
    rows: list[dict[str, object]] = []
    yield rows
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "recipes.json").write_text(json.dumps(rows, indent=1))


@pytest.fixture(scope="module")
def truths() -> dict[str, tuple[Inputs, torch.Tensor]]:
    """By layer: inputs on the card, and causal attention in FP64."""
    found = {}
    for name, layer in LAYERS.items():
        inputs = layer.map(lambda x: x.to("cuda", DTYPES["bf16"]))
        found[name] = inputs, attention(inputs.q, inputs.k, inputs.v, is_causal=True, out_dtype=torch.float64)
    return found


def problem_of(precision: str) -> Problem:
    head_dim = next(iter(LAYERS.values())).q.shape[-1]
    return Problem(head_dim, "bf16", True, precision)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def built(gpu: Gpu, toolkit: Toolkit) -> dict[str, object]:
    """Sources and cubins of all cases that the card has, by test id."""
    sources = {}
    for precision, way, family in CASES:
        problem = problem_of(precision)
        asked = PAPER | way.mma if family == "mma" else WGMMA | way.wgmma
        config = KernelKind(way.name, family, asked).find_config(Target(gpu, problem, toolkit.version))
        if config is not None:
            sources[precision, way.name, family] = render(problem, config)
    batch = {source.name: source for source in sources.values()}
    cubins = build_batch(list(batch.values()), gpu.arch, open_store(read_env()), toolkit)
    failures = [result for result in cubins.values() if isinstance(result, BuildFailure)]
    assert not failures, failures[0]
    return {key: (source, cubins[source.name].cubin) for key, source in sources.items()}


def run_reference(source: Source, inputs: Inputs, way: Way, gpu: Gpu) -> torch.Tensor:
    """The ablation's of the mma family, which has its groups; of wgmma, whose own are finer, the config's."""
    if source.config.family == "mma":
        recipe = replace(Recipe(qk=source.problem.precision, accumulator="fp32"), **way.recipe)
        return emulate(inputs, recipe, is_causal=True)
    accumulator = fp8_accumulator(source.config, gpu.compute_capability)
    return quantized_attention(inputs.q, inputs.k, inputs.v, source.problem, source.config, accumulator=accumulator)[0]


@pytest.mark.parametrize(("precision", "way", "family"), CASES, ids=lambda part: getattr(part, "name", part))
def test_kernels_lose_what_the_reference_loses(precision, way, family, built, truths, figures, gpu) -> None:
    if (precision, way.name, family) not in built:
        pytest.skip(f"needs a GPU and an nvcc with {family} kernels")
    source, cubin = built[precision, way.name, family]
    program = load_program(cubin.read_bytes(), source.name, source.problem, source.config, 0)
    off = {}
    for name, (inputs, truth) in truths.items():
        out, _ = call_program(program, source.problem, source.config, inputs.q, inputs.k, inputs.v)
        kernel = find_deviation(out, truth)
        reference = find_deviation(run_reference(source, inputs, way, gpu), truth)
        off[name] = abs(kernel.cosine - reference.cosine)
        figures.append(
            {
                "precision": precision, "way": way.name, "family": family, "config": source.config.name, "layer": name,
                "kernel": kernel.cosine, "reference": reference.cosine,
                "kernel_l1": kernel.relative_l1, "reference_l1": reference.relative_l1,
            }
        )  # fmt: skip
    program.unload()
    assert max(off.values()) < WITHIN, off
