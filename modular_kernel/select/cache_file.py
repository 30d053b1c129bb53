"""Format of a cache file: JSON with the measurements of one identity (see `cache_keys`).

A file has one record for each set of software versions, newest first. A record has buckets. A
bucket contains the times of all pairings at one number of tokens. A pairing is stored as the names
of its two parts, a PrepareAndFinalize and an experts class.

Other users may write to a shared cache folder, so files are not trusted. `from_text` validates
every value, and a pairing is used only if it is valid for the problem. A forged file can therefore
only cause the selection of a slower valid pairing.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from modular_kernel.errors import ConfigurationError
from modular_kernel.select.cache_keys import KeyFields
from modular_kernel.select.selection import Bucket, Pair, TimedOutcome
from modular_kernel.utils import json_files

SCHEMA = "mk-choices/2"
MAX_BYTES = 1 << 20
_MAX_RECORDS = 8  # per file; older records are dropped
_MAX_BUCKETS = 128
_MAX_OUTCOMES = 256
_MAX_TOKENS = 1 << 24
_MAX_US = 1e12
_MAX_RATIO = 1e9
_MAX_CHARACTERS = 400  # of a string
_MODES = ("graph", "eager", "cpu", "")


@dataclass(frozen=True)
class CacheRecord:
    """The measurements made with one set of versions.

    versions: see `cache_keys.version_fields`.
    timestamp: time of the last measurement, in seconds since 1970.
    """

    versions: KeyFields
    timestamp: float
    buckets: tuple[Bucket, ...] = ()

    def bucket(self, tokens: int) -> Bucket | None:
        """Return the bucket of this number of tokens, or None."""
        return next((b for b in self.buckets if b.tokens == tokens), None)

    def with_buckets(self, new_buckets: Sequence[Bucket]) -> "CacheRecord":
        """Return a copy in which the new buckets replace buckets of the same token counts."""
        bucket_by_tokens = {b.tokens: b for b in (*self.buckets, *new_buckets)}
        return replace(self, buckets=tuple(bucket_by_tokens[t] for t in sorted(bucket_by_tokens)))


def to_text(identity: KeyFields, records: Sequence[CacheRecord]) -> str:
    """Serialize the newest records, as many as fit into MAX_BYTES."""
    newest = sorted(records, key=lambda r: -r.timestamp)[:_MAX_RECORDS]
    while True:
        record_objects = [_to_json(record) for record in newest]
        content = {"schema": SCHEMA, "identity": identity, "records": record_objects}
        text = json.dumps(content, indent=1, allow_nan=False)
        if len(text) < MAX_BYTES:  # json.dumps returns ASCII
            return text
        last_record = newest.pop()
        if not newest:  # a single record is too large; drop the smaller half of its token counts
            newest = [
                replace(
                    last_record, buckets=last_record.buckets[len(last_record.buckets) // 2 + 1 :]
                )
            ]


def from_text(text: str | bytes, identity: KeyFields) -> tuple[CacheRecord, ...]:
    """Parse the records of a file.

    Raises ConfigurationError with the reason if the file is invalid or has another identity.
    """
    try:
        content = json_files.parse(text)
    except ValueError as error:
        raise _make_error(f"no JSON: {str(error)[:100]}") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise _make_error(f"no {SCHEMA}")
    if content.get("identity") != identity:
        raise _make_error("choices for another layer or machine", need="the same identity")
    return tuple(_parse_record(item) for item in _get_list(content, "records", _MAX_RECORDS))


def _to_json(record: CacheRecord) -> dict[str, Any]:
    buckets = [
        {
            "tokens": bucket.tokens,
            "default": list(bucket.default),
            "outcomes": [
                {
                    "pair": list(o.pair),
                    "us": o.us,
                    "ratio": o.ratio,
                    "noise": o.noise,
                    "rough": o.rough,
                    "mode": o.mode,
                    "why": _to_line(o.why),
                }
                for o in bucket.outcomes
            ],
        }
        for bucket in record.buckets[-_MAX_BUCKETS:]
    ]
    return {"versions": record.versions, "made": record.timestamp, "buckets": buckets}


def _to_line(text: str) -> str:
    """Return the text in the form that `_is_line` requires."""
    return "".join(c if c.isprintable() else " " for c in text)[:_MAX_CHARACTERS]


def _parse_record(value: Any) -> CacheRecord:
    timestamp = _parse_positive_number(value, "made", 1e12)
    versions = value.get("versions")
    if not isinstance(versions, dict) or not all(
        _is_line(t) for t in (*versions, *versions.values())
    ):
        raise _make_error("versions that are not strings")
    buckets = tuple(_parse_bucket(item) for item in _get_list(value, "buckets", _MAX_BUCKETS))
    if len({b.tokens for b in buckets}) != len(buckets):
        raise _make_error("one number of tokens twice")
    return CacheRecord(versions, timestamp, buckets)


def _parse_bucket(value: Any) -> Bucket:
    tokens = value.get("tokens") if isinstance(value, dict) else None
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 < tokens <= _MAX_TOKENS:
        raise _make_error("tokens that are not a number of tokens")
    outcomes = tuple(_parse_outcome(item) for item in _get_list(value, "outcomes", _MAX_OUTCOMES))
    if len({o.pair for o in outcomes}) != len(outcomes):
        raise _make_error("one pairing twice")
    return Bucket(tokens, _parse_pair(value, "default"), outcomes)


def _parse_outcome(value: Any) -> TimedOutcome:
    pair = _parse_pair(value, "pair")
    mode, why, rough = value.get("mode"), value.get("why"), value.get("rough")
    if mode not in _MODES or not _is_line(why) or not isinstance(rough, bool):
        raise _make_error("an outcome of another form")
    if value.get("us") is None and value.get("ratio") is None:
        if not why:
            raise _make_error("an outcome without a time or a reason")
        return TimedOutcome(pair, rough=rough, mode=mode, why=why)
    us = _parse_positive_number(value, "us", _MAX_US)
    ratio = _parse_positive_number(value, "ratio", _MAX_RATIO)
    noise = 0.0 if value.get("noise") == 0 else _parse_positive_number(value, "noise", _MAX_RATIO)
    return TimedOutcome(pair, us, ratio, noise, rough, mode, why)


def _parse_pair(value: Any, name: str) -> Pair:
    names = _get_list(value, name, 2)
    if len(names) != 2 or not all(_is_line(part) and part for part in names):
        raise _make_error("a pairing that is not two names")
    return names[0], names[1]


def _is_line(value: Any) -> bool:
    """Return whether a value is a short string of printable characters."""
    return isinstance(value, str) and len(value) <= _MAX_CHARACTERS and value.isprintable()


def _parse_positive_number(value: Any, name: str, maximum: float) -> float:
    number = value.get(name) if isinstance(value, dict) else None
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise _make_error(f"{name} that is not a number")
    if not (0 < number <= maximum and math.isfinite(number)):
        raise _make_error(f"{name} out of range")
    return float(number)


def _get_list(value: Any, name: str, maximum: int) -> list[Any]:
    values = value.get(name) if isinstance(value, Mapping) else None
    if not isinstance(values, list) or len(values) > maximum:
        raise _make_error(f"{name} that are not a list of at most {maximum}")
    return values


def _make_error(got: str, need: str = SCHEMA) -> ConfigurationError:
    return ConfigurationError("cached choices", got=got, need=need)
