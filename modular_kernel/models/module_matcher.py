"""Matches module names with the patterns in a quantization_config, in linear time.

A config.json is untrusted, and a regular expression from it may take exponential time in `re`.
Therefore, all entries of a list are compiled to one nondeterministic finite automaton (NFA), which
reads each character of a name once. Sets of NFA states are states of a deterministic automaton
(DFA). DFA states are computed when they are first reached, and cached, because the names of a
model's experts share most of them.

Syntax: literals, `.`, `\\d`, `\\w`, character classes, groups, `|`, `* + ? {m,n}`, `^` and `$`,
with the meaning that they have in `re`. Lookaround, backreferences and flags are refused.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

MAX_LENGTH = 500  # maximum number of characters of an entry
_MAX_STATES = 1 << 18  # NFA states of all entries of a list
_MAX_STATES_PER_ENTRY = 1 << 13
_MAX_REPEAT = 64  # upper bound in {m,n}
_MAX_NESTING = 20  # nested groups
_MAX_DFA_STATES = 1 << 15  # cached states
_REPEAT = re.compile(r"\{(\d{1,3})(,?)(\d{0,3})\}", re.ASCII)
_REGEX_CHARACTERS = frozenset("\\^$()|+{}")

Kind = Literal["modules", "regex", "search", "module regex"]


class PatternError(ValueError):
    """An entry has unsupported syntax. The message says what a valid entry needs."""


@dataclass(frozen=True)
class Entry:
    """One entry of a list.

    kind: how `text` matches a name:

    - "modules": the name of a module, with the wildcards `*`, `?` and `[...]`. It may start after
      any dot. A match covers everything inside the module.
    - "regex": a regular expression that matches from the start of a name.
    - "search": a regular expression that matches anywhere in a name.
    - "module regex": a regular expression for a module's whole name. A match covers everything
      inside the module.
    """

    text: str
    kind: Kind


def parse_entry(text: str) -> Entry:
    """Return the entry for a text in a list of modules.

    The kind is "regex" for "re:...", "module regex" for text with characters that occur neither in
    module names nor in wildcards, and "modules" for other text.
    """
    if text.startswith("re:"):
        return Entry(text[3:], "regex")
    return Entry(text, "module regex" if _REGEX_CHARACTERS & set(text) else "modules")


@dataclass(frozen=True, slots=True)
class _Characters:
    """A set of characters.

    text: characters in the set.
    ranges: ranges (first, last) in the set.
    digits: whether the set includes `\\d`.
    words: whether the set includes `\\w`.
    negated: whether the set consists of all other characters instead.
    """

    text: str = ""
    ranges: tuple[tuple[str, str], ...] = ()
    digits: bool = False
    words: bool = False
    negated: bool = False

    def __contains__(self, character: str) -> bool:
        is_included = character in self.text
        is_included |= any(first <= character <= last for first, last in self.ranges)
        is_included |= self.digits and character.isdecimal()
        is_included |= self.words and (character.isalnum() or character == "_")
        return is_included != self.negated


_ANY = _Characters(negated=True)
_ANY_EXCEPT_NEWLINE = _Characters("\n", negated=True)  # `.` of a regular expression


@dataclass(slots=True)
class _NfaState:
    """A state of the NFA.

    edges: transitions (characters, target) that read a character.
    epsilon: targets of transitions that read no character.
    at_start: targets of such transitions that are possible only at the start of a name.
    at_end: targets of such transitions that are possible only at the end of a name.
    entry: index of the entry that has matched in this state.
    """

    edges: list[tuple[_Characters, int]] = field(default_factory=list)
    epsilon: list[int] = field(default_factory=list)
    at_start: list[int] = field(default_factory=list)
    at_end: list[int] = field(default_factory=list)
    entry: int | None = None


@dataclass(slots=True)
class _DfaState:
    """A state of the DFA, that is, a set of NFA states.

    entry: lowest index of an entry that has matched.
    end_entry: lowest index of an entry that matches if the name, or the name of a module that
        contains it, ends here.
    targets: the known next states, by character.
    """

    states: frozenset[int]
    entry: int | None
    end_entry: int | None
    targets: dict[str, "_DfaState"] = field(default_factory=dict)


class ModuleMatcher:
    """Matcher for the entries of one list.

    An entry that matches the name of a module covers everything inside the module. This includes
    regular expressions that end with `$`.

    Raises PatternError for an entry with unsupported syntax, or for too many entries.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._states: list[_NfaState] = []
        self._limit = _MAX_STATES
        self._dfa_states: dict[frozenset[int], _DfaState] = {}
        self._prefixes: dict[str, tuple[_DfaState, int | None]] = {}
        start = self._new_state()
        # Entries that may start anywhere share a state. Entries that may start after a dot share
        # another state.
        anywhere, after_dot = self._new_state(), self._new_state()
        self._states[start].epsilon += [anywhere, after_dot]
        self._states[anywhere].edges += [(_ANY, anywhere), (_Characters("."), after_dot)]
        for number, entry in enumerate(entries):
            if len(entry.text) > MAX_LENGTH:
                raise PatternError(f"at most {MAX_LENGTH} characters")
            self._limit = min(len(self._states) + _MAX_STATES_PER_ENTRY, _MAX_STATES)
            source = {"modules": after_dot, "search": anywhere}.get(entry.kind, start)
            self._add_entry(number, entry, source)
        self._start_states = self._compute_closure([start], start=True)

    def first_match(self, names: Iterable[str]) -> int | None:
        """Return the index of the first entry that matches any of the names, or None."""
        numbers = [number for name in names if (number := self._match(name)) is not None]
        return min(numbers, default=None)

    def _match(self, name: str) -> int | None:
        if len(self._dfa_states) > _MAX_DFA_STATES:
            self._dfa_states.clear()
            self._prefixes.clear()
        # Cache the state before the last two components of a name, because the experts of a layer
        # share it.
        split = max(name.rfind(".", 0, max(name.rfind("."), 0)), 0)
        prefix = name[:split]
        after_prefix = self._prefixes.get(prefix)
        if after_prefix is None:
            after_prefix = self._read(self._get_dfa_state(self._start_states), None, prefix)
            self._prefixes[prefix] = after_prefix
        state, first = self._read(*after_prefix, name[split:])
        return _min_entry(_min_entry(first, state.entry), state.end_entry)

    def _read(self, state: _DfaState, first: int | None, text: str) -> tuple[_DfaState, int | None]:
        """Read `text`. Return the next state, and the index of the first entry that has matched.

        first: index of the first entry that matched before; None if there is none.
        """
        for character in text:
            if state.entry is not None:
                first = _min_entry(first, state.entry)
            if character == "." and state.end_entry is not None:
                first = _min_entry(first, state.end_entry)
            target = state.targets.get(character)
            if target is None:
                target = self._get_dfa_state(self._step(state.states, character))
                state.targets[character] = target
            state = target
        return state, first

    def _new_state(self) -> int:
        if len(self._states) >= self._limit:
            raise PatternError("fewer or shorter patterns")
        self._states.append(_NfaState())
        return len(self._states) - 1

    def _add_entry(self, number: int, entry: Entry, source: int) -> None:
        """Add the states of the entry with index `number`, which starts in the state `source`."""
        matched = self._new_state()
        self._states[matched].entry = number
        if entry.kind == "modules":
            end = _Glob(self, entry.text).build(source)
        else:
            end = _Regex(self, entry.text).build(source)
        if entry.kind in ("regex", "search"):
            self._states[end].epsilon.append(matched)
        else:
            self._states[end].at_end.append(matched)

    def _step(self, states: frozenset[int], character: str) -> frozenset[int]:
        """Return the NFA states after reading a character."""
        targets = [
            target
            for state in states
            for characters, target in self._states[state].edges
            if character in characters
        ]
        return self._compute_closure(targets)

    def _compute_closure(
        self, states: Iterable[int], *, start: bool = False, end: bool = False
    ) -> frozenset[int]:
        """Return the NFA states that are reachable without reading a character.

        start: whether the position is the start of a name.
        end: whether the position is the end of a name.
        """
        reached, pending = set(states), list(states)
        while pending:
            state = self._states[pending.pop()]
            targets = list(state.epsilon)
            targets += state.at_start if start else []
            targets += state.at_end if end else []
            for target in targets:
                if target not in reached:
                    reached.add(target)
                    pending.append(target)
        return frozenset(reached)

    def _get_dfa_state(self, states: frozenset[int]) -> _DfaState:
        state = self._dfa_states.get(states)
        if state is None:
            at_end = self._compute_closure(states, end=True)
            state = _DfaState(
                states, self._find_first_entry(states), self._find_first_entry(at_end)
            )
            self._dfa_states[states] = state
        return state

    def _find_first_entry(self, states: Iterable[int]) -> int | None:
        entries = (self._states[state].entry for state in states)
        return min((entry for entry in entries if entry is not None), default=None)


