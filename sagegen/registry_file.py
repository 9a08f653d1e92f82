"""The YAML file of tuned winners: its schema, reading it with errors that name the line, writing it byte-stable.

schema: 1
gpu: h200
entries: [...]      # Entry, sorted by problem and bucket
...                 # YAML's end-of-document line, always written: a file that was cut short lacks it
"""

from __future__ import annotations

import difflib
import math
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NoReturn

import msgspec
import yaml
from yaml.reader import Reader

from sagegen.entry import ACCURACY_KINDS, Accuracy, Entry, KernelResources, Provenance, Range, Record, Timing
from sagegen.errors import RegistryError, UnknownNameError
from sagegen.gpu import GPUS
from sagegen.problem import parse_problem
from sagegen.space import parse_config

SCHEMA = 1

#: libyaml's parser where PyYAML has it: the first call of a process waits for this.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Document(Record, frozen=True, kw_only=True):
    schema: int
    gpu: str
    entries: list[Entry]


@dataclass(frozen=True, slots=True)
class _Located:
    """A parsed YAML tree that can say on which line a value stands."""

    where: str
    root: yaml.Node
    gpu: str

    @property
    def afresh(self) -> str:
        return start_afresh(self.where, self.gpu)

    def fail(self, node: yaml.Node, message: str, remedy: str) -> NoReturn:
        raise RegistryError(f"{self.where}:{node.start_mark.line + 1}: {message}", remedy)

    def find(self, path: str) -> yaml.Node:
        """The node at a msgspec path such as `$.entries[2].figures`; the deepest one that exists."""
        node = self.root
        for name, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", path):
            if index == "..." and isinstance(node, yaml.MappingNode):  # msgspec's word for a mapping's value
                node = next((value for _, value in node.value if not _is_accuracy(value)), node)
            elif name and isinstance(node, yaml.MappingNode):
                node = next((value for key, value in node.value if key.value == name), node)
            elif index and isinstance(node, yaml.SequenceNode):
                node = node.value[int(index)]
        return node


def _is_accuracy(node: yaml.Node) -> bool:
    try:
        msgspec.convert(yaml.SafeLoader("").construct_document(node), Accuracy)
    except msgspec.ValidationError:
        return False
    return True


def start_afresh(where: str, gpu: str) -> str:
    """The remedy of a file that is lost: a tuning run refuses to write over what it cannot read."""
    file = shlex.quote(where)
    return f"restore it from a backup, or move it away and tune again: mv {file} {file}.bad && sagegen tune --gpu {gpu}"


def parse_entries(text: str, where: str, gpu: str) -> list[Entry]:
    """The entries of a registry file.

    Args:
        text: the file's content.
        where: its name, for messages.
        gpu: the GPU that it must be of.

    Raises:
        RegistryError: naming file, line and key.
    """
    located = _parse_yaml(text, where, gpu)
    _check_header(located, gpu)
    document = _convert(located)
    nodes = located.find("$.entries").value
    for entry, node in zip(document.entries, nodes, strict=True):
        _check_entry(located, entry, node)
    _check_distinct(located, document.entries, nodes)
    return document.entries


def dump_entries(gpu: str, entries: Iterable[Entry]) -> str:
    """The file's text: the same entries in any order give the same bytes."""
    ordered = sorted(entries, key=lambda e: (e.problem, e.bucket.kv_min, e.tier or ""))
    content = {"schema": SCHEMA, "gpu": gpu, "entries": [_plain(e) for e in ordered]}
    text: str = yaml.safe_dump(content, sort_keys=False, explicit_end=True, width=1 << 20, allow_unicode=True)
    return text


def _plain(entry: Entry) -> dict[str, object]:
    """Built-in types in reading order: what is asked, what answers, how good it is, where that comes from."""
    values: dict[str, object] = msgspec.to_builtins(entry)
    if "accuracy" in values:
        values["accuracy"] = {kind: msgspec.to_builtins(entry.accuracy[kind]) for kind in sorted(entry.accuracy)}
    last = values.pop("provenance")
    return {**values, "provenance": last}


def _parse_yaml(text: str, where: str, gpu: str) -> _Located:
    afresh, end = start_afresh(where, gpu), text.count("\n") + 1
    if unprintable := Reader.NON_PRINTABLE.search(text):  # libyaml does not say where
        line = text.count("\n", 0, unprintable.start()) + 1
        raise RegistryError(f"{where}:{line}: the character {unprintable[0]!r} is no text", afresh)
    if re.search(r"^\.\.\.\s*\Z", text, re.MULTILINE) is None:
        raise RegistryError(f"{where}:{end}: the file is cut short: its last line is not `...`", afresh)
    try:
        root = yaml.compose(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else end
        raise RegistryError(
            f"{where}:{line}: not YAML: {getattr(error, 'problem', error)}", f"mend that line, or {afresh}"
        ) from error
    if root is None:
        raise RegistryError(f"{where}:1: the file is empty", afresh)
    located = _Located(where, root, gpu)
    for node in _walk(located):
        if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.startswith("tag:yaml.org,2002:python"):
            located.fail(node, f"tag {node.tag} is not allowed", "only plain values belong into a registry")
        if node.tag.endswith(":float") and not _is_finite(node):
            located.fail(node, f"figure {node.value} is not finite", located.afresh)
    return located


def _is_finite(node: yaml.ScalarNode) -> bool:
    """Whether a figure is: 1.0e+999 is not, for all its digits."""
    try:
        return math.isfinite(yaml.SafeLoader("").construct_yaml_float(node))
    except ValueError:  # told when values are made
        return True


def _walk(located: _Located) -> Iterator[yaml.Node]:
    """Every node once; refuses aliases (a few lines of them unfold to gigabytes) and keys that occur twice."""
    seen: set[int] = set()
    pending = [located.root]
    while pending:
        node = pending.pop()
        if id(node) in seen:
            located.fail(node, "YAML aliases are not allowed", "write the value out")
        seen.add(id(node))
        yield node
        if isinstance(node, yaml.SequenceNode):
            pending += node.value
        elif isinstance(node, yaml.MappingNode):
            keys: set[str] = set()
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode) or key.value in keys:
                    located.fail(key, f"key `{key.value}` occurs twice or is no plain text", "keep one")
                keys.add(key.value)
                pending += (key, value)


