"""Every kernel that is launched is tested in both ways: interpreted and compiled."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]


def functions(folder, pattern):
    for path in sorted(folder.glob(pattern)):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield path, node


def names(node):
    """All names that are used below a node, attributes included."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            yield inner.id
        elif isinstance(inner, ast.Attribute):
            yield inner.attr


def used_in_tests(pattern):
    return {
        name
        for path in sorted((ROOT / "tests/kernels").glob(pattern))
        for name in names(ast.parse(path.read_text()))
    }


def kernels_and_callers():
    """Return {launched kernel: names of functions that lead to its launch}."""
    ours = {node.name: node for _, node in functions(ROOT / "kernels", "*.py")}
    jitted = {
        name
        for name, node in ours.items()
        if any(isinstance(d, ast.Name) and d.id == "jit" for d in node.decorator_list)
    }
    inner = {name for kernel in jitted for name in names(ours[kernel])}
    uses = {name: set(names(node)) for name, node in ours.items() if name not in jitted}
    found = {}
    for kernel in jitted - inner:
        callers, more = set(), {kernel}
        while more:
            more = {name for name, used in uses.items() if used & more} - callers
            callers |= more
        found[kernel] = callers
    return found


def test_each_kernel_is_launched_interpreted_and_compiled_by_a_test():
    kernels = kernels_and_callers()
    assert {"append_rows", "copy_pages", "quantise_pages", "sum_words"} <= kernels.keys()
    interpreted, compiled = used_in_tests("*_interp.py"), used_in_tests("*_compile.py")
    for kernel, callers in kernels.items():
        assert callers, f"{kernel} is never launched"
        assert callers & interpreted, f"{kernel} has no interpreted test"
        assert kernel in compiled, f"{kernel} has no compile test"
