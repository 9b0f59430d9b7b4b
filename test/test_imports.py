"""Who may import whom (design.md, "Folders"), where private names of others live, and what an import pulls in."""

import ast
import functools
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchao_blockwise

PACKAGE = Path(torchao_blockwise.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
# An import may only point to the left: a room of a higher rank imports rooms of lower ranks and itself.
RANKS = {"formats": 0, "ops": 1, "tensors": 2, "nn": 3, "distributed": 4, "conversion": 5}
RANKS |= {"checkpoint": 6, "diagnostics": 6, "integrations": 7, "cli": 7, "__main__": 8}
EXEMPT = {"testing", "__init__"}
# Where names of others live that they do not promise to keep.
COMPAT = {"_compat", "_names", "_versions"}
# Beginnings of the names of modules and folders that hold kernels or parts of them; those of libraries need no Triton.
TRITON_KERNELS = ("kernels_", "device", "gluon_")
KERNELS = (*TRITON_KERNELS, "cublas", "cutlass", "deepgemm")
UNUSED = ("testing", "diagnostics")
THIRD_PARTIES = {"torch", "torchao", "triton"}


TREES = {path: ast.parse(path.read_text(encoding="utf-8"), filename=str(path)) for path in FILES}


def relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def imported_names(tree: ast.AST) -> list[str]:
    """Dotted names that a file imports anywhere, inside functions too; `from a import b` gives a.b."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}; write the whole name"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def rooms_imported(tree: ast.AST) -> set[str]:
    """First name below the package of every import of ours: a room, `_compat`, or a public name of the top level."""
    return {name.split(".")[1] for name in imported_names(tree) if name.startswith("torchao_blockwise.")}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def rule_breaks(room: str, imported: set[str]) -> list[str]:
    """Return the imports of a file of `room` that are not allowed."""
    if room in EXEMPT:
        return []
    if room in COMPAT:
        return sorted(imported - COMPAT)
    own = RANKS[room]
    return sorted(name for name in imported - COMPAT - {room} if RANKS.get(name, 99) >= own)


def test_imports_point_one_way():
    assert {room_of(path) for path in FILES} <= RANKS.keys() | EXEMPT | COMPAT
    breaks = {relative(path): rule_breaks(room_of(path), rooms_imported(tree)) for path, tree in TREES.items()}
    assert {path: broken for path, broken in breaks.items() if broken} == {}


def hidden_modules(tree: ast.Module, package: str, modules: set[str]) -> set[str]:
    """Of the `modules` of a package those whose names its __init__ gives to something else."""
    names = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            bound = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name for name, whole in bound.items() if whole != f"{package}.{name}"}
    return names & modules


def test_no_module_has_the_name_of_what_its_package_exports():
    """`ops.quantize` is a function; with a module of this name, imports would decide which of the two it is."""
    found = {}
    for path in (path for path in FILES if path.stem == "__init__"):
        package = ".".join(("torchao_blockwise", *path.parent.relative_to(PACKAGE).parts))
        modules = {x.stem for x in path.parent.iterdir() if x.suffix == ".py" or x.is_dir()}
        found[relative(path)] = hidden_modules(TREES[path], package, modules)
    assert {path: hidden for path, hidden in found.items() if hidden} == {}
    for code in ("from package.layers import f as linear", "def linear(): ..."):
        assert hidden_modules(ast.parse(code), "package", {"linear", "layers"}) == {"linear"}


def stems_imported(path: Path) -> set[str]:
    """Names of modules below `ops` that a file imports: {"reference", "kernels_triton", ...}."""
    ours = [n.split(".") for n in imported_names(TREES[path]) if n.startswith("torchao_blockwise.ops.")]
    return {part for name in ours for part in name[2:]}


def kernels_imported(path: Path) -> list[str]:
    return sorted(stem for stem in stems_imported(path) if stem.startswith(KERNELS))


def test_kernels_and_references_do_not_know_each_other():
    paths = list((PACKAGE / "ops").rglob("*.py"))
    kernels = [path for path in paths if path.stem.startswith(KERNELS) or path.parent.name == "device"]
    references = [path for path in paths if path.stem == "reference"]
    assert kernels and [relative(path) for path in kernels if "reference" in stems_imported(path)] == []
    assert references and [relative(path) for path in references if kernels_imported(path)] == []


def test_only_ops_knows_kernels_and_triton():
    others = [path for path in FILES if room_of(path) != "ops"]
    assert [relative(path) for path in others if kernels_imported(path)] == []
    imported = {path: {name.split(".")[0] for name in imported_names(TREES[path])} for path in others}
    assert [relative(p) for p, names in imported.items() if "triton" in names and room_of(p) not in COMPAT] == []


# --- private names of others ------------------------------------------------------------------------------------------

# Public names of NamedTuples and enums that begin with an underscore.
PROMISED = {"_replace", "_fields", "_asdict", "_make", "_value_", "_name_"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined_names(tree: ast.AST) -> set[str]:
    """Functions, classes, variables and attributes that a file itself makes."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names


def is_aten(node: ast.Attribute) -> bool:
    """Whether this names an operator: `aten._to_copy`. Those have schemas, which PyTorch does promise to keep."""
    return "aten" in ast.unparse(node.value).split(".")


def private_names(tree: ast.AST, ours: set[str]) -> set[str]:
    """Underscored attributes and import components that are not `ours`."""
    attributes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and not is_aten(n)]
    names = {n.attr for n in attributes if ast.unparse(n.value) != "sys"}
    imports = [n.split(".") for n in imported_names(tree) if n.split(".")[0] in THIRD_PARTIES]
    names |= {part for name in imports for part in name}
    return {name for name in names if is_private(name) and name not in ours | PROMISED}


