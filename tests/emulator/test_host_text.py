"""The host's text is the CUDA text in every byte outside the device layer, and the layer's two bodies say the same."""

from __future__ import annotations

import re
from pathlib import Path

import jinja2
import pytest

import sagegen.templates
from sagegen.render import render

INCLUDES = Path(sagegen.templates.__file__).parent / "include"
#: Declarations of the emulator's runtime; they have no CUDA body.
RUNTIME = re.compile(r"emulator(_\w+)?")
#: Functions of other overloads than CUDA's: a C++ compiler needs no body for every size of a product.
OTHER_OVERLOADS = {"wgmma"}
#: What the templates among the CUDA bodies are rendered with.
CONTEXT = {"wgmma_products": [("s8_ss", 64), ("e4m3_ss", 64), ("e4m3_rs", 128)]}


def split(text):
    """The lines before the device layer's body, its body, and the lines after it; the markers belong to neither."""
    lines = text.split("\n")
    begin = next(i for i, line in enumerate(lines) if line.startswith("// ---- device layer: begin"))
    end = lines.index("// ---- device layer: end ----")
    return lines[:begin], lines[begin + 1 : end], lines[end + 1 :]


def numbered(lines):
    """Lines with their files and numbers, as `#line` says."""
    file, number = "kernel.cu", 1
    for line in lines:
        if directive := re.fullmatch(r'#line (\d+) "(.+)"', line):
            number, file = int(directive[1]), directive[2]
        else:
            yield file, number, line
            number += 1


def test_texts_differ_in_the_device_layer_only(variant):
    cuda, host = (render(variant.problem, variant.config, target) for target in ("cuda", "host"))
    assert cuda.name == host.name
    (before, cuda_layer, after), (host_before, host_layer, host_after) = split(cuda.text), split(host.text)
    assert (before, after) == (host_before, host_after)
    assert len(cuda.text.split("\n")) == len(before) + len(cuda_layer) + len(after) + 2
    assert cuda_layer != host_layer
    assert not any("asm" in line for line in host.text.split("\n"))


def test_lines_after_the_device_layer_have_the_numbers_of_the_cuda_text(variant):
    cuda, host = (render(variant.problem, variant.config, target) for target in ("cuda", "host"))
    cuda_lines = cuda.text.split("\n")
    of_kernel = [(number, line) for file, number, line in numbered(host.text.split("\n")) if file == f"{host.name}.cu"]
    first = cuda_lines.index("// ---- device layer: end ----")
    assert of_kernel == list(enumerate(cuda_lines[first:], start=first + 1))


def bodies(target):
    """Texts of the device layer's files by name."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    found = {}
    for path in sorted((INCLUDES / target).glob("*.cuh*")):
        text = path.read_text()
        found[path.name.split(".")[0]] = environment.from_string(text).render(CONTEXT) if path.suffix == ".j2" else text
    return found


CUDA, HOST = bodies("cuda"), bodies("host")


def test_every_file_of_the_device_layer_has_both_bodies():
    assert set(CUDA) == {name for name in HOST if not RUNTIME.fullmatch(name)}


def split_parameters(text):
    """`int a, T (&b)[4]` at its outer commas, white space evened out."""
    parts, depth = [""], 0
    for character in " ".join(text.split()):
        depth += (character in "(<[") - (character in ")>]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def functions(text):
    """(name, parameters) of the functions that kernels call, in order; the line that a host body takes left out."""
    found = []
    for match in re.finditer(r"^__device__ __forceinline__ [\w ]+[ *&]+(\w+)\(", text, re.MULTILINE):
        depth, end = 1, match.end()
        while depth:
            depth += (text[end] == "(") - (text[end] == ")")
            end += 1
        parameters = split_parameters(text[match.end() : end - 1])
        found.append((match[1], [p for p in parameters if p != "int line = __builtin_LINE()"]))
    return found


@pytest.mark.parametrize("name", sorted(set(CUDA) & set(HOST)))
def test_both_bodies_have_the_same_functions(name):
    cuda, host = functions(CUDA[name]), functions(HOST[name])
    assert len(cuda) == CUDA[name].count("__device__ __forceinline__") > 0, "a function escapes the test"
    assert not any("line" in parameter for _, parameters in cuda for parameter in parameters)
    if name in OTHER_OVERLOADS:
        assert {function for function, _ in cuda} == {function for function, _ in host}
    else:
        assert cuda == host
