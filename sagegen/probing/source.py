"""The kernels of the probes, as sources that `build` compiles."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from sagegen.probing.probes import Probe
from sagegen.render import DeviceLayer, Target, render_template

#: Architectures whose own variant has instructions that the plain one lacks.
_ARCH_SPECIFIC = ("sm_90", "sm_120")


@dataclass(frozen=True, slots=True)
class ProbeSource:
    """A rendered probe: what `render.Source` is for an attention kernel, with one kernel, of the role `probe`."""

    probe: Probe
    text: str

    @property
    def name(self) -> str:
        return self.probe.name

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def roles(self) -> tuple[str, ...]:
        return ("probe",)

    def entry(self, role: str) -> str:
        """The extern "C" name of its kernel."""
        return f"{role}_{self.name}"

    def target(self, arch: str) -> str:
        """What it is compiled for, to run on a GPU of `arch`."""
        return f"{arch}a" if arch in _ARCH_SPECIFIC else arch


def kernel_entry(probe: Probe) -> str:
    """The extern "C" name of a probe's kernel."""
    return ProbeSource(probe, "").entry("probe")


def render_probe(probe: Probe, target: Target = "cuda") -> ProbeSource:
    """The kernel of `probe`; for the emulator with `target` host."""
    products = ((probe.wgmma_form, int(str(probe.values["columns"]))),) if probe.wgmma_form else ()
    named = ProbeSource(probe, "")
    values = {
        "source": named,
        "probe": {**probe.values, "kind": probe.kind, "title": probe.title, "threads": probe.threads},
        "multiply": probe.function,
        "operand": probe.operand,
        "accumulator": probe.accumulator,
    }
    text = render_template("probe.cu.j2", named.name, DeviceLayer(probe.includes, products), target, values)
    return ProbeSource(probe, text)
