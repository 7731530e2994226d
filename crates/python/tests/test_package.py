"""The package as a whole: doctests, types, names."""

import ast
import doctest
import importlib
import inspect
import pkgutil
import sys
from pathlib import Path

import pytest

import sluice

MODULES = sorted(m.name for m in pkgutil.iter_modules(sluice.__path__) if m.name not in ("_sluice", "lm_eval", "ray", "ray_llm"))


@pytest.mark.parametrize("name", ["", *MODULES])
def test_examples_do_what_they_say(name, monkeypatch):
    import asyncio

    from conftest import DEMO

    monkeypatch.setenv("SLUICE_DEMO", str(DEMO))
    module = importlib.import_module(f"sluice.{name}" if name else "sluice")
    found = doctest.testmod(module, extraglobs={"sluice": sluice, "asyncio": asyncio})
    for alias in ("llama_cpp", "vllm", "mlx_lm"):
        sys.modules.pop(alias, None)
    assert found.failed == 0


def test_the_guide_does_what_it_says(monkeypatch):
    from conftest import DEMO, ROOT

    page = ROOT / "docs" / "python.md"
    if not page.is_file():
        pytest.skip("SKIPPED: the guide is not beside this package")
    monkeypatch.setenv("SLUICE_DEMO", str(DEMO))
    found = doctest.testfile(str(page), module_relative=False)
    assert found.attempted > 5 and found.failed == 0


def test_stubs_name_what_there_is():
    stubs = ast.parse((Path(sluice.__file__).resolve().parent / "_sluice.pyi").read_text())
    from sluice import _sluice

    classes = {node.name: node for node in stubs.body if isinstance(node, ast.ClassDef)}
    public = {name for name in dir(_sluice) if inspect.isclass(getattr(_sluice, name))}
    assert set(classes) == public
    for name, node in classes.items():
        stated = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
        stated |= {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}
        real = {member for member in vars(getattr(_sluice, name)) if not member.startswith("__") or member in stated}
        real -= {"__new__", "__doc__", "__module__"}
        assert {one for one in stated if one != "__init__"} == real - {"__init__"}, name
    assert (Path(sluice.__file__).parent / "py.typed").exists()


def test_every_public_name_has_a_docstring():
    for name in sluice.__all__:
        value = getattr(sluice, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, name
            for member, function in vars(value).items() if inspect.isclass(value) else []:
                if inspect.isfunction(function) and not member.startswith("_"):
                    assert function.__doc__, f"{name}.{member}"
