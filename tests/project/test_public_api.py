"""The public API equals the record in tests/helpers/public_api.txt."""

from difflib import unified_diff

from public_api import RECORD, surface


def test_public_api_equals_the_record() -> None:
    """If the change is intended, update CHANGELOG.md and run `python
    tests/helpers/public_api.py`.
    """
    recorded = RECORD.read_text(encoding="utf-8").splitlines()
    changed = list(unified_diff(recorded, surface(), "recorded", "now", lineterm="", n=0))
    assert not changed, "\n".join(changed)
