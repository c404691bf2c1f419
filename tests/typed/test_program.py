"""The program that the type checker reads also runs."""

from tests.typed import program


def test_the_typed_program_runs() -> None:
    program.main()
