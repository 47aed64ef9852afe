"""Compiling kernels ahead of time, for GPUs that are not here, and what the compiler says.

A compile test says which arguments a real launch would find to be multiples of 16 (Triton's
launcher looks at them by itself), compiles for each of ``TARGETS`` and looks at registers,
spills, shared memory and at the width of accesses in the machine code.  The numbers are held
against a committed table: a change for the worse fails.  To accept new numbers run the tests
with ``TIERKV_WRITE_KERNEL_TABLE=1`` and commit the table.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # else Triton warns, and 3.10 changes it

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Shared memory a block may have, less 1 KiB that the system keeps.  The compiler does not
# check it: a launch would fail.
SHARED_LIMIT = {"sm_80": 162 << 10, "sm_90": 226 << 10, "sm_100": 226 << 10, "gfx942": 63 << 10}
WRITE = os.environ.get("TIERKV_WRITE_KERNEL_TABLE") == "1"


@dataclass(frozen=True)
class Usage:
    """What a compiled kernel needs.

    ``stack`` is bytes of local memory a thread (NVIDIA) or scratch a lane (AMD), which is where
    spilled registers go; ``spills`` counts spilled vector registers (AMD) or is the stack.
    """

    registers: int
    stack: int
    spills: int
    shared: int


def compile_kernel(fn, signature, constexprs, target, aligned=(), **options):
    """Compile a kernel with no device and return Triton's compiled kernel.

    Args:
        fn: what ``@jit`` returned (not under the interpreter).
        signature: type of every parameter in order: "*bf16", "*fp16", "*fp32", "*i8", "*u8",
            "*i32", "*i64", "i32", "i64", "fp32"; "constexpr" for constants.
        constexprs: values of the constants.  An integer that is 1 in a real launch becomes a
            constant there: give it as one here.
        target: a key of TARGETS, or a GPUTarget.
        aligned: parameters that are multiples of 16 (pointers: in bytes).
        options: num_warps, num_stages, enable_fp_fusion, ...
    """
    names = list(signature)
    unknown = [n for n in (*aligned, *constexprs) if n not in names]
    assert not unknown, f"{fn.__name__} has no parameters {unknown}"
    assert names == list(fn.arg_names), f"{fn.__name__}: signature {names} != {fn.arg_names}"
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    source = ASTSource(fn=fn, signature=signature, constexprs=constexprs, attrs=attrs)
    options = {"enable_fp_fusion": True, **options}
    return triton.compile(source, target=TARGETS.get(target, target), options=options)


def resource_usage(kernel):
    """Return the Usage of a compiled kernel."""
    shared = kernel.metadata.shared
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]

        def number(name):
            return int(re.search(rf"\.{name}:\s+(\d+)", text).group(1))

        return Usage(
            registers=number("vgpr_count"),
            stack=number("private_segment_fixed_size"),
            spills=number("vgpr_spill_count"),
            shared=shared,
        )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        out = subprocess.run(
            [tool, "--dump-resource-usage", cubin.name],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", out).groups())
    return Usage(registers=registers, stack=stack, spills=stack, shared=shared)


def access_widths(kernel):
    """Return the widths in bytes of all accesses to global memory, from PTX or AMD assembly.

    ``{"load": {16}, "store": {4, 16}}``; the sets hold each width once.  (Disassembling the
    machine code would take seconds a kernel, and ptxas keeps the widths of PTX.)
    """
    widths = {"load": set(), "store": set()}
    if "amdgcn" in kernel.asm:
        size = {"b128": 16, "dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4}
        size |= dict.fromkeys(("short", "ushort", "sshort"), 2)
        accesses = r"\b(?:global|buffer|flat)_(load|store)_([a-z0-9]+)"
        for kind, word in re.findall(accesses, kernel.asm["amdgcn"]):
            widths[kind].add(size.get(word, 1))
        return widths
    accesses = r"\b(ld|st)\.global(?:\.\w+(?:::\w+)*)*?(?:\.v(\d))?\.[busf](\d+)\b"
    for kind, vector, bits in re.findall(accesses, kernel.asm["ptx"]):
        widths["load" if kind == "ld" else "store"].add(int(vector or 1) * int(bits) // 8)
    return widths


class ResourceTable:
    """The committed numbers of one test file: {Triton version: {kernel: {target: usage}}}.

    Numbers are compared within one version only: compilers differ.  A version that the table
    does not know is not held against it; absolute limits still hold.
    """

    def __init__(self, path):
        self.path = Path(path)

    def _load(self):
        return json.loads(self.path.read_text()) if self.path.exists() else {}

    def check(self, name, target, usage):
        """Fail when ``usage`` is worse than the table's, or the table lacks the kernel."""
        table = self._load()
        of_version = table.get(triton.__version__, {})
        if WRITE:
            of_version.setdefault(name, {})[target] = asdict(usage)
            table[triton.__version__] = of_version
            self.path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
            return
        if not of_version:
            return
        known = of_version.get(name, {}).get(target)
        assert known is not None, f"{self.path.name} lacks {name} for {target}"
        worse = {
            key: f"{known[key]} -> {value}"
            for key, value in asdict(usage).items()
            if value > known[key]
        }
        assert not worse, f"{name} on {target} needs more than before: {worse}"


@dataclass(frozen=True)
class Case:
    """A kernel as it is launched: types of its arguments, its constants, what is aligned."""

    name: str
    kernel: object
    types: dict
    constants: dict
    aligned: tuple
    options: dict

    def compile(self, target):
        """Compile for a target."""
        signature = {
            name: "constexpr" if name in self.constants else self.types[name]
            for name in self.kernel.arg_names
        }
        return compile_kernel(
            self.kernel, signature, self.constants, target, self.aligned, **self.options
        )


def make_case(name, kernel, types, constants, *, config, unaligned=(), **options):
    """Return a Case with a configuration's warps and stages, all aligned but ``unaligned``."""
    aligned = tuple(n for n in types if n not in unaligned)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, **options}
    return Case(name, kernel, types, constants, aligned, options)
