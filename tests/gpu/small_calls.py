"""One small call of every kernel, for a checker to watch; no test.

compute-sanitizer --tool memcheck --report-api-errors no python tests/gpu/small_calls.py
compute-sanitizer --tool racecheck python tests/gpu/small_calls.py

Kernels: those of this GPU's registry, the default configs, and diverse ones of either P·V kind. The shapes leave tails
in every tile, share heads (GQA), and one key holds a NaN.
"""

from __future__ import annotations

import math

import torch

from sagegen.build import Built, build_batch
from sagegen.env import read_env
from sagegen.gpu import Gpu, match_gpu
from sagegen.launch import load_program
from sagegen.measuring.call import call_program
from sagegen.problem import DTYPES, HEAD_DIMS, Problem, parse_problem
from sagegen.registry import load_registry
from sagegen.render import Source, render
from sagegen.rules import Target, broken_rules, default_config
from sagegen.space import parse_config
from sagegen.store import open_store
from sagegen.toolkit import find_toolkit

TORCH_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
DIVERSE = (
    "mma_bq64_bk64_w4_st3_pv{pv16}_ad0_cvmagic_grwarp_qs16_ks64_rsskip_qosmem_mb2",
    "mma_bq128_bk128_w8_st2_pve4m3f32_ad64_cvmagic_grblock_qs32_ks64_rsskip_qoreg_mb1",
    "mma_bq64_bk64_w2_st4_pve4m3f32_ad32_cvi2f_grthread_qs32_ks64_rsalways_qosmem_mb1",
)


def sources(gpu: Gpu) -> list[Source]:
    found = {}
    for problem in [Problem(d, t, causal) for d in HEAD_DIMS for t in DTYPES for causal in (False, True)]:
        target = Target(gpu, problem)
        pv16 = {"fp16": "f16f32", "bf16": "bf16f32"}[problem.dtype]
        configs = [default_config(target), *(parse_config(name.format(pv16=pv16)) for name in DIVERSE)]
        for config in configs:
            if not broken_rules(config, target):
                found[render(problem, config).name] = render(problem, config)
    registry = load_registry(gpu.name, read_env())
    for layer in registry.layers:
        for entry in layer.entries:
            if entry.config:
                source = render(parse_problem(entry.problem), parse_config(entry.config))
                found[source.name] = source
    return list(found.values())


def main() -> None:
    properties = torch.cuda.get_device_properties(0)
    gpu = match_gpu(properties.name, properties.multi_processor_count)
    if gpu is None:
        raise SystemExit(f"{properties.name} is no GPU of sagegen's table")
    wanted = sources(gpu)
    built = build_batch(wanted, gpu.arch, open_store(read_env()), find_toolkit(read_env()))
    for source in wanted:
        result = built[source.name]
        if not isinstance(result, Built):
            raise SystemExit(f"{source.name}: {result.reason}")
        program = load_program(result.cubin.read_bytes(), source.name, source.problem, source.config, 0)
        dtype = TORCH_DTYPES[source.problem.dtype]
        q = torch.randn(1, 4, 200, source.problem.head_dim, device="cuda", dtype=dtype)
        k, v = (torch.randn(1, 2, 333, source.problem.head_dim, device="cuda", dtype=dtype) for _ in range(2))
        k[0, 0, 5, 3] = math.nan
        call_program(program, source.problem, source.config, q, k, v, want_lse=True)
        torch.cuda.synchronize()
        program.unload()
    print(f"{len(wanted)} kernels on {gpu.name}")


if __name__ == "__main__":
    main()
