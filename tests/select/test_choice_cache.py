"""The cache of measurements: shared by processes, written atomically, and validated when read."""

import json
import os
import threading
from pathlib import Path

import pytest

from modular_kernel.errors import ConfigurationError
from modular_kernel.select import cache_file
from modular_kernel.select.cache import NO_CACHE_FOLDER, Cache, CacheLookup
from modular_kernel.select.selection import Bucket, TimedOutcome

IDENTITY = {"device": "D", "problem": "P"}
VERSIONS = {"torch": "1", "parts": "x"}
PAIR = ("PrepareX", "ExpertsY")
OTHER_PAIR = ("PrepareX", "ExpertsZ")
BUCKET = Bucket(
    4,
    PAIR,
    (
        TimedOutcome(PAIR, 12.5, 1.0, mode="cpu"),
        TimedOutcome(OTHER_PAIR, 10.0, 0.8, 0.01, rough=True, mode="cpu"),
        TimedOutcome(("Z", "Z"), why="it failed"),
    ),
)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path, IDENTITY, VERSIONS)


def save_valid_content(cache: Cache) -> dict:
    cache.save([BUCKET])
    return json.loads(cache.path.read_text())


def test_saved_buckets_are_loaded(cache: Cache) -> None:
    assert cache.load().record is None
    assert cache.load().notes == ()
    assert cache.save([BUCKET]) == ()
    lookup = cache.load()
    assert lookup.notes == ()
    assert lookup.record is not None
    assert lookup.record.buckets == (BUCKET,)


def test_later_buckets_are_merged(cache: Cache) -> None:
    cache.save([BUCKET])
    newer_bucket = Bucket(4, PAIR, (TimedOutcome(PAIR, 9.0, 1.0, mode="cpu"),))
    bucket_of_2 = Bucket(2, PAIR, BUCKET.outcomes)
    cache.save([newer_bucket, bucket_of_2])
    record = cache.load().record
    assert record is not None
    assert record.buckets == (bucket_of_2, newer_bucket)


def test_other_versions_are_noted_and_kept(cache: Cache, tmp_path: Path) -> None:
    cache.save([BUCKET])
    newer = Cache(tmp_path, IDENTITY, VERSIONS | {"torch": "2"})
    lookup = newer.load()
    assert lookup.record is None
    assert lookup.notes == ("ignoring cached timings: torch 1 -> 2",)
    newer.save([BUCKET])
    assert newer.load().record is not None
    assert cache.load().record is not None


def test_oldest_versions_are_dropped(tmp_path: Path) -> None:
    for number in range(12):
        Cache(tmp_path, IDENTITY, {"torch": str(number)}).save([BUCKET])
    records = [Cache(tmp_path, IDENTITY, {"torch": str(n)}).load().record for n in range(12)]
    assert [record is not None for record in records] == [False] * 4 + [True] * 8


def make_edit(path: str, value: object):
    """Return a function that sets an entry of a file. path: for example, "records.0.made"."""

    def edit(content: dict) -> None:
        *parents, last = path.split(".")
        container: object = content
        for step in parents:
            container = container[int(step)] if isinstance(container, list) else container[step]  # type: ignore[index]
        container[int(last) if isinstance(container, list) else last] = value  # type: ignore[index]

    return edit


OUTCOME = "records.0.buckets.0.outcomes.0"
FORGED_ENTRIES = [
    ("schema", "mk-choices/1"),
    ("identity", {"device": "another"}),
    ("records", {}),
    ("records", [1]),
    ("records", [{}] * 9),
    ("records.0.made", "now"),
    ("records.0.made", -1),
    ("records.0.versions", []),
    ("records.0.versions", {"torch": 2}),
    ("records.0.versions", {"torch": "\x1b[2J"}),
    ("records.0.buckets", None),
    ("records.0.buckets.0", 7),
    ("records.0.buckets.0.tokens", True),
    ("records.0.buckets.0.tokens", 4.0),
    ("records.0.buckets.0.tokens", 0),
    ("records.0.buckets.0.tokens", 1 << 60),
    (f"{OUTCOME}.pair", ["A"]),
    (f"{OUTCOME}.pair", ["A", 1]),
    (f"{OUTCOME}.pair", ["A", "B" * 500]),
    (f"{OUTCOME}.pair", ["A", "\x1b]0;owned\x07"]),
    (f"{OUTCOME}.pair", ["Z", "Z"]),
    (f"{OUTCOME}.us", 0),
    (f"{OUTCOME}.us", -1.0),
    (f"{OUTCOME}.us", True),
    (f"{OUTCOME}.us", "1"),
    (f"{OUTCOME}.us", 1e300),
    (f"{OUTCOME}.us", None),
    ("records.0.buckets.0.default", ["A"]),
    ("records.0.buckets.0.default", None),
    (f"{OUTCOME}.ratio", None),
    (f"{OUTCOME}.ratio", 0),
    (f"{OUTCOME}.ratio", 1e300),
    (f"{OUTCOME}.noise", -0.1),
    (f"{OUTCOME}.noise", None),
    (f"{OUTCOME}.mode", "gpu"),
    (f"{OUTCOME}.rough", 1),
    (f"{OUTCOME}.why", "\x1b[31m"),
]