def _min_entry(first: int | None, second: int | None) -> int | None:
    """Return the smaller of two indices of entries. None stands for no entry."""
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)


class _Builder:
    """A parser of one entry, which adds states to a matcher.

    Methods with an argument `source` parse at `position`, add states that are reached from the
    state `source`, and return the state in which the parsed text has matched.
    """

    def __init__(self, matcher: ModuleMatcher, text: str) -> None:
        self.matcher, self.text, self.position = matcher, text, 0

    def add_edge(self, source: int, characters: _Characters) -> int:
        """Add a state that is reached from `source` by reading one character, and return it."""
        target = self.matcher._new_state()
        self.matcher._states[source].edges.append((characters, target))
        return target

    def add_epsilon(self, source: int, target: int) -> None:
        """Add a transition that reads no character."""
        self.matcher._states[source].epsilon.append(target)

    def parse_character_class(self, negation: str, *, escapes: bool) -> _Characters:
        """Parse a character class after its "[". A "]" at the start is a member of the class.

        negation: the character that negates the class.
        escapes: whether a backslash escapes the next character.
        """
        negated = self._peek() == negation
        self.position += negated
        begin, members = self.position, []
        while self.position == begin or self._peek() != "]":
            first = self._parse_class_member(escapes=escapes)
            if self._peek() != "-" or self.text[self.position + 1 : self.position + 2] in ("", "]"):
                members.append(first)
                continue
            self.position += 1
            last = self._parse_class_member(escapes=escapes)
            if not first.text or not last.text or first.text > last.text:
                raise PatternError("ranges of characters in order")
            members.append(_Characters(ranges=((first.text, last.text),)))
        self.position += 1
        return _Characters(
            text="".join(member.text for member in members),
            ranges=tuple(chars for member in members for chars in member.ranges),
            digits=any(member.digits for member in members),
            words=any(member.words for member in members),
            negated=negated,
        )

    def _peek(self) -> str:
        return self.text[self.position : self.position + 1]

    def _parse_class_member(self, *, escapes: bool) -> _Characters:
        """Parse a character or an escape in a class."""
        character = self._peek()
        self.position += 1
        if not character:
            raise PatternError("a class with its ]")
        if character == "[":
            raise PatternError("classes without [")
        if character == "\\" and escapes:
            self.position += 1
            return _expand_escape(self.text[self.position - 1 : self.position])
        return _Characters(character)