OURS = set().union(*map(defined_names, TREES.values()))


def test_private_names_of_others_live_in_compat():
    found = {path: private_names(tree, OURS) for path, tree in TREES.items() if room_of(path) not in COMPAT}
    assert {relative(path): names for path, names in found.items() if names} == {}
    code = "from torch._dynamo import reset\nx._local_tensor\naten._to_copy.default\nself._mine\nq._replace()"
    assert private_names(ast.parse(code), {"_mine"}) == {"_dynamo", "_local_tensor"}


# Those that no test on a CPU reaches, or that make a feature stop without an error if they are gone.
NAMES = """
    torch._inductor.cudagraph_trees.get_manager torch.compiler.config.cache_key_tag
    torch.distributed.distributed_c10d._get_default_store torch.distributed.ProcessGroup._get_backend
    torch._C._distributed_c10d.Backend.Options._timeout torchao.quantization.quant_api.quantize_
    torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._lazy_init
    torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._root_pre_forward
    triton.backends.nvidia.driver.make_tensordesc_arg triton.knobs.cache.dir triton.knobs.runtime.debug
    triton.knobs.runtime.add_stages_inspection_hook triton.knobs.runtime.launch_enter_hook
    triton.knobs.runtime.launch_exit_hook triton.runtime.driver triton.runtime.jit.JITFunction.add_pre_run_hook
""".split()  # noqa: SIM905
# Attributes that only instances of these classes have: their sources assign them.
ATTRIBUTES = {
    "torch._inductor.cudagraph_trees.CUDAGraphTreeManager": ("stream",),
    "triton.backends.nvidia.driver.CudaLauncher": (
        *("global_scratch_size", "profile_scratch_size", "launch", "launch_cooperative_grid", "launch_pdl"),
    ),
}


def resolved(name: str) -> object:
    """The object of a dotted name, whose first parts are modules."""
    found, parts = importlib.import_module(name.split(".")[0]), name.split(".")
    for i in range(2, len(parts) + 1):
        try:
            found = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            return functools.reduce(getattr, parts[i - 1 :], found)
    return found


@pytest.mark.parametrize("name", (*NAMES, *ATTRIBUTES))
def test_name_in_compat_still_exists(name):
    found = resolved(name)
    source = inspect.getsource(found) if name in ATTRIBUTES else ""
    assert [a for a in ATTRIBUTES.get(name, ()) if not re.search(rf"\bself\.{a}\b.*=|def {a}\(", source)] == []


def test_only_the_search_for_quantize_walks_the_stack():
    walkers = {
        (relative(path), node.name)
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and re.search(r"_getframe|currentframe|f_back|\bstack\(\)", ast.unparse(node))
    }
    assert walkers <= {("_compat/__init__.py", "quantize_call")}


# --- what an import pulls in ------------------------------------------------------------------------------------------


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_works_without_triton():
    """AUTO takes the reference in silence."""
    code = """
import sys, warnings
sys.modules["triton"] = None
import torch
from torchao_blockwise import ops
warnings.simplefilter("error")
a, b = (ops.quantize(torch.ones(16, 32), fmt).rowwise for fmt in ("nvfp4_1x16", "nvfp4_16x16"))
print(ops.matmul(a, ops.transpose(ops.transpose(b)), out_dtype=torch.float32).sum().item())
"""
    assert python(code) == f"{16 * 16 * 32:.1f}"


def test_imports_no_kernel_and_nothing_heavy():
    code = f"""
import sys
import torch, torchao.quantization
before = set(sys.modules)
import torchao_blockwise
new = set(sys.modules) - before
heavy = ("triton", "matplotlib", "pytest", "hypothesis", "torch._inductor", "torch._dynamo", "transformers")
print(sorted(name for name in new if name.startswith(heavy)))
ours = [name for name in new if name.startswith("torchao_blockwise")]
print(sorted(name for name in ours if any(part.startswith({(*TRITON_KERNELS, *UNUSED)}) for part in name.split("."))))
"""
    assert python(code).splitlines() == ["[]", "[]"]


def test_files_of_a_model_like_those_of_transformers_need_no_transformers(tmp_path):
    """Parts of its models may be copied to where it is not installed."""
    code = f"""
import sys
import torch; from torch import nn; from torchao.quantization import quantize_
from torchao_blockwise import BlockwiseFP8TrainingConfig, checkpoint
model = nn.ModuleDict({{"proj": nn.Linear(128, 128)}}); model._tied_weights_keys = None
quantize_(model, BlockwiseFP8TrainingConfig())
checkpoint.export(model, {str(tmp_path / "out")!r}); checkpoint.load(model, {str(tmp_path / "out")!r})
print("transformers" in sys.modules)
"""
    assert python(code) == "False"
