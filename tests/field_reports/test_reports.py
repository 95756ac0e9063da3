"""Every report is met by a test that runs, and docs/field_reports.md says which."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "field_reports.md"
# One line for each test, by this process alone.
OPTIONS = ["-q", "-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:xdist"]
NUMBERS = """
B01 B03 B04 B05 B07 B08 B09 B10 B13 B15 B16 B17 B18 B19 B21 B22 B23 B24 B26 B28 B29 B31 B32 B33 B35 B36 B37 B40 B41
B42 B44 B45 B48 B49 B50 B52 B53 B54 B57 B58 B59 B62 B63 B66 B67 B68 B70 B71 B73 B75 B76 B77 B80 B81 B82 B84 B86 B88
B89 B90 B92 B93 B96 B97 B98 B99 B100 B103 B104 B106 B107 B108 B109 B110
"""
REPORTS = NUMBERS.split()


def marked_tests() -> dict[str, set[str]]:
    """For each report the tests that are marked with it, as `file::name` below tests/."""
    tests = defaultdict(set)

    def visit(body, name):
        for node in body:
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{name}::{node.name}")
            elif isinstance(node, ast.FunctionDef):
                for mark in node.decorator_list:
                    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.field_report":
                        for report in mark.args:
                            tests[ast.literal_eval(report)].add(f"{name}::{node.name}")

    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        visit(ast.parse(path.read_text()).body, path.relative_to(ROOT / "tests").as_posix())
    return tests


def test_there_are_74_reports():
    assert len(REPORTS) == len(set(REPORTS)) == 74
    assert set(marked_tests()) == set(REPORTS)


def test_the_page_names_every_report_and_its_tests():
    rows = re.findall(r"^\| (B\d+) \|(.*)\|$", PAGE.read_text(), flags=re.MULTILINE)
    assert [report for report, _ in rows] == REPORTS
    tests = marked_tests()
    for report, row in rows:
        about, source, answer, names = (cell.strip() for cell in row.split("|"))
        assert about and source and answer, report
        assert set(re.findall(r"`([\w/.]+\.py(?:::\w+)+)`", names)) == tests[report], report


def test_pytest_collects_a_test_for_every_report():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests", "-m", "field_report", "--collect-only", *OPTIONS],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    collected = {line.split("[")[0].removeprefix("tests/") for line in done.stdout.splitlines()}
    missing = [report for report, tests in marked_tests().items() if not tests & collected]
    assert not missing
