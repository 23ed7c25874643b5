"""The rules of the source tree, read from its syntax: allowed imports, and limits of size.

    domain <- ports <- application <- adapters <- entrypoints

A layer may import itself and the layers inside it. The parts of `adapters` do not know each other;
all may know `SHARED`.
Inside a layer, chapters import each other in one direction: `CHAPTERS` says which.
`cluster` is optional and has the same layers. It may import the rest; the rest does not import it.
`CLUSTER_LOADER` loads it by name, and no other module contains that name.
"""

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path, PurePosixPath

import pytest

pytestmark = pytest.mark.unit

SRC = Path(__file__).resolve().parents[2] / "src"
FILES = sorted(path.relative_to(SRC).as_posix() for path in SRC.rglob("*.py"))

PACKAGE = "semantic"
LAYERS = ("domain", "ports", "application", "adapters", "entrypoints")
STANDARD_LIBRARY_ONLY = ("domain", "ports", "application")
CLUSTER = "cluster"
CLUSTER_LOADER = "semantic/entrypoints/cluster_loader.py"
# Modules that import by a name that is computed: the cluster, and MLX's libraries.
COMPUTED_IMPORTS = (CLUSTER_LOADER, "semantic/adapters/outbound/backends/mlx/runtime.py")
SHARED = ("validation", "extras", "images")  # parts of `adapters` that all others may use
# What each chapter may import besides itself and modules that stand in no chapter.
CHAPTERS = {
    "application/parsing": (),
    "application/prompt": (),
    "application/cache": (),
    "application/engine": ("cache", "parsing"),
    "application/agents": ("cache", "engine", "prompt"),
    "application/packs": ("agents", "cache", "engine"),
    "application/models": ("agents", "cache", "engine"),
    "application/requests": ("agents", "engine", "models", "prompt", "parsing"),
    "adapters/inbound/http": (),
    "adapters/inbound/anthropic": ("http",),
    "adapters/inbound/openai": ("http", "anthropic"),  # lists models for both vendors
    "adapters/inbound/responses": ("http", "openai"),
    "adapters/inbound/ollama": ("http", "openai"),
    "adapters/inbound/agents": ("http",),
    "adapters/inbound/mcp": ("agents",),
    "adapters/inbound/page": ("http",),
    "adapters/inbound/admin": ("http",),
    "adapters/outbound/vision": (),
    "adapters/outbound/models": ("vision",),
    "adapters/outbound/grammar": (),
    "adapters/outbound/ledger": (),
    "adapters/outbound/blocks": ("ledger",),
    "adapters/outbound/backends": ("vision",),
    "adapters/outbound/telemetry": (),
}
MAX_MODULES = 12
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 7

Function = ast.FunctionDef | ast.AsyncFunctionDef


# -- the rules --------------------------------------------------------------------------------


