"""The page of mutation scores, from the records of `mk test --mutate PART --save`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modular_kernel.errors import ConfigurationError
from modular_kernel.report.pages.document import Block, Code, Document, Heading, Items, Table, Text

Record = dict[str, Any]

_NUMERIC = frozenset({"mutants", "executed", "put in", "killed", "equivalent", "survived", "score"})


def read_scores(folder: Path) -> tuple[Record, ...]:
    """Read the scores from every *.json in `folder`, sorted by the name of the part.

    Raises ConfigurationError for a file that is not a mutation score.
    """
    return tuple(_read(path) for path in sorted(folder.glob("*.json")))


def mutation_document(
    scores: tuple[Record, ...], defects: Path, notes: Path, parts: Sequence[str] = ()
) -> Document:
    """Build the document: table of scores, survivors of each part, and hand-written defects.

    defects: output file of tools/source_defects.py. notes: JSON file with a note per survivor id,
    and under "scores" and "defects" notes on the measurements. Both files are optional. parts:
    names of all parts; those without a score are listed.
    """
    known = json.loads(notes.read_text(encoding="utf-8")) if notes.is_file() else {}
    return (
        Heading(1, "Mutation scores"),
        Text(
            "How much does `mk test --level full` notice? `mk test --mutate PART` changes the "
            "source of a part, its kernels and the operations it uses, one place at a time and "
            "in memory alone: a mask lost or off by one, a tail, a stride, an offset, an index "
            "of scales, a bias row, a clamp, a constant, the dtype of an accumulator, the order "
            "or the end of a loop, a guard for -1, a step forgotten, two operands exchanged, a "
            "declaration weakened. No unit test takes part, but where a scope of "
            "`tools/mutation_scopes.json` names modules and tests: there `python "
            "tools/mutate_modules.py SCOPE` puts mutants before the tests that execute them, then "
            "before the cases."
        ),
        Text(
            "Every case that executes the changed line is called twice; where a bit differs, the "
            "whole case is proven, and so are a dozen of those in which none does. The first case "
            "that fails kills the mutant. A case that hangs, a crash and a valid case that is "
            "refused count as killed, and are told apart. Cases over ranks run in ranks of their "
            "own, over gloo, where an exchange that a rank stays away from is a hang; some play a "
            "scene in which ranks do not mean one call, and what each is told must be, word for "
            "word, what the scene says. Mutants are drawn by a seed, the release, from those that "
            "some case executes on a CPU, kernels in the interpreter. The score is killed / "
            "(killed + survived)."
        ),
        Text(
            "An equivalent mutant is one reviewed: the compiled code of every kernel that has its "
            "line in it is the same (`--only ID --code`), or no bit differs in at least 2,000 "
            "random problems, drawn from the cases that execute it (`--only ID --bits 2000`). One "
            "such proof may hold for several mutants of unlike places, all in the source at once. "
            "An equivalent mutant is not run again, and not counted. Nor is one run again that "
            "died in the score of another part before a case which is this part's, too."
        ),
        Text(
            "Scores are measured on a CPU. Without a GPU no case of `mk test` checks the values of "
            "Gluon kernels, of TMA copies and of the paths that use them (gemv_tma, grouped_tma, "
            "dequantized, grouped_w4), of kernels in CUTLASS, of launches that overlap (PDL), or "
            "of offsets beyond 32 bits: no case has a tensor of 2^31 elements. These kernels are "
            "compiled for sm_90, and a stand-in or a twin is tested where there is one. "
            "`mk test` says on every machine which paths its cases entered."
        ),
        Table(
            ("part", "mutants", "executed", "put in", "killed", "equivalent", "survived", "score"),
            [_row(score) for score in scores],
            numeric=_NUMERIC,
        ),
        *_missing(scores, parts),
        *_said(known, "scores"),
        *_written(defects, known),
        *(block for score in scores for block in _part(score, known)),
    )


def _missing(scores: tuple[Record, ...], parts: Sequence[str]) -> tuple[Block, ...]:
    """List the parts without a score."""
    measured = {score["part"] for score in scores}
    names = [f"`{name}`" for name in parts if name not in measured]
    if not names:
        return ()
    return (Text(f"**No score yet, {len(names)} of {len(parts)} parts:** {', '.join(names)}."),)


def _said(known: dict[str, str], key: str) -> tuple[Block, ...]:
    return (Text(known[key]),) if key in known else ()


def _written(path: Path, known: dict[str, str]) -> tuple[Block, ...]:
    """Build the section of hand-written defects, with outcomes by level."""
    if not path.is_file():
        return ()
    defects: dict[str, Record] = json.loads(path.read_text(encoding="utf-8"))
    rows, lists = [], []
    for level in ("smoke", "full"):
        outcomes = [record.get(level, "not run") for record in defects.values()]
        killed = sum(outcome.startswith("killed") for outcome in outcomes)
        others = [
            str(outcomes.count(outcome)) for outcome in ("survived", "not executed", "not run")
        ]
        rows.append((level, str(len(outcomes)), str(killed), *others))
    for name, record in defects.items():
        outcome = str(record.get("full", record.get("smoke", "not run")))
        if not outcome.startswith("killed"):
            reason = f": {record['why']}" if "why" in record else ""
            if record.get("tests", "").startswith("killed"):
                reason += f"; {record['tests']}"
            lists.append(f"{outcome}: {name} (`{record['file']}`){reason}")
    return (
        Heading(2, "Defects written by hand"),
        Text(
            "`tools/source_defects.json` lists realistic slips in kernels, operations and parts; "
            "`python tools/source_defects.py LEVEL` puts each in, alone, and runs the cases of "
            "that level which execute it. A defect that smoke kills is not run again: it counts "
            "as killed in both rows."
        ),
        *_said(known, "defects"),
        Table(("level", "defects", "killed", "survived", "not executed", "not run"), rows),
        *_tested([record["tests"] for record in defects.values() if "tests" in record]),
        *((Text("Not killed:"), Items(lists)) if lists else ()),
    )


def _tested(fates: Sequence[str]) -> tuple[Block, ...]:
    """State how many defects that survive the cases are killed by the tests of operations."""
    if not fates:
        return ()
    killed = sum(fate.startswith("killed") for fate in fates)
    subject = f"Of the {len(fates)} that full leaves"
    return (Text(f"{subject}, the tests of operations (`tests/ops/test_ops_*.py`) kill {killed}."),)


def _read(path: Path) -> Record:
    score = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(score, dict) or score.get("part") != path.stem or "survivors" not in score:
        need = f"what `mk test --mutate {path.stem} --save` writes"
        raise ConfigurationError(str(path), got="another form", need=need)
    return score


def _row(score: Record) -> tuple[str, ...]:
    counts = (score["mutants"], score["executed"], score["put_in"], score["killed"])
    others = len(score["equivalent"]), len(score["survivors"])
    share = f"{score['score']:.1%}" if score["put_in"] else "nothing to change"
    return (f"`{score['part']}`", *map(str, (*counts, *others)), share)


def _part(score: Record, known: dict[str, str]) -> tuple[Block, ...]:
    versions = ", ".join(f"{name} {number}" for name, number in score["versions"].items())
    ranks = score.get("world_size", 1)
    on_ranks, per_host = f" over {ranks} ranks" if ranks > 1 else "", score.get("ranks_per_host")
    on_ranks += f", {per_host} on each host" if per_host else ""
    tests = f"{score['tests']} tests, and " if "tests" in score else ""
    about = (
        f"{tests}{score['cases']} cases of {', '.join(score['pairings'])}{on_ranks}, "
        f"level {score['level']}; seed {score['seed']}; {versions}."
    )
    if score.get("shared"):
        about += f" {score['shared']} died before a case of theirs in the score of another part."
    not_executed = sum(score["not_executed"].values())
    excluded = [f"{count}: {reason}" for reason, count in score["apart"].items()]
    if not_executed:
        modules = ", ".join(
            f"`{module}` {count}" for module, count in score["not_executed"].items()
        )
        excluded.append(f"{not_executed}: no case executes them on a CPU. {modules}")
    blocks: list[Block] = [Heading(2, f"`{score['part']}`"), Text(about)]
    if score["killed_by"]:
        blocks.append(Table(("killed by", "mutants"), _counts(score["killed_by"])))
    if excluded:
        blocks += [Text("Listed apart, and not counted:"), Items(excluded)]
    if score["equivalent"]:
        blocks.append(Heading(3, f"Equivalent in `{score['part']}`"))
    for item in score["equivalent"]:
        blocks += [Text(f"{_proof(item)}: {item['reason']}"), _diff(item)]
    if score["survivors"]:
        blocks.append(Heading(3, f"Survivors of `{score['part']}`"))
    for item in score["survivors"]:
        note = known.get(item["id"], "Not looked into yet.")
        bits = f"; a bit differs in {item['differing']}" if "differing" in item else ""
        text = f"{item['cases']} cases pass{bits}. {note} `{item['command']}`"
        blocks += [_diff(item), Text(text)]
    return tuple(blocks)


def _counts(found: dict[str, int]) -> list[tuple[str, str]]:
    return [(name, str(count)) for name, count in found.items()]


def _proof(one: Record) -> str:
    if one["proof"] == "code":
        return f"The same compiled code in {one['forms']} forms of kernels"
    together = f", {one['beside']} others in the source at once" if one["beside"] else ""
    return f"No bit differs in {one['problems']:,} problems{together}"


def _diff(one: Record) -> Code:
    return Code("diff", one["diff"])
