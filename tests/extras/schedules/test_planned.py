"""What a plan says of schedules that have no closed forms."""

import pytest

from minipar.cost.layout import parse_layout


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pp4-hanayo:2", "hanayo has no closed form, and is not planned; use interleaved"),
        ("pp4-v-half", "use zb-v"),
        ("pp4-v-min", "use zb-v"),
    ],
)
def test_a_schedule_without_closed_forms_says_what_to_plan(text, says):
    with pytest.raises(ValueError, match=says):
        parse_layout(text)
