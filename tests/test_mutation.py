"""The mutants of `make mutate`: which places they leave alone, and what ours change."""

from textwrap import dedent

import pytest

pytest.importorskip("cosmic_ray", reason="make mutate installs cosmic-ray")

from tests.mutation import changed_lines, draw, mutants_of, parsed

SOURCE = dedent('''
    """Seven plus 1."""
    Size = int | None
    T = TypeVar("T", bound=int)

    def f(x: int | str, n: "int" = 1) -> int | None:
        """Return 1 + 1."""
        if n > 3:
            raise ValueError(f"{n + 1} is over 3")
        assert n < 3
        x.fill_(n)
        x.size = n
        x += g(n, out=x, op="sum", help="one")
        return n

    class A:
        @overload
        def f(self): ...

        def __repr__(self):
            return "é" + str(1 + 1)

    class Twice(Function):
        @staticmethod
        @once_differentiable
        def backward(ctx, dy):
            return dy
''')


def changes() -> list[tuple[str, str]]:
    return [changed_lines(SOURCE, m.source(SOURCE)) for m in mutants_of("f.py", SOURCE)]


def test_no_mutant_changes_words_types_or_assertions():
    lines = {before for before, _ in changes()}
    assert lines == {
        'def f(x: int | str, n: "int" = 1) -> int | None:', "if n > 3:",
        "x.fill_(n)", "x.size = n", "@once_differentiable", 'x += g(n, out=x, op="sum", help="one")',
    }  # fmt: skip


def test_a_statement_is_deleted_or_loses_a_keyword():
    assert {after for before, after in changes() if before.startswith("x")} == {
        "pass", 'x += g(n, op="sum", help="one")', 'x += g(n, out=x, help="one")',
    }  # fmt: skip


def test_a_larger_sample_extends_a_smaller_one_without_repeats():
    mutants = list(mutants_of("f.py", SOURCE))
    assert draw(mutants, 3, seed=1) == draw(mutants, 100, seed=1)[:3]
    places = [mutant.start for mutant in draw(mutants, 100, seed=1)]
    assert len(places) == len(set(places)) < len(mutants)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "ROOM=nowhere has no code with tests; use one of checkpoint, "),
        ([""], "ROOM= has no code with tests; use one of "),
        (["../comm"], "ROOM=../comm has no code with tests; use one of "),
        (["comm", "--sample", "0"], "SAMPLE=0: at least one mutant must be tried"),
        (["comm", "--sample", "few"], "argument --sample: invalid int value: 'few'"),
    ],
)
def test_a_bad_request_is_refused_in_one_line(monkeypatch, capsys, arguments, says):
    monkeypatch.setattr("sys.argv", ["mutation", *arguments])
    with pytest.raises(SystemExit, match="2"):
        parsed()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"make mutate: {says}")
