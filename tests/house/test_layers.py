"""Imports point down only.

Each layer may import itself, the layers that its row names, and the third-party packages that its row names. Everything
counts: imports at the top, inside functions, and for type checkers alone. A top-level module or package that no row
names belongs to the shell.

Two things stand at the edge by nature and are used by the shell all the same, so they have rows of their own, low
down: `runtime` (the only door to clock and threads; it knows nothing of kvxfer) and the pair
`config`, `telemetry` (values and log lines; they know only names and bounds). The ports may log but get their settings
as plain values, so `fabric` and `copy` see telemetry and not config. The sans-I/O core sees neither.
"""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kvxfer"

# layer -> (its modules and packages, kvxfer layers that it may import, third-party packages that it may import)
CORE = {"names", "geometry", "wire", "memory"}
PORTS = {"copy", "fabric", "mapped"}
LAYERS = {
    "names": ({"errors", "names"}, set(), set()),
    "runtime": ({"runtime"}, {"names"}, {"anyio"}),
    "settings": ({"config"}, {"names"}, {"pydantic", "pydantic_core"}),
    "telemetry": ({"telemetry"}, {"names"}, {"msgspec", "structlog"}),
    "traces": ({"integrations.opentelemetry"}, {"names", "telemetry"}, {"opentelemetry"}),
    "geometry": ({"geometry"}, {"names"}, {"numpy", "torch"}),
    "wire": ({"protocol", "tickets"}, {"names"}, {"msgspec", "cryptography"}),
    "memory": ({"memory"}, {"names", "geometry", "wire"}, {"numpy", "msgspec"}),
    "copy": (
        {"copy"},
        CORE | {"runtime", "telemetry"},
        {"numpy", "torch", "triton", "cuda", "numba", "llvmlite", "msgspec"},
    ),
    "fabric": ({"fabric"}, CORE | {"copy", "runtime", "telemetry"}, {"numpy", "torch"}),
    "mapped": ({"mapped"}, CORE, {"numpy", "torch"}),
    "plans": ({"plans"}, CORE | PORTS | {"runtime", "telemetry", "settings"}, {"numpy", "msgspec"}),
    "shell": (
        set(),
        CORE | PORTS | {"runtime", "telemetry", "settings", "plans", "traces"},
        {"anyio", "numpy", "torch", "uvloop", "msgspec"},
    ),
    "edge": (
        {"tools", "integrations", "testing"},
        CORE | PORTS | {"runtime", "telemetry", "settings", "plans", "shell", "package"},
        {
            "anyio",
            "numpy",
            "torch",
            "msgspec",
            "typer",
            "rich",
            "transformers",
            "structlog",
            "uvloop",
            "vllm",
            "sglang",
        },
    ),
    # what an operator asks for, and nothing else does: its packages are imported nowhere else
    "admin": (
        {"tools.admin"},
        {"names", "telemetry", "settings", "memory"},
        {"prometheus_client", "starlette", "uvicorn"},
    ),
    # `import kvxfer` must stay free: nothing of this is imported before a name is used, which is tested below
    "package": ({"kvxfer"}, CORE | PORTS | {"settings", "shell"}, set()),
}
ONLY_HERE = {
    "triton": "kvxfer/copy/kernel.py",
    "numba": "kvxfer/copy/compiler.py",
    "vllm": "kvxfer/integrations/vllm/connector.py",
    "sglang": "kvxfer/integrations/sglang/conn.py",
    "opentelemetry": "kvxfer/integrations/opentelemetry.py",
}
MODULES = sorted(PACKAGE.rglob("*.py"))


def name(path):
    return path.relative_to(ROOT).as_posix()


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module):
    parts = module.split(".")
    found = (".".join(parts[1:depth]) for depth in (3, 2)) if len(parts) > 1 else ["kvxfer"]
    return next((layer for name in found for layer, (names, _, _) in LAYERS.items() if name in names), "shell")