@pytest.mark.parametrize(("path", "value"), FORGED_ENTRIES, ids=lambda v: str(v)[:40])
def test_a_forged_entry_is_refused_and_the_file_rebuilt(
    cache: Cache, path: str, value: object
) -> None:
    content = save_valid_content(cache)
    make_edit(path, value)(content)
    cache.path.write_text(json.dumps(content))
    lookup = cache.load()
    assert lookup.record is None
    (note,) = lookup.notes
    assert "will be replaced" in note
    assert note.isprintable()
    assert cache.save([BUCKET]) == ()
    assert cache.load().record is not None


CORRUPT_CONTENTS = {
    "empty": b"",
    "half": b'{"schema": "mk-choices/2", "iden',
    "not utf-8": b"\xff\xfe\x00",
    "nan": b'{"schema": NaN}',
    "a duplicate key": b'{"schema": 1, "schema": "mk-choices/2"}',
    "deep": b"[" * 100_000,
    "long number": b"[" + b"9" * 10_000 + b"]",
    "large": b" " * (cache_file.MAX_BYTES + 1),
    "pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
}


@pytest.mark.parametrize("content", CORRUPT_CONTENTS.values(), ids=CORRUPT_CONTENTS.keys())
def test_a_corrupt_file_is_refused_and_rebuilt(cache: Cache, content: bytes) -> None:
    save_valid_content(cache)
    cache.path.write_bytes(content)
    lookup = cache.load()
    assert lookup.record is None
    assert len(lookup.notes) == 1
    cache.save([BUCKET])
    assert cache.load().record is not None


def test_links_and_special_files_are_not_read(cache: Cache, tmp_path: Path) -> None:
    save_valid_content(cache)
    link_target = tmp_path / "elsewhere.json"
    cache.path.rename(link_target)
    cache.path.symlink_to(link_target)
    assert cache.load().record is None
    assert "a link" in cache.load().notes[0]
    cache.save([BUCKET])  # replaces the link and leaves its target unchanged
    assert not cache.path.is_symlink()
    cache.path.unlink()
    os.mkfifo(cache.path)  # opening a FIFO to read would wait for a writer
    assert "not a regular file" in cache.load().notes[0]
    cache.path.unlink()
    cache.path.mkdir()
    assert cache.load().record is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_a_note(cache: Cache, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    (note,) = cache.save([BUCKET])
    tmp_path.chmod(0o700)
    assert note.startswith("not cached: ")


def test_file_permissions_follow_the_umask(cache: Cache) -> None:
    umask_before = os.umask(0o027)
    try:
        save_valid_content(cache)
        assert cache.path.stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(umask_before)


def test_missing_folder_is_one_note() -> None:
    uncached = Cache(None, IDENTITY, VERSIONS)
    assert uncached.save([BUCKET]) == ()
    assert uncached.load() == CacheLookup(None, (NO_CACHE_FOLDER,))
    with uncached.lock(wait_s=0) as is_held:
        assert is_held


def test_a_file_where_the_folder_should_be_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (note,) = Cache(tmp_path / "file", IDENTITY, VERSIONS).save([BUCKET])
    assert note.startswith("not cached: ")


def test_lock_is_exclusive(cache: Cache) -> None:
    acquired: list[bool] = []

    def try_to_lock() -> None:
        with cache.lock(wait_s=0.1) as is_held:
            acquired.append(is_held)

    with cache.lock(wait_s=0) as is_held:
        assert is_held
        thread = threading.Thread(target=try_to_lock)
        thread.start()
        thread.join()
    try_to_lock()
    assert acquired == [False, True]


def test_written_files_do_not_exceed_the_size_limit(cache: Cache) -> None:
    outcomes = tuple(TimedOutcome((f"P{n}" * 20, "E" * 60), why="w" * 300) for n in range(30))
    cache.save([Bucket(tokens, outcomes[0].pair, outcomes) for tokens in range(1, 120)])
    assert cache.path.stat().st_size <= cache_file.MAX_BYTES
    record = cache.load().record
    assert record is not None
    assert record.buckets[-1].tokens == 119


def test_format_errors_are_typed() -> None:
    with pytest.raises(ConfigurationError, match="cached choices"):
        cache_file.from_text("{}", IDENTITY)