def _check_header(located: _Located, gpu: str) -> None:
    root = located.root
    if not isinstance(root, yaml.MappingNode):
        located.fail(root, "a registry is a mapping with the keys schema, gpu, entries", located.afresh)
    header = {key.value: value for key, value in root.value}
    if "schema" in header and header["schema"].value != str(SCHEMA):
        located.fail(
            header["schema"],
            f"key `schema`: version {header['schema'].value} is not known to this sagegen, which reads {SCHEMA}",
            f"upgrade sagegen, or {located.afresh}",
        )
    if "gpu" in header and header["gpu"].value != gpu:
        located.fail(header["gpu"], f"key `gpu`: {header['gpu'].value!r} is not {gpu!r}", "name the file after its GPU")
    if gpu not in GPUS:
        located.fail(root, f"key `gpu`: {gpu!r} is not a known GPU", "list them with: sagegen gpus")


def _convert(located: _Located) -> _Document:
    loader = yaml.SafeLoader("")
    try:
        return msgspec.convert(loader.construct_document(located.root), _Document)
    except msgspec.ValidationError as error:
        _explain_invalid(located, str(error))
    except (yaml.YAMLError, ValueError, KeyError, AttributeError, RecursionError) as error:
        # PyYAML's constructors raise plain errors for dates, integers and booleans that are none
        located.fail(located.root, f"not plain YAML: {error}", "write plain values")


def _explain_invalid(located: _Located, error: str) -> NoReturn:
    """Raise what msgspec says with the key, its line and a remedy."""
    message, _, path = error.partition(" - at ")
    node, key = located.find(path), path.strip("`").removeprefix("$").removeprefix(".")
    if missing := re.search(r"missing required field `(.+)`", message):
        name = f"{key}.{missing[1]}".removeprefix(".")
        located.fail(node, f"key `{name}` is missing", f"add it, or {located.afresh}")
    if unknown := re.search(r"unknown field `(.+)`", message):
        # inside a mapping of input kinds msgspec's path ends early: the keys below are searched
        found = next((key for key in _keys(node) if key.value == unknown[1]), node)
        near = difflib.get_close_matches(unknown[1], _field_names(), n=1)
        located.fail(found, f"key `{unknown[1]}` is not known", f"did you mean `{near[0]}`?" if near else "remove it")
    located.fail(node, f"key `{key}`: {message}", f"mend that value, or {located.afresh}")


def _keys(node: yaml.Node) -> Iterator[yaml.ScalarNode]:
    """Every key at or below `node`."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key
            yield from _keys(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _keys(value)


def _field_names() -> list[str]:
    records: tuple[type[Record], ...] = (_Document, Entry, Range, Timing, Accuracy, KernelResources, Provenance)
    return [name for record in records for name in record.__struct_fields__]


def _check_entry(located: _Located, entry: Entry, node: yaml.MappingNode) -> None:
    values = {key.value: value for key, value in node.value}
    for key, parse in (("problem", parse_problem), ("config", parse_config)):
        text = getattr(entry, key)
        try:
            if text is not None:
                parse(text)
        except UnknownNameError as error:
            located.fail(values[key], f"key `{key}`: {error.message}", error.remedy)
    if entry.kernel is not None and entry.kernel != f"{entry.problem}_{entry.config}":
        # the cubin would be launched with another config's grid, threads and scratch
        located.fail(values["kernel"], "key `kernel` is not `<problem>_<config>` of its entry", located.afresh)
    for kind in set(entry.accuracy) - set(ACCURACY_KINDS):
        key_node = next(key for key, _ in values["accuracy"].value if key.value == kind)
        near = difflib.get_close_matches(kind, ACCURACY_KINDS, n=1)
        remedy = f"did you mean `{near[0]}`?" if near else "remove it"
        located.fail(key_node, f"key `accuracy`: {kind!r} is no input kind of the accuracy gate", remedy)
    if entry.bucket.kv_max is not None and entry.bucket.kv_max < entry.bucket.kv_min:
        located.fail(values["bucket"], "key `bucket`: kv_max is below kv_min", "swap them")
    if entry.answer == "kernel":
        for key in ("config", "kernel", "cubin_sha256"):
            if getattr(entry, key) is None:
                located.fail(node, f"key `{key}` is missing, and the answer is `kernel`", located.afresh)


def _check_distinct(located: _Located, entries: list[Entry], nodes: list[yaml.Node]) -> None:
    for later, entry in enumerate(entries):
        for earlier, other in enumerate(entries[:later]):
            if entry.overlaps(other):
                what = "the same bucket as" if entry.lengths == other.lengths else "a bucket that overlaps"
                located.fail(
                    nodes[later],
                    f"key `bucket`: {entry.problem} {entry.lengths.name} has {what} the entry on line "
                    f"{nodes[earlier].start_mark.line + 1}",
                    "keep one of them",
                )
