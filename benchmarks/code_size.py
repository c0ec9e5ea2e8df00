"""Size of the code: files, lines, functions, the largest folders, and the number of floors of imports in a folder.

    python -m benchmarks.code_size [--ref COMMIT]

Floors: a file that does not import other files of its folder is on floor 1; a file that imports a file of floor n is on
floor n + 1 or higher. Names: number of uses of vague identifiers (VAGUE). Words: places in docstrings, comments and
other strings that match a pattern of RULES, for the rules of language in CONTRIBUTING.md. The patterns have false hits,
such as "where" for a place, and miss places: this is a figure, not a test.
"""

import ast
import io
import re
import subprocess
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import PurePosixPath
from statistics import median

from benchmarks.common import make_parser

PACKAGES = ("schemas", "cache", "stages", "trainer")
VAGUE = {"found", "each", "own", "one", "it", "said", "place", "got"}
#: Rule -> pattern of the places that may break it.
RULES = {
    "1, where for if": r"\b[wW]here (?!to\b|is\b|are\b)[a-z`]",
    "2, pronouns": r"\b(those|that) of\b|\bothers\b|\b(the|all|any) other\b(?! \w)|\bones? that\b"
    r"|\b[wW]hat (?!\w+ means\b)[a-z]+",
    "3, elliptic parameters": r"(?:^|[\n.;(] ?)\s*`?[a-z_]+`?: (of|that|as|by|whose|where|with which|in which)\b",
    "4, is no": r"\b(is|are|was|were|be) no\b(?! longer)",
    "5, beside": r"\b([bB]eside|apart|[mM]eanwhile|[lL]ikewise)\b",
    "6, aside, go on, is there": r"\baside\b|\b(go|goes|going|went|gone) on\b|\b(is|are|was|were) there\b",
    "7, as for a reason": r", as (it|they|the|this|that|no|there|its|each|one|a|an|other|nothing|all|these|those|some|"
    r"both|only|every)\b",
    "8, Of first": r"(?:^|[.:;] )\s*Of [a-z]|\"\"\"Of [a-z]",
    "9, says, knows": r"\b(says|said|tells|told|knows|knew|asks)\b",
}


def read_tree(ref: str) -> dict[str, str]:
    """Path -> text of every Python file of the packages and the tests at `ref`."""
    listed = subprocess.run(["git", "ls-tree", "-r", "--name-only", ref], capture_output=True, text=True, check=True)
    paths = [path for path in listed.stdout.split("\n") if path.endswith(".py")]
    paths = [path for path in paths if path.split("/")[0] in (*PACKAGES, "tests")]
    requests = "".join(f"{ref}:{path}\n" for path in paths).encode()
    answer = subprocess.run(["git", "cat-file", "--batch"], input=requests, capture_output=True, check=True).stdout
    texts, start = {}, 0
    for path in paths:
        header, start = answer[start:].split(b"\n", 1)[0], answer.index(b"\n", start) + 1
        size = int(header.split()[-1])
        texts[path] = answer[start : start + size].decode()
        start += size + 1
    return texts


def function_lengths(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def count_floors(folder: str, trees: dict[str, ast.Module]) -> int:
    """The number of floors of imports among the files of a folder, without its subfolders."""
    package = folder.replace("/", ".")
    files = {
        PurePosixPath(path).stem: tree for path, tree in trees.items() if str(PurePosixPath(path).parent) == folder
    }
    imports: dict[str, set[str]] = defaultdict(set)
    for name, tree in files.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                parts = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                imports[name] |= {part.removeprefix(f"{package}.") for part in parts} & files.keys() - {name}

    @cache
    def floor(name: str) -> int:
        return 1 + max((floor(imported) for imported in imports[name]), default=0)

    return max(map(floor, files), default=0)


def vague_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of vague names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in VAGUE:
            yield node.lineno, node.id


def count_words(text: str) -> Counter[str]:
    """Hits of each rule in the docstrings, comments and other strings of a file."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    words = "\n".join(token.string for token in tokens if token.type in (tokenize.STRING, tokenize.COMMENT))
    return Counter({rule: len(re.findall(pattern, words)) for rule, pattern in RULES.items()})


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--ref", default="HEAD", help="commit that is counted")
    texts = read_tree(parser.parse_args().ref)
    source = {path: text for path, text in texts.items() if path.split("/")[0] in PACKAGES}
    trees = {path: ast.parse(text) for path, text in source.items()}
    lengths = [length for tree in trees.values() for length in function_lengths(tree)]
    folders: dict[str, int] = defaultdict(int)
    for path in source:
        folders[str(PurePosixPath(path).parent)] += 1
    floors = {folder: count_floors(folder, trees) for folder in folders}
    words = sum(map(count_words, source.values()), Counter[str]())
    rows = {
        "files of source": len(source),
        "lines of source": sum(text.count("\n") for text in source.values()),
        **{
            f"lines of {name}/": sum(t.count("\n") for p, t in source.items() if p.startswith(f"{name}/"))
            for name in PACKAGES
        },
        "longest file": max((text.count("\n"), path) for path, text in source.items()),
        "functions": len(lengths),
        "median length of functions": median(lengths),
        "longest function": max(lengths),
        "largest folders": sorted(((count, folder) for folder, count in folders.items()), reverse=True)[:4],
        "most floors": sorted(((count, folder) for folder, count in floors.items()), reverse=True)[:4],
        "vague names": sum(len([*vague_names(tree)]) for tree in trees.values()),
        **{f"words: rule {rule}": words[rule] for rule in RULES},
        "files of tests": sum(path.startswith("tests/") for path in texts),
        "lines of tests": sum(text.count("\n") for path, text in texts.items() if path.startswith("tests/")),
    }
    print("| figure | count |\n|---|---|")
    for name, count in rows.items():
        cell = ", ".join(f"{name}: {number}" for number, name in count) if isinstance(count, list) else count
        print(f"| {name} | {f'{count[1]}: {count[0]}' if isinstance(count, tuple) else cell} |")


if __name__ == "__main__":
    main()
