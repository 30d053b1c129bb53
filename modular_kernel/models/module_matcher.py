"""Matching of module names with the entries of a quantization_config, in linear time.

A config.json is untrusted, and a regular expression in it may take exponential time in `re`. Here,
all entries of a list become one nondeterministic automaton (NFA), and a name is read once. The
states of the equivalent deterministic automaton (DFA) are built on demand, so that the names of a
model's experts share almost all of them.

Syntax: literals, `.`, `\\d`, `\\w`, character classes, groups, `|`, `* + ? {m,n}`, `^` and `$`,
with the meaning that they have in `re`. Lookaround, backreferences and flags are refused.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

MAX_LENGTH = 500  # characters of an entry
_MAX_STATES = 1 << 18  # NFA states of all entries of a list
_MAX_STATES_OF_ENTRY = 1 << 13
_MAX_REPEAT = 64  # upper bound in {m,n}
_MAX_NESTING = 20
_MAX_DFA_STATES = 1 << 15  # kept at a time
_REPEAT = re.compile(r"\{(\d{1,3})(,?)(\d{0,3})\}", re.ASCII)
_REGEX_CHARACTERS = frozenset("\\^$()|+{}")

Kind = Literal["modules", "regex", "search", "module regex"]


class PatternError(ValueError):
    """An entry that cannot be matched. The message says what is needed."""


@dataclass(frozen=True)
class Entry:
    """One entry of a list.

    kind: how `text` matches a name:

    - "modules": names of modules, with the wildcards `*`, `?` and `[...]`, that may start after any
      dot. A match covers everything inside the module.
    - "regex": a regular expression that matches from the start of a name.
    - "search": a regular expression that matches anywhere in a name.
    - "module regex": a regular expression for a module's whole name. A match covers everything
      inside the module.
    """

    text: str
    kind: Kind


def entry_of(text: str) -> Entry:
    """Return the entry for a text in a list of modules.

    "re:..." is a regex. Other text is a "module regex" if it has characters that occur only in
    regular expressions, else "modules".
    """
    if text.startswith("re:"):
        return Entry(text[3:], "regex")
    return Entry(text, "module regex" if _REGEX_CHARACTERS & set(text) else "modules")


@dataclass(frozen=True, slots=True)
class _Characters:
    """A set of characters.

    text, ranges: characters, and ranges (first, last), in the set. digits, words: whether the set
    includes `\\d` and `\\w`. negated: the set consists of all other characters instead.
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

    edges: (characters, target). epsilon: targets of transitions without a character. at_start,
    at_end: targets of such transitions that are taken only at the start or the end of a name.
    entry: number of the entry that has matched in this state.
    """

    edges: list[tuple[_Characters, int]] = field(default_factory=list)
    epsilon: list[int] = field(default_factory=list)
    at_start: list[int] = field(default_factory=list)
    at_end: list[int] = field(default_factory=list)
    entry: int | None = None


@dataclass(slots=True)
class _DfaState:
    """A state of the DFA, that is, a set of NFA states.

    entry: number of the first entry that has matched. end_entry: number of the first entry that has
    matched if the name, or the name of a module that contains it, ends here.
    """

    states: frozenset[int]
    entry: int | None
    end_entry: int | None
    targets: dict[str, "_DfaState"] = field(default_factory=dict)


class ModuleMatcher:
    """Matcher for the entries of one list.

    A regular expression with `$` covers everything inside the modules that it matches, like an
    entry that names a module. Raises PatternError for an entry with unknown syntax, or if there are
    too many.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._states: list[_NfaState] = []
        self._limit = _MAX_STATES
        self._dfa_states: dict[frozenset[int], _DfaState] = {}
        self._prefixes: dict[str, tuple[_DfaState, int | None]] = {}
        start = self._new_state()
        # These two states are shared by the entries that may start anywhere, or after any dot.
        anywhere, at_part = self._new_state(), self._new_state()
        self._states[start].epsilon += [anywhere, at_part]
        self._states[anywhere].edges += [(_ANY, anywhere), (_Characters("."), at_part)]
        for number, entry in enumerate(entries):
            if len(entry.text) > MAX_LENGTH:
                raise PatternError(f"at most {MAX_LENGTH} characters")
            self._limit = min(len(self._states) + _MAX_STATES_OF_ENTRY, _MAX_STATES)
            source = {"modules": at_part, "search": anywhere}.get(entry.kind, start)
            self._add(number, entry, source)
        self._start_states = self._closure([start], start=True)

    def first(self, names: Iterable[str]) -> int | None:
        """Return the number of the first entry that matches one of the names; None if none does."""
        numbers = [number for name in names if (number := self._match(name)) is not None]
        return min(numbers, default=None)

    def _match(self, name: str) -> int | None:
        if len(self._dfa_states) > _MAX_DFA_STATES:
            self._dfa_states.clear()
            self._prefixes.clear()
        # Experts of a layer differ only in the last two parts of their names.
        split = max(name.rfind(".", 0, max(name.rfind("."), 0)), 0)
        prefix = name[:split]
        reached = self._prefixes.get(prefix)
        if reached is None:
            reached = self._read(self._dfa_state(self._start_states), None, prefix)
            self._prefixes[prefix] = reached
        state, best = self._read(*reached, name[split:])
        return _first_of(_first_of(best, state.entry), state.end_entry)

    def _read(self, state: _DfaState, best: int | None, text: str) -> tuple[_DfaState, int | None]:
        """Return the DFA state after `text`, and the first entry that matched before its end."""
        for character in text:
            if state.entry is not None:
                best = _first_of(best, state.entry)
            if character == "." and state.end_entry is not None:
                best = _first_of(best, state.end_entry)
            target = state.targets.get(character)
            if target is None:
                target = self._dfa_state(self._step(state.states, character))
                state.targets[character] = target
            state = target
        return state, best

    def _new_state(self) -> int:
        if len(self._states) >= self._limit:
            raise PatternError("fewer or shorter patterns")
        self._states.append(_NfaState())
        return len(self._states) - 1

    def _add(self, number: int, entry: Entry, source: int) -> None:
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
        targets = [
            target
            for state in states
            for characters, target in self._states[state].edges
            if character in characters
        ]
        return self._closure(targets)

    def _closure(
        self, states: Iterable[int], *, start: bool = False, end: bool = False
    ) -> frozenset[int]:
        """Return the states that are reached without a character.

        start, end: whether this is at the start or the end of a name.
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

    def _dfa_state(self, states: frozenset[int]) -> _DfaState:
        state = self._dfa_states.get(states)
        if state is None:
            at_end = self._closure(states, end=True)
            state = _DfaState(states, self._first_entry(states), self._first_entry(at_end))
            self._dfa_states[states] = state
        return state

    def _first_entry(self, states: Iterable[int]) -> int | None:
        entries = (self._states[state].entry for state in states)
        return min((entry for entry in entries if entry is not None), default=None)


def _first_of(first: int | None, second: int | None) -> int | None:
    """Return the smaller of two entry numbers; None stands for no entry."""
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)


class _Builder:
    """A parser of one entry, which adds states to a matcher."""

    def __init__(self, matcher: ModuleMatcher, text: str) -> None:
        self.matcher, self.text, self.position = matcher, text, 0

    def edge(self, source: int, characters: _Characters) -> int:
        """Add a state that is reached from `source` by one character, and return it."""
        target = self.matcher._new_state()
        self.matcher._states[source].edges.append((characters, target))
        return target

    def epsilon(self, source: int, target: int) -> None:
        """Add a transition without a character."""
        self.matcher._states[source].epsilon.append(target)

    def character_class(self, negation: str, *, escapes: bool) -> _Characters:
        """Parse a class after its "[". If its first character is "]", that belongs to the class.

        negation: the character that negates it. escapes: whether a backslash escapes the next
        character.
        """
        negated = self._peek() == negation
        self.position += negated
        begin, classes = self.position, []
        while self.position == begin or self._peek() != "]":
            first = self._class_member(escapes=escapes)
            if self._peek() != "-" or self.text[self.position + 1 : self.position + 2] in ("", "]"):
                classes.append(first)
                continue
            self.position += 1
            last = self._class_member(escapes=escapes)
            if not first.text or not last.text or first.text > last.text:
                raise PatternError("ranges of characters in order")
            classes.append(_Characters(ranges=((first.text, last.text),)))
        self.position += 1
        return _Characters(
            text="".join(each.text for each in classes),
            ranges=tuple(one for each in classes for one in each.ranges),
            digits=any(each.digits for each in classes),
            words=any(each.words for each in classes),
            negated=negated,
        )

    def _peek(self) -> str:
        """Return the next character, or "" at the end."""
        return self.text[self.position : self.position + 1]

    def _class_member(self, *, escapes: bool) -> _Characters:
        """Parse one character of a class, or an escape."""
        character = self._peek()
        self.position += 1
        if not character:
            raise PatternError("a class with its ]")
        if character == "[":
            raise PatternError("classes without [")
        if character == "\\" and escapes:
            self.position += 1
            return _escaped(self.text[self.position - 1 : self.position])
        return _Characters(character)


class _Glob(_Builder):
    """Names of modules with wildcards."""

    def build(self, source: int) -> int:
        text = self.text.strip(".").removesuffix(".*")
        if not text:
            raise PatternError("the name of a module")
        self.text = text
        while self.position < len(text):
            character = text[self.position]
            self.position += 1
            if character == "*":
                source = self._loop(source)
            elif character == "[":
                source = self.edge(source, self.character_class("!", escapes=False))
            else:
                source = self.edge(source, _ANY if character == "?" else _Characters(character))
        return source

    def _loop(self, source: int) -> int:
        state = self.matcher._new_state()
        self.epsilon(source, state)
        self.matcher._states[state].edges.append((_ANY, state))
        return state


class _Regex(_Builder):
    """A regular expression."""

    def build(self, source: int) -> int:
        end = self._alternatives(source, 0)
        if self.position < len(self.text):
            raise PatternError("balanced parentheses")
        return end

    def _alternatives(self, source: int, nesting: int) -> int:
        if nesting > _MAX_NESTING:
            raise PatternError(f"at most {_MAX_NESTING} nested groups")
        end = self.matcher._new_state()
        while True:
            self.epsilon(self._sequence(source, nesting), end)
            if self._peek() != "|":
                return end
            self.position += 1

    def _sequence(self, source: int, nesting: int) -> int:
        while self.position < len(self.text) and self.text[self.position] not in "|)":
            source = self._repeated(source, nesting)
        return source

    def _repeated(self, source: int, nesting: int) -> int:
        """Parse an atom and its quantifier. The atom is parsed again for each repetition."""
        begin, atom = self.position, self.matcher._new_state()
        self.epsilon(source, atom)
        end = self._atom(atom, nesting)
        after = self.position
        low, high = self._quantifier()
        if self.text[begin] in "^$" and self.position != after:
            raise PatternError("no quantifier after ^ or $")
        rest, ends = self.position, [end]
        if low == 0:
            ends.append(source)
        for count in range(2, (high or max(low, 1)) + 1):
            self.position = begin
            start = self.matcher._new_state()
            self.epsilon(end, start)
            end = self._atom(start, nesting)
            if self.position != after:
                raise PatternError("quantifiers that follow an atom")
            ends = [end] if count <= low else [*ends, end]
            atom = start
        if high is None:
            self.epsilon(end, atom)
        self.position = rest
        last = self.matcher._new_state()
        for each in ends:
            self.epsilon(each, last)
        return last

    def _quantifier(self) -> tuple[int, int | None]:
        """Parse a quantifier and return (minimum, maximum); the maximum is None for * and +."""
        character = self._peek()
        simple = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if character in simple and character:
            self.position += 1
            bounds: tuple[int, int | None] = simple[character]
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

    def _atom(self, source: int, nesting: int) -> int:
        character = self.text[self.position]
        self.position += 1
        if character == "(":
            return self._group(source, nesting)
        if character == "[":
            return self.edge(source, self.character_class("^", escapes=True))
        if character in "^$":
            target = self.matcher._new_state()
            state = self.matcher._states[source]
            (state.at_start if character == "^" else state.at_end).append(target)
            return target
        if character == "\\":
            self.position += 1
            return self.edge(source, _escaped(self.text[self.position - 1 : self.position]))
        if character in "*+?{}])":
            raise PatternError(f"no {character} here")
        return self.edge(
            source, _ANY_EXCEPT_NEWLINE if character == "." else _Characters(character)
        )

    def _group(self, source: int, nesting: int) -> int:
        if self._peek() == "?":
            if self.text[self.position : self.position + 2] != "?:":
                raise PatternError("groups without lookaround, names or flags")
            self.position += 2
        end = self._alternatives(source, nesting + 1)
        if self._peek() != ")":
            raise PatternError("balanced parentheses")
        self.position += 1
        return end


def _escaped(character: str) -> _Characters:
    """Return the characters that a backslash and `character` stand for."""
    if character in ("d", "w"):
        return _Characters(digits=character == "d", words=character == "w")
    if not character or character.isalnum():
        raise PatternError(r"no escapes except \d, \w and those of punctuation")
    return _Characters(character)