class _Glob(_Builder):
    """A parser of names of modules with wildcards."""

    def build(self, source: int) -> int:
        text = self.text.strip(".").removesuffix(".*")
        if not text:
            raise PatternError("the name of a module")
        self.text = text
        while self.position < len(text):
            character = text[self.position]
            self.position += 1
            if character == "*":
                source = self._add_any_text(source)
            elif character == "[":
                source = self.add_edge(source, self.parse_character_class("!", escapes=False))
            else:
                source = self.add_edge(source, _ANY if character == "?" else _Characters(character))
        return source

    def _add_any_text(self, source: int) -> int:
        """Add a state that reads any number of characters."""
        state = self.matcher._new_state()
        self.add_epsilon(source, state)
        self.matcher._states[state].edges.append((_ANY, state))
        return state


class _Regex(_Builder):
    """A parser of regular expressions by recursive descent."""

    def build(self, source: int) -> int:
        end = self._parse_alternatives(source, 0)
        if self.position < len(self.text):
            raise PatternError("balanced parentheses")
        return end

    def _parse_alternatives(self, source: int, nesting: int) -> int:
        if nesting > _MAX_NESTING:
            raise PatternError(f"at most {_MAX_NESTING} nested groups")
        end = self.matcher._new_state()
        while True:
            self.add_epsilon(self._parse_sequence(source, nesting), end)
            if self._peek() != "|":
                return end
            self.position += 1

    def _parse_sequence(self, source: int, nesting: int) -> int:
        while self.position < len(self.text) and self.text[self.position] not in "|)":
            source = self._parse_repetition(source, nesting)
        return source

    def _parse_repetition(self, source: int, nesting: int) -> int:
        """Parse an atom and its quantifier.

        For {m,n}, the atom is parsed n times, so that each repetition has its own states.
        """
        atom_position, atom_start = self.position, self.matcher._new_state()
        self.add_epsilon(source, atom_start)
        end = self._parse_atom(atom_start, nesting)
        after_atom = self.position
        low, high = self._parse_quantifier()
        if self.text[atom_position] in "^$" and self.position != after_atom:
            raise PatternError("no quantifier after ^ or $")
        after_quantifier, ends = self.position, [end]
        if low == 0:
            ends.append(source)
        for count in range(2, (high or max(low, 1)) + 1):
            self.position = atom_position
            atom_start = self.matcher._new_state()
            self.add_epsilon(end, atom_start)
            end = self._parse_atom(atom_start, nesting)
            if self.position != after_atom:
                raise PatternError("quantifiers that follow an atom")
            ends = [end] if count <= low else [*ends, end]
        if high is None:  # repeat the last atom any number of times
            self.add_epsilon(end, atom_start)
        self.position = after_quantifier
        target = self.matcher._new_state()
        for end in ends:
            self.add_epsilon(end, target)
        return target

    def _parse_quantifier(self) -> tuple[int, int | None]:
        """Parse a quantifier, if there is one. Returns (minimum, maximum); None means unlimited."""
        character = self._peek()
        bounds_by_character = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if character in bounds_by_character:
            self.position += 1
            bounds: tuple[int, int | None] = bounds_by_character[character]
        elif match := _REPEAT.match(self.text, self.position):
            self.position = match.end()
            low = int(match[1])
            bounds = low, low if not match[2] else int(match[3]) if match[3] else None
            high = low if bounds[1] is None else bounds[1]
            if not low <= high <= _MAX_REPEAT or bounds[1] == 0:
                raise PatternError(f"repetitions {{m,n}} up to {_MAX_REPEAT}")
        else:
            return 1, 1
        next_character = self._peek()
        if next_character == "?":  # a lazy quantifier matches the same names
            self.position += 1
        elif next_character and next_character in "*+{":
            raise PatternError("one quantifier after an atom")
        return bounds

    def _parse_atom(self, source: int, nesting: int) -> int:
        character = self.text[self.position]
        self.position += 1
        if character == "(":
            return self._parse_group(source, nesting)
        if character == "[":
            return self.add_edge(source, self.parse_character_class("^", escapes=True))
        if character in "^$":
            target = self.matcher._new_state()
            state = self.matcher._states[source]
            (state.at_start if character == "^" else state.at_end).append(target)
            return target
        if character == "\\":
            self.position += 1
            return self.add_edge(
                source, _expand_escape(self.text[self.position - 1 : self.position])
            )
        if character in "*+?{}])":
            raise PatternError(f"no {character} here")
        return self.add_edge(
            source, _ANY_EXCEPT_NEWLINE if character == "." else _Characters(character)
        )

    def _parse_group(self, source: int, nesting: int) -> int:
        if self._peek() == "?":
            if self.text[self.position : self.position + 2] != "?:":
                raise PatternError("groups without lookaround, names or flags")
            self.position += 2
        end = self._parse_alternatives(source, nesting + 1)
        if self._peek() != ")":
            raise PatternError("balanced parentheses")
        self.position += 1
        return end


def _expand_escape(character: str) -> _Characters:
    """Return the characters that a backslash followed by `character` matches."""
    if character in ("d", "w"):
        return _Characters(digits=character == "d", words=character == "w")
    if not character or character.isalnum():
        raise PatternError(r"no escapes except \d, \w and those of punctuation")
    return _Characters(character)
