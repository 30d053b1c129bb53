"""The page of mutation scores: what `mk test --mutate PART --save` recorded, part by part."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modular_kernel.errors import ConfigurationError
from modular_kernel.report.pages.document import Block, Code, Document, Heading, Items, Table, Text

Record = dict[str, Any]

_NUMERIC = frozenset({"mutants", "executed", "put in", "killed", "equivalent", "survived", "score"})


def read_scores(folder: Path) -> tuple[Record, ...]:
    """Every *.json in `folder`, by the name of the part; ConfigurationError for one of no score."""
    return tuple(_read(path) for path in sorted(folder.glob("*.json")))


def mutation_document(
    scores: tuple[Record, ...], defects: Path, notes: Path, parts: Sequence[str] = ()
) -> Document:
    """Scores as a table, what survives of each part, and the fates of defects written by hand.

    defects: what tools/source_defects.py writes. notes: what is known of a survivor, by identity,
    and under "scores" and "defects" how these were measured. Neither need be there. parts: every
    part there is; those without a score are named.
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
    """List the parts that have no score."""
    measured = {score["part"] for score in scores}
    names = [f"`{name}`" for name in parts if name not in measured]
    if not names:
        return ()
    return (Text(f"**No score yet, {len(names)} of {len(parts)} parts:** {', '.join(names)}."),)


def _said(known: dict[str, str], key: str) -> tuple[Block, ...]:
    return (Text(known[key]),) if key in known else ()


def _written(path: Path, known: dict[str, str]) -> tuple[Block, ...]:
    """Say what becomes of defects written by hand, by level."""
    if not path.is_file():
        return ()
    found: dict[str, Record] = json.loads(path.read_text(encoding="utf-8"))
    rows, lists = [], []
    for level in ("smoke", "full"):
        fates = [record.get(level, "not run") for record in found.values()]
        killed = sum(fate.startswith("killed") for fate in fates)
        others = [str(fates.count(fate)) for fate in ("survived", "not executed", "not run")]
        rows.append((level, str(len(fates)), str(killed), *others))
    for what, record in found.items():
        fate = str(record.get("full", record.get("smoke", "not run")))
        if not fate.startswith("killed"):
            why = f": {record['why']}" if "why" in record else ""
            if record.get("tests", "").startswith("killed"):
                why += f"; {record['tests']}"
            lists.append(f"{fate}: {what} (`{record['file']}`){why}")
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
        *_tested([record["tests"] for record in found.values() if "tests" in record]),
        *((Text("Not killed:"), Items(lists)) if lists else ()),
    )


def _tested(fates: Sequence[str]) -> tuple[Block, ...]:
    """Say how many of what the cases leave the tests of operations notice."""
    if not fates:
        return ()
    killed = sum(fate.startswith("killed") for fate in fates)
    which = f"Of the {len(fates)} that full leaves"
    return (Text(f"{which}, the tests of operations (`tests/ops/test_ops_*.py`) kill {killed}."),)


def _read(path: Path) -> Record:
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or found.get("part") != path.stem or "survivors" not in found:
        need = f"what `mk test --mutate {path.stem} --save` writes"
        raise ConfigurationError(str(path), got="another form", need=need)
    return found


def _row(score: Record) -> tuple[str, ...]:
    counts = (score["mutants"], score["executed"], score["put_in"], score["killed"])
    lived = len(score["equivalent"]), len(score["survivors"])
    share = f"{score['score']:.1%}" if score["put_in"] else "nothing to change"
    return (f"`{score['part']}`", *map(str, (*counts, *lived)), share)


def _part(score: Record, known: dict[str, str]) -> tuple[Block, ...]:
    versions = ", ".join(f"{name} {number}" for name, number in score["versions"].items())
    ranks = score.get("world_size", 1)
    over, per_host = f" over {ranks} ranks" if ranks > 1 else "", score.get("ranks_per_host")
    over += f", {per_host} on each host" if per_host else ""
    tests = f"{score['tests']} tests, and " if "tests" in score else ""
    about = (
        f"{tests}{score['cases']} cases of {', '.join(score['pairings'])}{over}, "
        f"level {score['level']}; seed {score['seed']}; {versions}."
    )
    if score.get("shared"):
        about += f" {score['shared']} died before a case of theirs in the score of another part."
    idle = sum(score["not_executed"].values())
    apart = [f"{count}: {reason}" for reason, count in score["apart"].items()]
    if idle:
        where = ", ".join(f"`{module}` {count}" for module, count in score["not_executed"].items())
        apart.append(f"{idle}: no case executes them on a CPU. {where}")
    blocks: list[Block] = [Heading(2, f"`{score['part']}`"), Text(about)]
    if score["killed_by"]:
        blocks.append(Table(("killed by", "mutants"), _counts(score["killed_by"])))
    if apart:
        blocks += [Text("Listed apart, and not counted:"), Items(apart)]
    if score["equivalent"]:
        blocks.append(Heading(3, f"Equivalent in `{score['part']}`"))
    for one in score["equivalent"]:
        blocks += [Text(f"{_proof(one)}: {one['reason']}"), _diff(one)]
    if score["survivors"]:
        blocks.append(Heading(3, f"Survivors of `{score['part']}`"))
    for one in score["survivors"]:
        note = known.get(one["id"], "Not looked into yet.")
        bits = f"; a bit differs in {one['differing']}" if "differing" in one else ""
        text = f"{one['cases']} cases pass{bits}. {note} `{one['command']}`"
        blocks += [_diff(one), Text(text)]
    return tuple(blocks)


def _counts(found: dict[str, int]) -> list[tuple[str, str]]:
    return [(name, str(count)) for name, count in found.items()]


def _proof(one: Record) -> str:
    if one["proof"] == "code":
        return f"The same compiled code in {one['forms']} forms of kernels"
    beside = f", {one['beside']} others in the source at once" if one["beside"] else ""
    return f"No bit differs in {one['problems']:,} problems{beside}"


def _diff(one: Record) -> Code:
    return Code("diff", one["diff"])
