"""Entries match the names that `re` and `fnmatch` match, in a bounded time."""

import re
import time
import warnings
from fnmatch import fnmatchcase

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modular_kernel.models.module_matcher import Entry, ModuleMatcher, PatternError, parse_entry

NAMES = [
    f"{prefix}layers.{layer}.mlp.{module}"
    for prefix in ("model.", "model.language_model.", "")
    for layer in (0, 1, 2, 3, 12, 33)
    for module in (
        "gate",
        "gate_proj",
        "experts",
        "experts.7.w1",
        "experts.12.w3",
        "experts.113.w1",
    )
]
PATTERNS = (
    r".*mlp\.(gate|up|gate_up|down)_proj.*",
    r"model\.layers\.(0|1|2)\..*",
    r".*\.(?:[0-9]|[1-3][0-9])\.mlp\..*",
    r".*experts\.\d{1,2}\.w1",
    r".*experts\.\d{2,}\.w\d+",
    r"^model.*gate$",
    r".+w[13]$",
    r"m?odel.*?\.[^.]+\.(\d+)",
    r"model\.layers\.1",
    r"(m|mo)+del.*",
    r"(?:mod|model)(\.layers)?\.\d+",
    r".*layers\.(3|12)\.mlp(\.gate|$)",
    r".*[a-f]x?[\w.]{3}w3",
    r"layers\.",
    r"",
)


def matches(entry: Entry, name: str) -> bool:
    return ModuleMatcher([entry]).first_match([name]) is not None


@pytest.mark.parametrize("pattern", PATTERNS)
def test_regexes_match_as_re_does(pattern: str) -> None:
    """An entry also applies to modules inside a module, so `$` matches at the end of each part."""
    for name in NAMES:
        parts = name.split(".")
        enclosing_modules = [".".join(parts[: n + 1]) for n in range(len(parts))]
        expected = any(re.match(pattern, module) for module in enclosing_modules)
        assert matches(Entry(pattern, "regex"), name) == expected, name
        expected = any(re.search(pattern, module) for module in enclosing_modules)
        assert matches(Entry(pattern, "search"), name) == expected, name


CHARACTER_CLASSES = (
    "[]a]", "[^]a]", "[]]", "[^]]", "[]-a]", "[a-]", "[-a]", "[^-a]", "[^^]", "[a^]",
    r"[\]a]", r"[a\]]", r"[^\]]", r"[\\]", r"[\^a]", r"[\-a]", r"[a\-z]", r"[\.-z]", r"[+-\]]",
    r"[\w-]", r"[\w.-]", r"[-\w]", r"[^\w]", r"[\d_]", r"[^\d]", "[^0-9]", "[0-9-]", "[a-c0-2]",
    "[é]", "[à-ü]", "[^à-ü]", r"\w", r"\d", ".", "[.]", "[$]", "[(|)]", "[*+?{}]",
)  # fmt: skip
# ASCII, and other characters that a class may distinguish. é is a letter, and ٣ is a digit.
CHARACTERS = [*map(chr, range(128)), "é", "ü", "٣", "\u2013"]


@pytest.mark.parametrize("pattern", CHARACTER_CLASSES)
def test_character_classes_match_as_in_re(pattern: str) -> None:
    for character in CHARACTERS:
        expected = re.fullmatch(pattern, character) is not None
        matched = matches(Entry(f"<{pattern}>", "regex"), f"<{character}>")
        assert matched == expected, character


@pytest.mark.parametrize(
    "pattern",
    ["[]", "[^]", "[", "[a", r"[\]", "[b-a]", r"[\w-z]", r"[a-\d]", r"[\d-\w]", "[a[b]", "^*"],
)
def test_character_classes_that_re_refuses_are_refused(pattern: str) -> None:
    with pytest.raises(PatternError):
        ModuleMatcher([Entry(pattern, "regex")])


@pytest.mark.parametrize(
    "pattern", ["[]a]", "[!]a]", "[!a]", "[a-]", "[!-a]", "[^a]", "[0-9]", "[!0-9]", "[a!]", r"[\]"]
)
def test_wildcards_match_as_in_fnmatch(pattern: str) -> None:
    for character in CHARACTERS:
        expected = fnmatchcase(character, pattern)
        assert matches(Entry(f"<{pattern}>", "modules"), f"<{character}>") == expected, character


