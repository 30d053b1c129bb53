"""Facts about the programs that the checks of engines write."""

import ast


def count_statements(program: str) -> int:
    """Return the number of statements other than imports."""
    statements = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.stmt)]
    return sum(not isinstance(node, ast.Import | ast.ImportFrom) for node in statements)
