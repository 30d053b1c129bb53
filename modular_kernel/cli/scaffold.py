"""Renders the packages that `mk new` writes from the templates in `cli/templates`.

Three pages show these files, and a test checks that they match: docs/add-a-part.md, and
add-a-path.md and add-a-quantization-scheme.md in docs/contributing.
"""

import keyword
import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from modular_kernel.errors import ConfigurationError
from modular_kernel.utils.optional_imports import DISTRIBUTION_PACKAGES

_TEMPLATE_FOLDER = Path(__file__).parent / "templates"
_NAME_PATTERN = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_MAX_NAME_CHARS = 60


@dataclass(frozen=True)
class _PackageTemplate:
    """Template of the packages of one kind.

    description: description of the package in pyproject.toml.
    entry_points: group -> value of the entry point, where "{}" stands for the package.
    class_name: name of the new class, where "{}" stands for the name of the package in CamelCase.
    pair: the pairing that `mk test` verifies, with "{}" as in class_name.
    listed_as: what `mk list` shows, with placeholders for name and class_name.
    modules: template -> file in the package.
    test: template of the test.
    options: options of `mk test` and `mk profile`, in addition to the pairing.
    layer: options of `mk profile` for a layer that runs the new code, with "{}" for the package.
    cases: options of `mk test` that select the cases of the new code, with "{}" for the package.
    """

    description: str
    entry_points: dict[str, str]
    class_name: str
    pair: tuple[str, str]
    listed_as: str
    modules: dict[str, str]
    test: str
    options: str = ""
    layer: str = ""
    cases: str = ""


_TEMPLATES_BY_KIND: dict[str, _PackageTemplate] = {
    "experts": _PackageTemplate(
        "An experts part for modular_kernel.",
        {"modular_kernel.parts": "{}:PARTS"},
        "{}",
        ("MoEPrepareAndFinalizeNoEP", "{}"),
        "{class_name}",
        {"experts/package.py": "__init__.py"},
        "common/test_part.py",
    ),
    "prepare-finalize": _PackageTemplate(
        "A PrepareAndFinalize part for modular_kernel.",
        {"modular_kernel.parts": "{}:PARTS"},
        "{}",
        ("{}", "TorchExperts"),
        "{class_name}",
        {"prepare-finalize/package.py": "__init__.py"},
        "common/test_part.py",
    ),
    "exchange": _PackageTemplate(
        "A PrepareAndFinalize part for modular_kernel, over ranks.",
        {"modular_kernel.parts": "{}:PARTS"},
        "{}",
        ("{}", "TorchExperts"),
        "{class_name}",
        {"exchange/package.py": "__init__.py"},
        "exchange/test_exchange.py",
        " --world-size 2",
    ),
    "path": _PackageTemplate(
        "A path of TritonExperts for modular_kernel.",
        {"modular_kernel.triton_paths": "{}:PATHS"},
        "{}",
        ("MoEPrepareAndFinalizeNoEP", "TritonExperts"),
        "{name} among the paths of TritonExperts",
        {
            "path/package.py": "__init__.py",
            "path/path.py": "path.py",
            "path/kernels.py": "kernels.py",
        },
        "path/test_path.py",
        layer=" --tokens 4",  # other calls take another path
        cases=" --path {}",
    ),
    "scheme": _PackageTemplate(
        "A quantization scheme for modular_kernel, and an experts part that runs it.",
        {"modular_kernel.parts": "{}.part:PARTS", "modular_kernel.schemes": "{}.scheme:SCHEMES"},
        "{}Experts",
        ("MoEPrepareAndFinalizeNoEP", "{}Experts"),
        "the scheme {name}, and {class_name}",
        {
            "scheme/package.py": "__init__.py",
            "scheme/scheme.py": "scheme.py",
            "scheme/part.py": "part.py",
        },
        "scheme/test_scheme.py",
        layer=" --quant {}",
    ),
}


KINDS = tuple(_TEMPLATES_BY_KIND)


def check_kind(kind: str) -> None:
    """Raise ConfigurationError unless `kind` is one of KINDS."""
    if kind not in KINDS:
        raise ConfigurationError("kind", got=repr(kind[:100]), need=f"one of {', '.join(KINDS)}")


