"""GPUs: the table of known ones, and those that are present."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

from sagegen.errors import UnknownNameError

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Rates:
    """What `sagegen probe` measured on a GPU; what is absent was not measured, and the table holds.

    Attributes:
        matrix: 1e12 operations per second of the whole chip, sustained, by the name of a matrix probe (`mma_s8`).
        units: results per clock and SM, by the name of a scalar probe (`ex2`).
        dram_gbs: device memory, read and written bytes of a copy together, GB/s.
        l2_bytes: that one SM reads from L2 per clock.
    """

    matrix: Mapping[str, float] = field(default_factory=dict)
    units: Mapping[str, float] = field(default_factory=dict)
    dram_gbs: float | None = None
    l2_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """A known GPU.

    Attributes:
        name: what commands and registries call it.
        arch: nvcc's target, e.g. `sm_89`.
        products: names by which the NVIDIA driver reports it.
        sms: streaming multiprocessors.
        smem_per_block: most shared memory of one block after opting in, bytes.
        smem_per_sm: shared memory of one SM, bytes.
        threads_per_sm: most resident threads of one SM.
        l2_bytes: L2 cache.
        bandwidth_gbs: device memory bandwidth by its data sheet, GB/s.
        boost_mhz: boost clock by its data sheet.
        peaks: dense rate of the whole chip, 1e12 operations per second, by kind of mma.sync: `s8`, `s4` (INT32
            accumulator), `e4m3f32`, `f16f32`, `bf16f32` (FP32 accumulator), `e4m3f16` (FP16 accumulator). A kind that
            the chip has no unit for is absent.
        source: where the figures are from.
        siblings: GPUs whose tuned entries may be borrowed, best first.
        measured: what a probe said; the model prefers it to the rest of the row. It is the same GPU with and without.
    """

    name: str
    arch: str
    products: tuple[str, ...]
    sms: int
    smem_per_block: int
    smem_per_sm: int
    threads_per_sm: int
    l2_bytes: int
    bandwidth_gbs: float
    boost_mhz: int
    peaks: Mapping[str, float]
    source: str
    siblings: tuple[str, ...] = ()
    measured: Rates = field(default=Rates(), compare=False)

    @property
    def compute_capability(self) -> int:
        """Major times ten plus minor: 89 for `sm_89`, 90 for `sm_90a`."""
        return int(self.arch.removeprefix("sm_").rstrip("a"))


#: (KiB of shared memory per block after opting in, KiB per SM, threads per SM), CUDA C++ programming guide,
#: "Technical Specifications per Compute Capability".
_SM_LIMITS = {
    "sm_80": (163, 164, 2048),
    "sm_86": (99, 100, 1536),
    "sm_89": (99, 100, 1536),
    "sm_90": (227, 228, 2048),
    "sm_120": (99, 100, 1536),
}
#: FP32 lanes of an SM (same table): NVML counts lanes, not SMs.
_LANES_PER_SM = {70: 64, 75: 64, 80: 64}
_USUAL_LANES_PER_SM = 128


def _gpu(
    name: str,
    arch: str,
    products: tuple[str, ...],
    *,
    sms: int,
    l2_mib: int,
    bandwidth_gbs: float,
    boost_mhz: int,
    peaks: dict[str, float],
    source: str,
    siblings: tuple[str, ...] = (),
) -> Gpu:
    per_block, per_sm, threads = _SM_LIMITS[arch]
    return Gpu(
        name=name,
        arch=arch,
        products=products,
        sms=sms,
        smem_per_block=per_block * 1024,
        smem_per_sm=per_sm * 1024,
        threads_per_sm=threads,
        l2_bytes=l2_mib * _MIB,
        bandwidth_gbs=bandwidth_gbs,
        boost_mhz=boost_mhz,
        peaks=MappingProxyType(peaks),
        source=source,
        siblings=siblings,
    )


# e4m3f16: the whitepapers of GeForce have it, twice e4m3f32; of L20, L40 and L40S no document says more than one rate
# for FP8, so it is taken for both accumulators.
_TABLE = (
    _gpu("a100", "sm_80", ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-40GB"),
         sms=108, l2_mib=40, bandwidth_gbs=2039, boost_mhz=1410,
         peaks={"s8": 624, "s4": 1248, "f16f32": 312, "bf16f32": 312},
         source="NVIDIA A100 data sheet (SXM; 80 GB, the 40 GB card has 1555 GB/s)"),
    _gpu("rtx3090", "sm_86", ("NVIDIA GeForce RTX 3090",),
         sms=82, l2_mib=6, bandwidth_gbs=936, boost_mhz=1695,
         peaks={"s8": 284, "s4": 568, "f16f32": 71, "bf16f32": 71},
         source="NVIDIA Ampere GA102 whitepaper v2.1, appendix A"),
    _gpu("l20", "sm_89", ("NVIDIA L20",),
         sms=92, l2_mib=96, bandwidth_gbs=864, boost_mhz=2520,
         peaks={"s8": 239, "s4": 478, "e4m3f32": 239, "e4m3f16": 239, "f16f32": 119.5, "bf16f32": 119.5},
         siblings=("l40", "l40s"),
         source="NVIDIA L20 data sheet; SMs, clock, L2: TopCPU. INT8, INT4: half a GeForce's rate per SM, as on L40"),
    _gpu("l40", "sm_89", ("NVIDIA L40",),
         sms=142, l2_mib=96, bandwidth_gbs=864, boost_mhz=2490,
         peaks={"s8": 362, "s4": 724, "e4m3f32": 362, "e4m3f16": 362, "f16f32": 181.05, "bf16f32": 181.05},
         siblings=("l20", "l40s"),
         source="NVIDIA L40 data sheet"),
    _gpu("l40s", "sm_89", ("NVIDIA L40S",),
         sms=142, l2_mib=96, bandwidth_gbs=864, boost_mhz=2520,
         peaks={"s8": 733, "s4": 1466, "e4m3f32": 733, "e4m3f16": 733, "f16f32": 362.05, "bf16f32": 362.05},
         siblings=("l40", "l20"),
         source="NVIDIA L40S data sheet; INT4: twice INT8, as on the other AD102 (RTX 4090, L40)"),
    _gpu("rtx4090", "sm_89", ("NVIDIA GeForce RTX 4090",),
         sms=128, l2_mib=72, bandwidth_gbs=1008, boost_mhz=2520,
         peaks={"s8": 660.6, "s4": 1321.2, "e4m3f32": 330.3, "e4m3f16": 660.6, "f16f32": 165.2, "bf16f32": 165.2},
         source="NVIDIA Ada GPU architecture whitepaper v2.1, appendix A"),
    _gpu("h20", "sm_90", ("NVIDIA H20",),
         sms=78, l2_mib=60, bandwidth_gbs=4000, boost_mhz=1980,
         peaks={"s8": 296, "f16f32": 148, "bf16f32": 148},
         source="NVIDIA H20 data sheet; its units are capped below what mma.sync reaches per SM on H200"),
    _gpu("h100", "sm_90", ("NVIDIA H100 80GB HBM3",),
         sms=132, l2_mib=50, bandwidth_gbs=3350, boost_mhz=1980,
         peaks={"s8": 1148, "f16f32": 629, "bf16f32": 629}, siblings=("h200",),
         source="NVIDIA H100 data sheet (SXM); peaks as measured on H200, the same chip, SM count and clock"),
    _gpu("h200", "sm_90", ("NVIDIA H200",),
         sms=132, l2_mib=60, bandwidth_gbs=4800, boost_mhz=1980,
         peaks={"s8": 1148, "f16f32": 629, "bf16f32": 629}, siblings=("h100",),
         source="NVIDIA H200 data sheet; SMs, L2, clock and mma.sync rates measured (s8, bf16; f16 has bf16's rate)"),
    _gpu("rtx5090", "sm_120", ("NVIDIA GeForce RTX 5090",),
         sms=170, l2_mib=96, bandwidth_gbs=1792, boost_mhz=2407,
         peaks={"s8": 838, "e4m3f32": 419, "e4m3f16": 838, "f16f32": 209.5, "bf16f32": 209.5},
         source="NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A"),
)  # fmt: skip

#: Known GPUs by name.
GPUS: Mapping[str, Gpu] = MappingProxyType({gpu.name: gpu for gpu in _TABLE})


def find_gpu(name: str) -> Gpu:
    """The known GPU of that name.

    Raises:
        UnknownNameError: there is none; the message suggests the nearest names.
    """
    if name in GPUS:
        return GPUS[name]
    spelled = re.sub(r"nvidia|geforce|[^a-z0-9]", "", name.lower())
    # `4090` and `NVIDIA GeForce RTX 4090` mean rtx4090; `l200` is a slip of the pen
    near = [known for known in GPUS if spelled and (spelled == known or known.endswith(spelled))]
    near = near or difflib.get_close_matches(spelled, GPUS, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known ones: {', '.join(GPUS)}"
    raise UnknownNameError(f"GPU {name!r} is unknown", f"{hint} (`sagegen gpus` lists them)")


@dataclass(frozen=True, slots=True)
class DetectedGpu:
    """A GPU of this machine.

    Attributes:
        index: NVML's index, in PCI bus order; CUDA's may differ (CUDA_DEVICE_ORDER).
        product: the driver's name for it.
        sms: its SM count; a MIG slice or a cut-down product of the same name has fewer than the table's row.
        driver: version of the driver.
        arch: e.g. `sm_90`.
        gpu: the known GPU that it is; None when the table has none.
        uuid: selects exactly this GPU as CUDA_VISIBLE_DEVICES, whatever the order.
    """

    index: int
    product: str
    sms: int
    driver: str
    arch: str
    gpu: Gpu | None
    uuid: str = ""


def match_gpu(product: str, sms: int) -> Gpu | None:
    """The known GPU with the driver's name `product` and that many SMs."""
    return next((gpu for gpu in GPUS.values() if product in gpu.products and sms == gpu.sms), None)


