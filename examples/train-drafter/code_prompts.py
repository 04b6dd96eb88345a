"""Turn short programming problems into prompts to complete a function: its head, what it does, and examples.

    python code_prompts.py mbpp.jsonl code.jsonl

Reads JSON Lines with `text`, `code` and `test_list` (as MBPP has them) and writes, for each problem whose tests are
plain comparisons, one prompt in each of three styles.
"""

import json
import re
import sys
from pathlib import Path

REQUEST = "Write a solution to the following problem and make sure it passes the tests:\n```python\n"
HEAD = re.compile(r"^def\s+(\w+)\s*\(([^\n]*)\)\s*:", re.M)
REQUEST_WORDS = re.compile(r"^Write (a|the) (python )?(function|program)( to| that)?\s*", re.I)
COMPARISON = re.compile(r"assert\s+(.*?)\s*==\s*(.*)$")
EXAMPLES = 2


def stubs(row: dict) -> list[str]:
    """A function's head and docstring in every style; none where the row has no such function or tests."""
    head = HEAD.search(row["code"])
    pairs = [match.groups() for test in row["test_list"] if (match := COMPARISON.match(test.strip()))]
    if head is None or len(pairs) < EXAMPLES or any("\n" in part for pair in pairs for part in pair):
        return []
    call = f"def {head[1]}({', '.join(part.strip() for part in head[2].split(','))}):"
    task = REQUEST_WORDS.sub("", row["text"].strip())
    task = task[:1].upper() + task[1:]
    prompted = [line for given, result in pairs[:EXAMPLES] for line in (f"    >>> {given}", f"    {result}")]
    compared = [f"    {given} == {result}" for given, result in pairs[:EXAMPLES]]
    told = [f"    {given} ➞ {result}" for given, result in pairs[:EXAMPLES]]
    return [
        "\n".join(["", "", call, f'    """ {task}', *prompted]),
        "\n".join(["", call, '    """', f"    {task}", "", "    Examples:", *compared]),
        "\n".join(["", call, f'    """{task}', "    For example:", *told]),
    ]


def main(source: Path, target: Path) -> None:
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
    turns = [f'{REQUEST}{stub}\n    """\n\n```' for row in rows for stub in stubs(row)]
    target.write_text("".join(json.dumps({"turns": [turn]}) + "\n" for turn in turns), encoding="utf-8")
    print(f"{len(turns)} prompts from {len(rows)} problems")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
