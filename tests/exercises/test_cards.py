"""Problems for pen and paper: fresh numbers, an answer that the worked line ends in, and tolerant of rounding."""

import re

import pytest

from minipar.exercises.cards import ask, draw_cards, judged, printed, question_text


@pytest.mark.parametrize("seed", range(200))
def test_the_worked_line_ends_in_the_answer(seed):
    for card in draw_cards(seed):
        numbers = re.findall(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?", card.worked)
        scale = {"MB": 1e6}.get(card.unit, 1.0)
        assert float(numbers[-1]) / scale == pytest.approx(card.answer, rel=1e-3), card
        assert 0 <= card.answer < 1e9, card


def test_ten_cards_with_fresh_numbers_each_time_and_the_same_for_a_seed():
    assert len(draw_cards(1)) == 10
    assert draw_cards(7) == draw_cards(7)
    assert len({question_text(1, card) for seed in range(20) for card in draw_cards(seed)}) > 100
    assert draw_cards() != draw_cards()


def test_an_answer_by_hand_may_be_rounded_but_not_wrong():
    card = next(card for card in draw_cards(3) if card.within)
    assert judged(card, f"{card.answer * 1.03}") is True
    assert judged(card, f" {card.answer:,.6f} ") is True
    assert judged(card, f"{card.answer * 1.2}") is False
    assert judged(card, "") is judged(card, "many") is None
    exact = next(card for card in draw_cards(3) if not card.within)
    assert judged(exact, str(exact.answer + 1)) is False


def test_the_cards_are_asked_one_after_the_other_with_the_answer_after_each():
    cards, shown = draw_cards(5), []
    answers = iter([str(cards[0].answer), "1e15", *[""] * 8])
    assert ask(cards, lambda prompt: next(answers), shown.append) == 1
    assert "Right. " in shown[1]
    assert "No. " in shown[3]
    assert cards[9].worked in shown[-1]


def test_on_paper_all_answers_come_after_all_questions():
    cards = draw_cards(5)
    questions, _, answers = printed(cards).partition("\nAnswers\n")
    assert all(card.worked not in questions and card.worked in answers for card in cards)