# Strategies for patterns: the body of a character class, and atoms outside a class.
_IN_CLASS = st.text("abz059._-^]\\wdé$", min_size=1, max_size=6)
_ATOMS = st.one_of(
    _IN_CLASS.map(lambda body: f"[{body}]"),
    st.sampled_from(["a", "b", "z", "0", "5", "_", "-", "é", ".", r"\.", r"\w", r"\d", r"\]"]),
)
_QUANTIFIERS = st.sampled_from(["", "", "", "*", "+", "?", "{2}", "{1,2}", "{0,}", "*?"])
_SEQUENCES = st.lists(st.tuples(_ATOMS, _QUANTIFIERS).map("".join), min_size=1, max_size=4)
_REGEXES = st.one_of(
    _SEQUENCES.map("".join),
    st.tuples(_SEQUENCES, _SEQUENCES).map(lambda two: f"({'|'.join(map(''.join, two))})"),
    st.tuples(_SEQUENCES, _SEQUENCES).map(lambda two: f"^(?:{''.join(two[0])})*{''.join(two[1])}$"),
)
# Messages about syntax that `re` accepts and ModuleMatcher refuses.
_REFUSED = "no escapes|no []{}*+?)] here|one quantifier|classes without \\["


@settings(max_examples=600, deadline=None)
@given(_REGEXES, st.lists(st.text("abz059_-^]\\wdé$", max_size=6), min_size=4, max_size=12))
def test_generated_regexes_match_as_in_re(pattern: str, names: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", FutureWarning
        )  # `re` warns about `--` in a class, for example.
        try:
            compiled = re.compile(pattern)
        except re.error:
            compiled = None
    try:
        matchers = [ModuleMatcher([Entry(pattern, kind)]) for kind in ("regex", "search")]
    except PatternError as error:
        if compiled is not None and not re.search(_REFUSED, str(error)):
            pytest.fail(f"refused, but not by re: {error}")
        return
    assert compiled is not None, "refused by re"
    for name in names:
        matched = [matcher.first_match([name]) is not None for matcher in matchers]
        assert matched == [bool(compiled.match(name)), bool(compiled.search(name))], name


EXPERT = "model.layers.3.mlp.experts.17.gate_proj"


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("lm_head", False),
        ("gate", False),  # names the router, not gate_proj
        ("mlp.gate", False),
        ("gate_proj", True),
        ("mlp", True),
        ("mlp.experts", True),
        ("model.layers.3", True),
        ("model.layers.3.", True),
        ("model.layers.3.mlp.*", True),
        ("model.layers.33.", False),
        ("layers.3.mlp", True),
        ("model.layers.*.mlp.experts*", True),
        ("model.layers.[0-4].mlp", True),
        ("model.layers.[!0-4].mlp", False),
        ("*.experts.1?.gate_proj", True),
        ("model.layers.1*", False),
        ("odel.layers.3", False),
        ("experts.1", False),
        (r"model\.layers\.\d+\.mlp\.experts", True),
        (r"model\.layers\.\d+\.mlp\.exp", False),  # does not match a part of the name to its end
        ("re:.*experts.*", True),
        (r"re:experts", False),  # does not match the start of the name
        (r"re:.*mlp\.gate$", False),
    ],
)
def test_entries_of_lists(entry: str, expected: bool) -> None:
    assert matches(parse_entry(entry), EXPERT) == expected


def test_first_matching_entry_applies() -> None:
    entries = [parse_entry(text) for text in ("lm_head", "re:.*gate_proj", "mlp", "re:model.*")]
    matcher = ModuleMatcher(entries)
    assert matcher.first_match([EXPERT]) == 1
    assert matcher.first_match([EXPERT.replace("gate", "up")]) == 2
    assert matcher.first_match(["model.norm"]) == 3
    assert matcher.first_match(["lm_head"]) == 0
    assert matcher.first_match(["lm_head.bias", EXPERT]) == 0
    assert matcher.first_match(["visual.mlp_norm"]) is None


@pytest.mark.parametrize(
    "pattern",
    ["(a", "a)", "[a", "a**", "*a", "(?!a)b", "(?i)a", r"(a)\1", r"\x61", "a{3,2}", "a{999}",
     "(" * 40 + "a" + ")" * 40, "a" * 501, "(((a{60}){60}){60}){60}", "[[:alpha:]]", "a{0}"],
)  # fmt: skip
def test_other_syntax_is_refused(pattern: str) -> None:
    with pytest.raises(PatternError):
        ModuleMatcher([Entry(pattern, "regex")])


@pytest.mark.parametrize("entry", ["", ".", ".."])
def test_invalid_entries_are_refused(entry: str) -> None:
    with pytest.raises(PatternError):
        ModuleMatcher([Entry(entry, "modules")])


def test_matching_time_is_bounded() -> None:
    """A backtracking matcher would take years for the first two patterns."""
    patterns = ["(m|m)(o|o)" * 49, "(.*.*)*" * 60 + "x", ".*a" * 160 + "$", "(.?){60}" * 9 + "y"]
    entries = [Entry(pattern, "regex") for pattern in patterns]
    entries += [parse_entry(f"model.layers.{n}.*.gate*") for n in range(200)]
    start = time.process_time()
    matcher = ModuleMatcher(entries)
    for layer in range(20):
        for expert in range(64):
            matcher.first_match([f"model.layers.{layer}.mlp.experts.{expert}.down_proj"])
    assert time.process_time() - start < 20