def module_name(path: str) -> tuple[str, ...]:
    """``semantic/domain/blocks.py`` as its parts; a package is named by its folder."""
    parts = PurePosixPath(path).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imported_names(tree: ast.Module, path: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield line and absolute dotted name of every import, wherever it stands.

    ``from a import b`` yields ``a.b``, since `b` may be a module.
    """
    # The package that one dot stands for.
    here = PurePosixPath(path).parent.parts
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                for alias in aliases:
                    yield node.lineno, tuple(alias.name.split("."))
            case ast.ImportFrom(module=module, names=aliases, level=level):
                base = here[: len(here) - level + 1] if level else ()
                base += tuple(module.split(".")) if module else ()
                for alias in aliases:
                    yield node.lineno, (*base, alias.name)
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, tuple(name.split("."))


def is_in_cluster(name: tuple[str, ...]) -> bool:
    return name[:2] == (PACKAGE, CLUSTER)


def place(name: tuple[str, ...]) -> tuple[str, str]:
    """The layer a module of ours belongs to, and its part of the adapters."""
    if name == (PACKAGE, "__main__"):
        return "entrypoints", ""
    if is_in_cluster(name):
        layer, _ = place((PACKAGE, *name[2:]))
        return layer, "outbound" if layer == "adapters" else ""
    layer = name[1] if len(name) > 1 and name[1] in LAYERS else ""
    part = name[2] if layer == "adapters" and len(name) > 2 else ""
    return layer, part


def chapter(name: tuple[str, ...]) -> str:
    """The chapter a module belongs to; empty if it stands beside the chapters of its layer."""
    inside = "/".join(name[1:])
    return next((known for known in CHAPTERS if f"{inside}/".startswith(f"{known}/")), "")


def is_in_order(importer: tuple[str, ...], imported: tuple[str, ...]) -> bool:
    """Whether a chapter may know another of its layer."""
    ours, theirs = chapter(importer), chapter(imported)
    if not ours or not theirs or ours == theirs:
        return True
    layer, _, name = theirs.rpartition("/")
    return ours.rpartition("/")[0] != layer or name in CHAPTERS[ours]


def is_allowed(importer: tuple[str, ...], imported: tuple[str, ...]) -> bool:
    layer, part = place(importer)
    if imported[0] != PACKAGE:
        return layer not in STANDARD_LIBRARY_ONLY or imported[0] in sys.stdlib_module_names
    if is_in_cluster(imported) and not is_in_cluster(importer):
        return False
    other_layer, other_part = place(imported)
    if not other_layer:
        return True  # the package itself: its version
    if not layer:
        return False  # the package itself is imported first by everyone
    if layer == other_layer == "adapters":
        return other_part in (part, *SHARED) and is_in_order(importer, imported)
    return LAYERS.index(other_layer) <= LAYERS.index(layer) and is_in_order(importer, imported)


def import_faults(source: str, path: str) -> list[str]:
    """Imports that point outward, sideways between adapters, or out of the standard library."""
    importer = module_name(path)
    return [
        f"{path}:{line} imports {'.'.join(imported)}"
        for line, imported in imported_names(ast.parse(source), path)
        if not is_allowed(importer, imported)
    ]


def cluster_faults(source: str, path: str) -> list[str]:
    """Imports by a computed name, and strings that name a module of the cluster.

    Inside the cluster both are allowed.
    """
    if is_in_cluster(module_name(path)):
        return []
    faults = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(), *_],
            ):
                pass  # `import_faults` reads it
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module")
                | ast.Attribute(attr="import_module")
            ) if path not in COMPUTED_IMPORTS:
                faults.append(f"{path}:{node.lineno} imports by a computed name")
            case ast.Constant(value=str(text)) if (
                f"{PACKAGE}.{CLUSTER}" in text and path != CLUSTER_LOADER
            ):
                faults.append(f"{path}:{node.lineno} names {PACKAGE}.{CLUSTER}")
    return faults


def num_parameters(function: Function) -> int:
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    if positional and positional[0].arg in {"self", "cls"}:
        positional = positional[1:]
    variadic = [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    return len(positional) + len(arguments.kwonlyargs) + len(variadic)


def size_faults(source: str, path: str) -> list[str]:
    """Files and functions that are too long, and functions that take too much."""
    faults = []
    num_lines = len(source.splitlines())
    if num_lines > MAX_FILE_LINES:
        faults.append(f"{path} has {num_lines} lines")
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, Function):
            continue
        where = f"{path}:{node.lineno} {node.name}"
        num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if num_lines > MAX_FUNCTION_LINES:
            faults.append(f"{where} has {num_lines} lines")
        if num_parameters(node) > MAX_PARAMETERS:
            faults.append(f"{where} takes {num_parameters(node)} parameters")
    return faults


def docstring_faults(source: str, path: str) -> list[str]:
    """Public methods of ports without a docstring: adapters have theirs here, not of their own."""
    return [
        f"{path}:{method.lineno} {port.name}.{method.name} has no docstring"
        for port in ast.walk(ast.parse(source))
        if isinstance(port, ast.ClassDef)
        for method in port.body
        if isinstance(method, Function)
        and not method.name.startswith("_")
        and ast.get_docstring(method) is None
    ]


# -- the source -------------------------------------------------------------------------------


def test_there_is_source_in_every_layer() -> None:
    assert {place(module_name(path))[0] for path in FILES} >= set(LAYERS)


def test_one_module_outside_the_cluster_loads_it() -> None:
    named = [path for path in FILES if f"{PACKAGE}.{CLUSTER}" in (SRC / path).read_text("utf-8")]
    assert [path for path in named if not is_in_cluster(module_name(path))] == [CLUSTER_LOADER]
    layers = {place(module_name(path))[0] for path in FILES if is_in_cluster(module_name(path))}
    assert layers == {"", *LAYERS} - {"domain"}  # "" is the package itself


def test_every_folder_is_a_chapter_of_at_most_a_dozen_modules() -> None:
    folders = {PurePosixPath(path).parent for path in FILES}
    books = {"semantic/application", "semantic/adapters/inbound", "semantic/adapters/outbound"}
    chapters = {str(folder) for folder in folders if str(folder.parent) in books}
    assert {f"semantic/{name}" for name in CHAPTERS} == chapters
    for folder in folders:
        modules = [path.name for path in (SRC / folder).glob("*.py") if path.name != "__init__.py"]
        assert len(modules) <= MAX_MODULES, folder
    for name in CHAPTERS:
        story = ast.get_docstring(parsed(f"{PACKAGE}/{name}/__init__.py")) or ""
        assert len(story.splitlines()) >= 5, name


def test_no_modules_import_each_other_in_a_circle() -> None:
    names = {".".join(module_name(path)): path for path in FILES}
    graph = {
        name: {
            known
            for _, imported in imported_names(parsed(path), path)
            for known in (".".join(imported), ".".join(imported[:-1]))
            if known in names and known != name
        }
        for name, path in names.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def shared_class_names(sources: Mapping[str, str]) -> list[str]:
    """Names of public classes that several files define, with these files."""
    files: dict[str, list[str]] = {}
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files.setdefault(node.name, []).append(path)
    return [f"{name}: {', '.join(paths)}" for name, paths in files.items() if len(paths) > 1]


def test_no_two_public_classes_share_a_name() -> None:
    """A name means one class in the whole tree; classes of one file begin with an underscore."""
    assert shared_class_names({path: (SRC / path).read_text("utf-8") for path in FILES}) == []


def parsed(path: str | PurePosixPath) -> ast.Module:
    return ast.parse((SRC / path).read_text(encoding="utf-8"))


def faults_of(find: Callable[[str, str], list[str]], paths: list[str]) -> list[str]:
    return [f for path in paths for f in find((SRC / path).read_text(encoding="utf-8"), path)]


@pytest.mark.parametrize("find", [import_faults, cluster_faults, size_faults])
def test_the_source_keeps_the_rules(find: Callable[[str, str], list[str]]) -> None:
    assert faults_of(find, FILES) == []


def test_a_port_documents_its_methods() -> None:
    ports = [path for path in FILES if place(module_name(path))[0] == "ports"]
    assert faults_of(docstring_faults, ports) == []


# -- the rules can fail -----------------------------------------------------------------------

DOMAIN = "semantic/domain/blocks.py"
PORTS = "semantic/ports/backend.py"
APPLICATION = "semantic/application/requests/service.py"
INBOUND = "semantic/adapters/inbound/http/streaming.py"
OUTBOUND = "semantic/adapters/outbound/backends/torch/backend.py"
CONFIG = "semantic/adapters/config/settings.py"
ENTRYPOINT = "semantic/entrypoints/bootstrap.py"
CLUSTER_PORTS = "semantic/cluster/ports.py"
CLUSTER_APPLICATION = "semantic/cluster/application/leases.py"
CLUSTER_ADAPTER = "semantic/cluster/adapters/postgres.py"
CLUSTER_ENTRYPOINT = "semantic/cluster/entrypoints/shards.py"


@pytest.mark.parametrize(
    "path, source",
    [
        (DOMAIN, "import numpy"),
        (DOMAIN, "import numpy.typing as npt"),
        (DOMAIN, "from torch.nn import functional"),
        (PORTS, "import pydantic"),
        (APPLICATION, "import os, structlog"),
        (DOMAIN, "from semantic.ports.backend import Draw"),
        (PORTS, "from semantic.application.requests import service"),
        (APPLICATION, "import semantic.adapters.outbound.backends.fake"),
        (APPLICATION, "from semantic.adapters.outbound.backends.fake import FakeBackend"),
        (APPLICATION, "from semantic import adapters"),
        (INBOUND, "from semantic.entrypoints.cli.app import main"),
        (INBOUND, "from semantic.adapters.outbound.backends.fake import FakeBackend"),
        (INBOUND, "from semantic.adapters import outbound"),
        (OUTBOUND, "from semantic.adapters.inbound.http import streaming"),
        (INBOUND, "from semantic.adapters.config.settings import Settings"),
        (OUTBOUND, "from semantic.adapters.config.settings import Settings"),
        (CONFIG, "from semantic.adapters.outbound.backends import fake"),
        ("semantic/adapters/validation.py", "from semantic.adapters.config import settings"),
        ("semantic/__init__.py", "from semantic.domain import errors"),
        ("semantic/domain/__init__.py", "from semantic.ports import backend"),
        # Wherever the import stands:
        (DOMAIN, "def f():\n    import numpy"),
        (DOMAIN, "class A:\n    async def f(self):\n        from semantic.ports import inbound"),
        (DOMAIN, "if TYPE_CHECKING:\n    import numpy"),
        (DOMAIN, "try:\n    import numpy\nexcept ImportError:\n    pass"),
        # However it is written:
        (DOMAIN, "from ..ports import backend"),
        (DOMAIN, "from ..ports.backend import Draw"),
        (DOMAIN, "from .. import ports"),
        ("semantic/domain/__init__.py", "from ..ports import backend"),
        (APPLICATION, "from ...adapters.outbound.backends import fake"),
        (INBOUND, "from ...outbound.backends import fake"),
        (INBOUND, "from ... import config"),
        (DOMAIN, "importlib.import_module('numpy')"),
        (APPLICATION, "import_module('semantic.adapters.outbound.backends.fake')"),
        (DOMAIN, "__import__('numpy')"),
        # Of the cluster, from outside it:
        (APPLICATION, "from semantic.cluster.application.leases import AgentLeases"),
        (PORTS, "from semantic.cluster import ports"),
        (OUTBOUND, "from semantic import cluster"),
        (ENTRYPOINT, "import semantic.cluster.entrypoints.shared_store"),
        (ENTRYPOINT, "def f():\n    from ..cluster.entrypoints import shards"),
        (ENTRYPOINT, "if TYPE_CHECKING:\n    from semantic.cluster.adapters import postgres"),
        (ENTRYPOINT, "importlib.import_module('semantic.cluster.entrypoints.shards')"),
        (CLUSTER_LOADER, "from semantic.cluster.entrypoints import shards"),
        # Inside the cluster, against its layers:
        (CLUSTER_PORTS, "from semantic.application.cache import writer"),
        (CLUSTER_APPLICATION, "import psycopg"),
        (CLUSTER_APPLICATION, "from semantic.cluster.adapters import postgres"),
        (CLUSTER_APPLICATION, "from semantic.adapters.outbound.ledger import sqlite"),
        (CLUSTER_ADAPTER, "from semantic.cluster.entrypoints import shards"),
        (CLUSTER_ADAPTER, "from semantic.adapters.config.settings import Settings"),
        # Against the order of the chapters:
        ("semantic/application/cache/store.py", "from semantic.application.engine import engine"),
        ("semantic/application/agents/ledger.py", "from ..requests.identity import Identities"),
        (INBOUND, "from semantic.adapters.inbound.openai.events import usage"),
        (OUTBOUND, "from semantic.adapters.outbound.ledger import sqlite"),
    ],
)
def test_a_forbidden_import_is_found(path: str, source: str) -> None:
    assert len(import_faults(source, path)) == 1


@pytest.mark.parametrize(
    "path, source",
    [
        (
            DOMAIN,
            "from __future__ import annotations\nimport os.path\nfrom semantic import __version__",
        ),
        (DOMAIN, "from semantic.domain.spec import LayerSpec\nfrom .errors import SemanticError"),
        ("semantic/domain/__init__.py", "from .errors import SemanticError\nfrom . import errors"),
        (PORTS, "from semantic.domain import chat\nfrom ..domain import spec"),
        (APPLICATION, "from semantic.ports import backend\nfrom semantic.domain import chat"),
        (INBOUND, "import fastapi\nfrom semantic.application.requests import service"),
        (INBOUND, "from semantic.adapters.inbound import wire\nfrom . import errors"),
        (OUTBOUND, "import torch\nfrom semantic.adapters.outbound.backends.sampler import sample"),
        (CONFIG, "import pydantic\nfrom semantic.domain import errors"),
        (CONFIG, "from semantic.adapters.validation import plain_reason"),
        (INBOUND, "from semantic.adapters.validation import plain_reason"),
        (ENTRYPOINT, "from semantic.adapters.config import settings\nimport uvicorn"),
        (ENTRYPOINT, "from semantic.adapters.outbound.backends import fake"),
        ("semantic/__main__.py", "from semantic.entrypoints.cli.app import main"),
        (
            CLUSTER_APPLICATION,
            "from semantic.cluster import ports\nfrom semantic.ports import storage",
        ),
        (CLUSTER_APPLICATION, "from semantic.application.cache.writer import ReadCost"),
        (CLUSTER_ADAPTER, "import psycopg\nfrom semantic.adapters.outbound.ledger import schema"),
        (CLUSTER_ADAPTER, "from semantic.adapters.outbound.backends import common"),
        (CLUSTER_ENTRYPOINT, "from semantic.cluster.adapters import sharded"),
        (CLUSTER_ENTRYPOINT, "import ray\nfrom semantic.entrypoints.bootstrap import bootstrap"),
        (DOMAIN, "text = 'import numpy'  # import torch"),
    ],
)
def test_an_allowed_import_is_not_found(path: str, source: str) -> None:
    assert import_faults(source, path) == []


@pytest.mark.parametrize(
    "path, source",
    [
        (ENTRYPOINT, "importlib.import_module(name)"),
        (ENTRYPOINT, "import_module(f'{package}.shards')"),
        (APPLICATION, "__import__(name)"),
        (ENTRYPOINT, "NAME = 'semantic.cluster.entrypoints'"),
        (ENTRYPOINT, "run(['python', '-m', 'semantic.cluster.entrypoints.shards'])"),
    ],
)
def test_another_way_into_the_cluster_is_found(path: str, source: str) -> None:
    assert len(cluster_faults(source, path)) == 1


@pytest.mark.parametrize(
    "path, source",
    [
        (CLUSTER_LOADER, "import_module(f'{package}.shards')\nNAME = 'semantic.cluster'"),
        (CLUSTER_ENTRYPOINT, "import_module(name)\nNAME = 'semantic.cluster'"),
        (ENTRYPOINT, "import_module('torch')\nNAME = 'semantic.domain'"),
    ],
)
def test_the_way_into_the_cluster_is_allowed(path: str, source: str) -> None:
    assert cluster_faults(source, path) == []


def test_a_violation_names_its_place() -> None:
    assert import_faults("import os\n\nfrom ..ports import inbound", DOMAIN) == [
        "semantic/domain/blocks.py:3 imports semantic.ports.inbound"
    ]


def test_a_file_may_have_500_lines() -> None:
    assert size_faults("x = 1\n" * 500, DOMAIN) == []
    assert size_faults("x = 1\n" * 501, DOMAIN) == [f"{DOMAIN} has 501 lines"]


@pytest.mark.parametrize("head", ["def f():\n", "async def f():\n", "@cached\ndef f():\n"])
def test_a_function_may_have_60_lines(head: str) -> None:
    assert size_faults(head + "    x = 1\n" * 59, DOMAIN) == []
    (fault,) = size_faults(head + "    x = 1\n" * 60, DOMAIN)
    assert fault.endswith("f has 61 lines")


@pytest.mark.parametrize(
    "parameters, num_counted",
    [
        ("a, b, c, d, e, f, g", 7),
        ("self, a, b, c, d, e, f, g", 7),
        ("cls, a, b, c, d, e, f, g", 7),
        ("a, b, c, d, e, f, g, h", 8),
        ("self, a, b, c, d, *, e, f, g, h", 8),
        ("a, b, /, c, d, *e, f, g, **h", 8),
        ("a, b, c, d, e, f, g, self", 8),
    ],
)
def test_a_function_may_take_7_parameters(parameters: str, num_counted: int) -> None:
    source = f"class A:\n    def f({parameters}): ..."
    expected = [f"{DOMAIN}:2 f takes {num_counted} parameters"] if num_counted > 7 else []

    assert size_faults(source, DOMAIN) == expected


def test_a_port_method_without_a_docstring_is_found() -> None:
    documented = (
        'def __init__(self): ...\n    def _f(self): ...\n    def g(self):\n        """G."""'
    )

    assert docstring_faults(f"class A:\n    {documented}", PORTS) == []
    assert docstring_faults("class A:\n    def f(self): ...", PORTS) == [
        f"{PORTS}:2 A.f has no docstring"
    ]


def test_a_shared_class_name_is_found() -> None:
    sources = {"a.py": "class Job: ...\nclass _Own: ...", "b.py": "class Job: ...\nclass _Own: ..."}
    assert shared_class_names(sources) == ["Job: a.py, b.py"]


def test_nested_functions_are_measured_too() -> None:
    source = "def outer():\n    def inner(a, b, c, d, e, f, g, h): ..."

    assert size_faults(source, DOMAIN) == [f"{DOMAIN}:2 inner takes 8 parameters"]
