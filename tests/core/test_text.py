"""Text from files and other packages is displayed without control characters."""

import ast
import json
import logging
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from run_mk import run_mk

from modular_kernel.compatibility.support import Rejection
from modular_kernel.errors import ConfigurationError
from modular_kernel.text import escape_nonprintable, format_counts, pluralize

# Escape sequences that set a color, clear the screen and set the title; an 8-bit CSI; overrides and
# isolates of the text direction; a forged line; a carriage return; a line separator; a zero-width
# space; a lone surrogate.
HOSTILE = "a\x1b[31m\x1b[2J\x1b]0;t\x07\x9b1m\u202eb\u2066c\u2069\nerror: d\r\u2028\u200b\ud800"


@pytest.mark.parametrize("text", ["", "plain", "Größe 漢字 ~é", "a b"])
def test_printable_text_is_unchanged(text: str) -> None:
    assert escape_nonprintable(text) == text


def test_nonprintable_characters_are_escaped() -> None:
    escaped = escape_nonprintable(HOSTILE)
    assert escaped.isprintable()
    assert escaped.startswith(
        r"a\x1b[31m\x1b[2J\x1b]0;t\x07\x9b1m\u202eb\u2066c\u2069\nerror: d\r\u2028"
    )
    assert escape_nonprintable("a\n\tb\x1b", keep_lines=True) == "a\n\tb\\x1b"
    assert escape_nonprintable("abc", max_chars=2) == "ab..."


def test_errors_and_rejections_escape_text() -> None:
    assert str(ConfigurationError(HOSTILE, got=HOSTILE, need=HOSTILE)).isprintable()
    assert str(Rejection("rule", (HOSTILE,), HOSTILE, HOSTILE, HOSTILE)).isprintable()


CONFIG = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    "entry",
    [
        {"num_local_experts": HOSTILE},
        {"hidden_size": [HOSTILE]},
        {"hidden_act": HOSTILE},
        {"torch_dtype": HOSTILE},
        {"quantization_config": {"quant_method": HOSTILE}},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": HOSTILE}},
        {
            "model_type": "deepseek_v3",
            "n_routed_experts": 8,
            "moe_intermediate_size": 64,
            "routed_scaling_factor": HOSTILE,
        },
        {"model_type": "gpt_oss", "swiglu_limit": HOSTILE},
    ],
    ids=str,
)
def test_a_downloaded_config_cannot_write_to_the_terminal(
    entry: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | entry), encoding="utf-8")
    for command in ("check", "compose"):
        result = run_mk(capsys, command, "--model", str(path))
        assert result.code == 2
        error_line = result.err.removesuffix("\n").split("\n")[-1]
        assert error_line.startswith("error: model ")
        assert error_line.isprintable()
        assert result.out == ""


def test_tables_and_lines_show_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    from modular_kernel.cli import output

    output.print_table(("a",), [(HOSTILE,)])
    output.print_line(HOSTILE)
    output.print_note(HOSTILE)
    printed = "".join(capsys.readouterr())
    assert printed.replace("\n", "").isprintable()


def test_the_log_of_a_forged_cache_shows_escapes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from experts.triton.configs import lookup

    lookup._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        lookup._warn_once(HOSTILE)
    (record,) = caplog.records
    assert record.getMessage().isprintable()


def list_string_constants(path: Path) -> Iterator[str]:
    """Yield the string constants in a module except docstrings, with the parts of f-strings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstring_ids = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in docstring_ids:
            yield str(node.value)


def _has_fixed_plural(path: Path) -> bool:
    """Return whether an f-string has " tokens" after a number of tokens, which can be 1."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    f_strings = (node.values for node in ast.walk(tree) if isinstance(node, ast.JoinedStr))
    return any(
        isinstance(number, ast.FormattedValue)
        and isinstance(number.value, ast.Attribute)
        and number.value.attr == "tokens"
        and isinstance(text, ast.Constant)
        and str(text.value).startswith(" tokens")
        for values in f_strings
        for number, text in pairwise(values)
    )


def test_no_text_has_an_optional_plural() -> None:
    """Code must use `format_counts` or `pluralize` instead of strings such as "case(s)"."""
    root = Path(__file__).resolve().parents[2]
    folders = ("modular_kernel", "prepare_finalize", "experts", "topk_reduce", "tools", "examples")
    paths = [path for folder in folders for path in (root / folder).rglob("*.py")]
    assert len(paths) > 300
    optional_plurals = [
        (path.name, text)
        for path in paths
        for text in list_string_constants(path)
        if re.search(r"\w\((s|es)\)(?!\w)", text)
    ]
    assert optional_plurals == []
    assert [path.name for path in paths if _has_fixed_plural(path)] == []
    assert [format_counts(n, "token") for n in ((1,), (16,), (1, 16))] == [
        *("1 token", "16 tokens", "1, 16 tokens")
    ]
    assert (pluralize("rank", 1), pluralize("rank", 0), pluralize("rank", 2)) == (
        "rank",
        "ranks",
        "ranks",
    )