def detect_gpus() -> list[DetectedGpu]:
    """The GPUs of this machine that CUDA_VISIBLE_DEVICES leaves visible; [] without a driver.

    Asks NVML, so it makes no CUDA context.
    """
    with _nvml() as available:
        found = list(_read_gpus()) if available else []
    return [gpu for gpu in found if is_visible(gpu, os.environ.get("CUDA_VISIBLE_DEVICES"))]


def is_visible(gpu: DetectedGpu, visible: str | None) -> bool:
    """Whether CUDA_VISIBLE_DEVICES=`visible` (None: unset) shows `gpu`; numbers count in PCI bus order."""
    if visible is None:
        return True
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdecimal():
            if int(entry) == gpu.index:
                return True
        elif entry.startswith("GPU-"):
            if gpu.uuid.startswith(entry):
                return True
        else:  # as CUDA does: an entry that names nothing hides all that follow
            return False
    return False


@contextmanager
def _nvml() -> Iterator[bool]:
    """NVML between its init and shutdown; False where there is no driver."""
    import pynvml  # not at the top: the run path imports this module for its table

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()


def _read_gpus() -> Iterable[DetectedGpu]:
    import pynvml

    driver = str(pynvml.nvmlSystemGetDriverVersion())
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        product = str(pynvml.nvmlDeviceGetName(handle))
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        lanes_per_sm = _LANES_PER_SM.get(10 * major + minor, _USUAL_LANES_PER_SM)
        try:
            sms = pynvml.nvmlDeviceGetNumGpuCores(handle) // lanes_per_sm
        except pynvml.NVMLError_NotSupported:  # some virtual GPUs; 0 matches no known one
            sms = 0
        yield DetectedGpu(
            index=index,
            product=product,
            sms=sms,
            driver=driver,
            arch=f"sm_{major}{minor}",
            gpu=match_gpu(product, sms),
            uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
        )
