"""What a plan says of schedules that have no closed forms."""

import pytest

from minipar.cost.layout import parse_layout


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pp4-dualpipe-dp2", "is dualpipe-v with twice the dp on half the pp; use that"),
        ("dp8-pp8-chimera", "twice the dp of a V on half the pp"),
        ("pp4-hanayo:2", "hanayo has no closed form, and is not planned; use interleaved"),
        ("pp4-v-half", "use zb-v"),
        ("pp4-v-min", "use zb-v"),
    ],
)
def test_a_schedule_without_closed_forms_says_what_to_plan(text, says):
    with pytest.raises(ValueError, match=says):
        parse_layout(text)