def to_class_name(name: str) -> str:
    """Return the class name of a package, such as "MyExperts" for "my_experts"."""
    return "".join(word.capitalize() for word in name.split("_"))


def check_name(name: str) -> None:
    """Raise ConfigurationError unless `name` can be the name of a new package and its class."""
    if not _NAME_PATTERN.fullmatch(name) or len(name) > _MAX_NAME_CHARS or keyword.iskeyword(name):
        form = f"a-z, 0-9 and _, at most {_MAX_NAME_CHARS} characters"
        need = f"a package name such as my_experts: {form}"
        raise ConfigurationError("name", got=repr(name[:100]), need=need)
    is_taken = (
        name in (*DISTRIBUTION_PACKAGES, "modular_kernel", "tests")
        or name in sys.stdlib_module_names
    )
    if is_taken or find_spec(name) is not None:
        need = "a name that no module in this environment has"
        raise ConfigurationError("name", got=repr(name), need=need)


def check_unused(kind: str, name: str) -> None:
    """Raise ConfigurationError if an installed part, path or scheme already has the name."""
    from modular_kernel.catalog import load_catalog
    from modular_kernel.spec.quantization import QUANT_SCHEMES, list_external_schemes

    parts = load_catalog().parts
    if kind == "path":
        experts = (part.cls for part in parts if part.kind == "experts")
        path_names = {path.name for cls in experts for path in getattr(cls, "paths", tuple)()}
        existing_name = name if name in path_names else None
    else:
        class_name = _TEMPLATES_BY_KIND[kind].class_name.format(to_class_name(name))
        existing_name = class_name if any(part.name == class_name for part in parts) else None
    if kind == "scheme" and name in (*QUANT_SCHEMES, *list_external_schemes()):
        existing_name = name
    if existing_name is not None:
        need = f"another name: {existing_name} is installed already"
        raise ConfigurationError("name", got=repr(name), need=need)


def render(kind: str, name: str) -> dict[Path, str]:
    """Return the contents of the files of a package, by path relative to the package's folder."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    template, base_name = _TEMPLATES_BY_KIND[kind], to_class_name(name)
    class_name = template.class_name.format(base_name)
    pair = tuple(part.format(base_name) for part in template.pair)
    pair_options = f"--pf-type {pair[0]} --experts-type {pair[1]}{template.options}"
    entry_points = {group: value.format(name) for group, value in template.entry_points.items()}
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATE_FOLDER),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # Python and TOML, not HTML
    )
    context = {
        "kind": kind,
        "name": name,
        "class_name": class_name,
        "distribution": name.replace("_", "-"),
        "description": template.description,
        "entry_points": entry_points,
        "shown": template.listed_as.format(name=name, class_name=class_name),
        "pair": ", ".join(f'"{part}"' for part in pair),
        "verify": f"mk test --level full {pair_options}{template.cases.format(name)}",
        "profile": f"mk profile {pair_options}{template.layer.format(name)}",
    }
    path_by_template = {
        "common/pyproject.toml": Path("pyproject.toml"),
        "common/README.md": Path("README.md"),
        **{source: Path(name, file) for source, file in template.modules.items()},
        template.test: Path("tests", f"test_{name}.py"),
    }
    return {
        path: environment.get_template(f"{source}.j2").render(context)
        for source, path in path_by_template.items()
    }


def write(files: dict[Path, str], folder: Path) -> None:
    """Write the files below `folder`, which must not exist.

    Raises ConfigurationError if it exists or a file cannot be written. In both cases, nothing is
    written.
    """
    if folder.exists() or folder.is_symlink():
        need = "a folder that does not exist yet"
        raise ConfigurationError("folder of the package", got=str(folder), need=need)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
            package_folder = Path(temporary, folder.name)
            for path, content in files.items():
                target = package_folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(content, encoding="utf-8")
            package_folder.rename(folder)
    except OSError as error:
        need = "a place where files can be written"
        raise ConfigurationError("folder of the package", got=str(error), need=need) from error
