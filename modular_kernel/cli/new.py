"""`mk new`: writes an installable starter package with a new part, path or scheme."""

from pathlib import Path
from typing import Annotated

from modular_kernel.cli import output
from modular_kernel.cli.command import argument, option
from modular_kernel.cli.file_options import FilePath, FileUse
from modular_kernel.cli.options import AsJson


def new(
    *,
    kind: Annotated[str, argument("experts, prepare-finalize, exchange, path or scheme.")],
    name: Annotated[str, argument("Name of the package, such as my_experts.")],
    out: Annotated[
        Path | None,
        option(
            "Folder in which to create the package's folder.  [default: the current one]",
            type=FilePath(FileUse.WRITE_FOLDER),
        ),
    ] = None,
    as_json: AsJson = None,
) -> None:
    """Write a package with a new part, path or scheme: pyproject.toml, code, tests and README.

    KIND is one of these:

    \b
      experts           an experts part
      prepare-finalize  a PrepareAndFinalize part for a single rank
      exchange          a PrepareAndFinalize part over ranks
      path              a code path of TritonExperts
      scheme            a quantization scheme, and an experts part that runs it

    NAME is the name of the package and of its folder. In CamelCase, it is the name of the class:
    my_experts contains MyExperts. Entry points of the package register the part, path or scheme.
    The package passes `mk test --level full` and its own tests.

    Nothing is written if the name is not valid or if the folder already exists.
    """
    from modular_kernel.cli.scaffold import check_kind, check_name, check_unused, render, write

    check_kind(kind)
    check_name(name)
    check_unused(kind, name)
    folder = (Path() if out is None else out) / name
    files = render(kind, name)
    write(files, folder)
    record = {"folder": str(folder), "files": sorted(str(path) for path in files)}
    output.print_result(record, as_json, lambda: _print_text(folder, files))


def _print_text(folder: Path, files: dict[Path, str]) -> None:
    for path in sorted(files):
        output.print_line(str(folder / path))
    output.print_line(f"Next: pip install -e '{folder}[test]', then the commands of its README.md")