def imports(tree, path):
    """(imported module, statement) for every import anywhere in a module, relative ones resolved."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                if (source, alias.name) == ("kvxfer", "__version__"):
                    continue  # a literal that costs nothing; everything else has a home to import it from
                submodule = ROOT.joinpath(*source.split("."), alias.name)
                inner = source.startswith("kvxfer") and (submodule.with_suffix(".py").exists() or submodule.is_dir())
                yield (f"{source}.{alias.name}" if inner else source), node


def violations(path, tree):
    layer = layer_of(module_name(path))
    _, layers, packages = LAYERS[layer]
    relative = path.relative_to(ROOT).as_posix()
    for imported, node in imports(tree, path):
        top = imported.split(".")[0]
        where = f"{relative}:{node.lineno} (layer {layer}) imports {imported}"
        if top == "kvxfer":
            if layer_of(imported) not in layers | {layer}:
                yield f"{where}, which is in layer {layer_of(imported)}"
        elif top in ONLY_HERE:
            if relative != ONLY_HERE[top]:
                yield f"{where}, which only {ONLY_HERE[top]} may"
        elif top not in sys.stdlib_module_names and top not in packages:
            yield f"{where}, which is not in its row"


def test_imports_point_down():
    assert [wrong for path in MODULES for wrong in violations(path, ast.parse(path.read_text()))] == []


def test_the_rule_catches_what_it_forbids():
    rows = [
        ("kvxfer/errors.py", "import numpy"),
        ("kvxfer/geometry/plan.py", "from kvxfer.protocol.messages import Route"),
        ("kvxfer/geometry/plan.py", "from kvxfer.protocol import messages"),
        ("kvxfer/protocol/framing.py", "from kvxfer.geometry import Span"),
        ("kvxfer/protocol/framing.py", "def f():\n    from ..telemetry import logger"),
        ("kvxfer/memory/books.py", "import torch"),
        ("kvxfer/fabric/calls.py", "from kvxfer.config import Config"),
        ("kvxfer/fabric/calls.py", "import nixl._api"),
        ("kvxfer/copy/mover.py", "import triton"),
        ("kvxfer/peers/link.py", "from kvxfer.tools.cli import app"),
        ("kvxfer/worker.py", "import kvxfer.testing"),
        ("kvxfer/telemetry.py", "from opentelemetry import trace"),
        ("kvxfer/worker.py", "from kvxfer import Config"),
    ]
    assert [row for row in rows if len(list(violations(ROOT / row[0], ast.parse(row[1])))) != 1] == []


def test_one_module_opens_nixls_library_and_none_imports_its_python_package():
    opens = {path.relative_to(ROOT).as_posix() for path in MODULES if "libnixl" in path.read_text()}
    assert opens == {"kvxfer/fabric/nixl.py"}
    assert not [row for row, (_, _, packages) in LAYERS.items() if "nixl" in packages]


def test_the_rule_allows_what_the_design_allows():
    line = "from kvxfer.config import Config\nfrom kvxfer.telemetry import logger\nimport anyio, asyncio"
    assert list(violations(ROOT / "kvxfer/worker.py", ast.parse(line))) == []


def is_deferred(node):
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def at_the_top(tree):
    """The module without what does not run when it is imported: functions, and blocks for type checkers."""
    kept: list[ast.stmt] = [node for node in tree.body if not is_deferred(node)]
    return ast.Module(kept, [])


def test_there_is_no_cycle():
    known = {module_name(path) for path in MODULES}
    graph = {
        module_name(path): {name for name, _ in imports(at_the_top(ast.parse(path.read_text())), path)} & known
        for path in MODULES
    }
    try:
        TopologicalSorter({module: needed - {module} for module, needed in graph.items()}).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' -> '.join(error.args[1])}")


def import_without(modules, absent):
    """Import modules in a fresh interpreter in which some packages cannot be found."""
    code = (
        "import sys, importlib\n"
        f"sys.modules.update(dict.fromkeys({sorted(absent)!r}))\n"
        f"for module in {modules!r}: importlib.import_module(module)\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def modules_below(name):
    return [module for path in MODULES if (module := module_name(path)) == name or module.startswith(f"{name}.")]


def test_geometry_needs_neither_nixl_nor_torch():
    import_without(modules_below("kvxfer.geometry"), {"nixl", "torch", "triton", "msgspec", "pydantic"})


@pytest.mark.parametrize("name", ["kvxfer.protocol", "kvxfer.tickets"])
def test_protocol_and_tickets_need_msgspec_alone(name):
    """Until there is a key: `cryptography` takes as long to import as all the rest."""
    absent = {"nixl", "torch", "triton", "numpy", "pydantic", "structlog", "anyio", "asyncio", "cryptography"}
    import_without(modules_below(name), absent)


def test_importing_kvxfer_imports_nothing_heavy():
    loaded = import_without(["kvxfer"], {"nixl", "torch", "triton", "numpy", "pydantic", "msgspec"})
    assert {name for name in loaded if name.startswith("kvxfer")} == {"kvxfer"}


def test_the_command_starts_without_anything_heavy():
    import_without(["kvxfer.tools.cli"], {"nixl", "torch", "triton", "numpy", "pydantic", "msgspec", "structlog"})
