import pytest

from minipar.simple.grad_norm import grad_norm
from minipar.simple.zero import Zero1
from minipar.visualize.source import source, source_text


def test_source_is_highlighted_and_linked_to_its_first_line():
    text = source_text(grad_norm)
    where, _, code = text.partition("\n\n")
    assert where.startswith("[`minipar/simple/grad_norm.py`](../minipar/simple/grad_norm.py), from line ")
    assert code.startswith("```python\ndef grad_norm(comm, grads, copies):\n    ")
    assert code.endswith("\n```")


def test_a_decorated_function_is_linked_to_its_own_file():
    assert source_text(Zero1.step).startswith(
        "[`minipar/simple/zero.py`](../minipar/simple/zero.py), from line "
    )


def test_methods_are_dedented_and_several_follow_each_other():
    class Here:
        def method(self):
            return 1

    def function():
        return 2

    text = source(Here.method, function).data
    assert "\ndef method(self):\n    return 1\n```" in text
    assert text.index("def method") < text.index("def function")


def test_what_has_no_source_is_refused():
    with pytest.raises(TypeError):
        source_text(len)
