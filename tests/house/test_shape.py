"""The shape of the house: lists that must agree, and rules that no linter knows."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

from pdserve.core.errors import GRPC_CODES

HOUSE = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((HOUSE / "pyproject.toml").read_text(encoding="utf-8"))
TOOL = PROJECT["tool"]
ROOMS: list[str] = TOOL["hatch"]["build"]["dev-mode-dirs"]
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$")
LONGEST_FILE, LONGEST_FUNCTION = 450, 60
REASON = re.compile(r"# long: \S+")


def package_of(room: str) -> str:
    """Return the name under `pdserve` that a room's package has."""
    return "v1" if room == "proto" else room


def sources(*tops: str) -> Iterator[Path]:
    """Yield every Python file written by hand below the folders."""
    for top in tops:
        yield from (path for path in sorted((HOUSE / top).rglob("*.py")) if not GENERATED.search(path.name))


def name_of(path: Path) -> str:
    """Return the path within the house."""
    return str(path.relative_to(HOUSE))


def listed(pattern: str, file: str) -> list[str]:
    """Return what `pattern` finds in a file, by its only group."""
    return re.findall(pattern, (HOUSE / file).read_text(encoding="utf-8"), flags=re.MULTILINE)


ROOM_LISTS = {
    "folders": sorted(path.parent.name for path in HOUSE.glob("*/pdserve") if path.is_dir()),
    "wheel": [path.removesuffix("/pdserve") for path in TOOL["hatch"]["build"]["targets"]["wheel"]["packages"]],
    "pytest": [room for room in TOOL["pytest"]["ini_options"]["pythonpath"] if room != "."],
    "mypy_path": TOOL["mypy"]["mypy_path"].split(":"),
    "mypy files": ["proto", *(room for room in TOOL["mypy"]["files"] if room not in ("tests", "examples"))],
    "import-linter": [
        "proto" if package == "pdserve.v1" else package.removeprefix("pdserve.")
        for package in TOOL["importlinter"]["root_packages"]
    ],
    "Makefile": listed(r"^PACKAGES := (.*)$", "Makefile")[0].split(),
    "README": listed(r"^\| `(\w+)/` \|", "README.md"),
}


@pytest.mark.parametrize("where", ROOM_LISTS)
def test_room_lists_agree(where: str) -> None:
    assert sorted(ROOM_LISTS[where]) == sorted(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_room_is_a_namespace_portion_with_a_docstring(room: str) -> None:
    assert not (HOUSE / room / "__init__.py").exists()
    assert not (HOUSE / room / "pdserve" / "__init__.py").exists()
    door = HOUSE / room / "pdserve" / package_of(room) / "__init__.py"
    docstring = ast.get_docstring(ast.parse(door.read_text(encoding="utf-8"))) or ""
    assert len(docstring.split()) >= 20, f"{name_of(door)} does not say what the room does, and what it does not"


@pytest.mark.parametrize("room", ["router", "client", "rpc"])
def test_light_rooms_never_import_torch(room: str) -> None:
    code = f"""
import importlib, pkgutil, sys
import pdserve.{room} as room
for module in pkgutil.walk_packages(room.__path__, room.__name__ + "."):
    importlib.import_module(module.name)
sys.exit("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr or f"pdserve.{room} imports torch"


def test_every_error_class_has_a_grpc_code() -> None:
    known = {kind.__name__ for kind in GRPC_CODES} | {"PdserveError"}
    strays = [
        f"{name_of(path)}: {node.name}"
        for path in sources(*ROOMS)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        and node.name not in known
        and any(ast.unparse(base).rpartition(".")[2] in known for base in node.bases)
    ]
    assert not strays


def long_functions(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > LONGEST_FUNCTION and not REASON.search("\n".join(lines[node.lineno - 1 : node.body[0].lineno])):
                yield f"{name_of(path)}: {node.name} has {length} lines"


def test_files_and_functions_are_short_or_say_why_not() -> None:
    faults = []
    for path in sources(*ROOMS, "tests", "examples"):
        lines = path.read_text(encoding="utf-8").splitlines()
        if len(lines) > LONGEST_FILE and not REASON.search("\n".join(lines[:10])):
            faults.append(f"{name_of(path)} has {len(lines)} lines")
        faults += long_functions(path)
    assert not faults


def test_no_module_is_a_drawer_for_everything() -> None:
    banned = re.compile(r"(utils?|helpers?|common|misc)$")
    assert not [
        name_of(path) for path in sources(*ROOMS, "tests") for part in path.parts if banned.match(Path(part).stem)
    ]


def test_every_exemption_from_types_has_its_reason() -> None:
    bare = re.compile(r"# type: ignore(\[[\w-]+(, ?[\w-]+)*\])?\s*$")
    faults = [
        f"{name_of(path)}:{number}"
        for path in sources(*ROOMS, "tests")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if bare.search(line)
    ]
    assert not faults


def gauge_names(path: Path) -> Iterator[str]:
    """Yield the keys of dict displays, and of items, in functions whose name ends with `gauges`; `*` for what varies."""
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(function, ast.FunctionDef) and function.name.endswith("gauges"):
            for node in ast.walk(function):
                yield from (name for key in keys_in(node) if (name := text_of(key)))


def keys_in(node: ast.AST) -> list[ast.expr | None]:
    if isinstance(node, ast.Dict):
        return list(node.keys)
    if isinstance(node, ast.DictComp):
        return [node.key]
    return [node.slice] if isinstance(node, ast.Subscript) else []


def text_of(key: ast.expr | None) -> str | None:
    if isinstance(key, ast.Constant) and isinstance(key.value, str):
        return key.value
    if isinstance(key, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in key.values)
    return None


def test_every_gauge_is_documented() -> None:
    documented = set(listed(r"^\| `([\w.*]+)`", "docs/gauges.md"))
    used = {name for path in sources(*ROOMS) for name in gauge_names(path)}
    assert used, "no gauge was found: the search is broken"
    assert used - documented == set(), "missing in docs/gauges.md"
    assert documented - used == set(), "documented, but no longer there"


def test_no_import_cycles() -> None:
    graph = grimp.build_graph(
        *TOOL["importlinter"]["root_packages"], exclude_type_checking_imports=True, cache_dir=None
    )
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_generated_code_is_that_of_the_contract(tmp_path: Path) -> None:
    recipe = (HOUSE / "Makefile").read_text(encoding="utf-8").partition("\nproto: ")[2].partition("\n\n")[0]
    wanted = re.findall(r"--(\w+_out)=proto", recipe)
    assert len(wanted) == 4, "the recipe of `make proto` changed; this test must follow it"
    tools = Path(sys.executable).parent
    command = [
        *(sys.executable, "-m", "grpc_tools.protoc", "-Iproto"),
        *(f"--{out}={tmp_path}" for out in wanted),
        *(f"--plugin={plugin}={tools / plugin}" for plugin in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")),
        *sorted(name_of(path) for path in (HOUSE / "proto/pdserve/v1").glob("*.proto")),
    ]
    subprocess.run(command, cwd=HOUSE, check=True, timeout=120)
    made = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "pdserve/v1").iterdir()}
    kept = {
        path.name: path.read_text(encoding="utf-8")
        for path in (HOUSE / "proto/pdserve/v1").iterdir()
        if GENERATED.search(path.name)
    }
    assert sorted(made) == sorted(kept)
    assert [name for name in made if made[name] != kept[name]] == [], "run `make proto`"


def test_every_dependency_has_a_record() -> None:
    extras = [each for extra in PROJECT["project"]["optional-dependencies"].values() for each in extra]
    needed = [*PROJECT["project"]["dependencies"], *extras, *PROJECT["dependency-groups"]["dev"]]
    names = {re.split(r"[<>=!~ \[;]", requirement)[0] for requirement in needed}
    recorded = {
        name
        for record in (HOUSE / "docs/adr").glob("[0-9]*.md")
        for line in listed(r"^Dependencies: (.*)$", name_of(record))
        for name in re.findall(r"`([\w-]+)`", line)
    }
    assert names == recorded


def test_every_record_is_in_the_index() -> None:
    assert sorted(listed(r"\]\((\d{4}-[\w-]+\.md)\)", "docs/adr/README.md")) == sorted(
        path.name for path in (HOUSE / "docs/adr").glob("[0-9]*.md")
    )


def test_every_page_that_the_readme_names_is_there() -> None:
    pages = [link for link in listed(r"\]\(([\w./-]+)\)", "README.md") if not (HOUSE / link).exists()]
    assert not pages
