"""The cards: ten of ten lessons or a lesson's own, fresh numbers or a seed's, judged as numbers."""

import json

import pytest

from minipar.cli import _parse
from minipar.learn.exercises.cards import ask, draw_cards, judged, printed, question_text
from minipar.learn.exercises.problems import LESSONS, PROBLEMS


def test_ten_cards_are_fresh_each_time_and_fixed_by_a_seed():
    assert len(draw_cards(1)) == 10
    assert draw_cards(7) == draw_cards(7)
    assert len({question_text(1, card) for seed in range(20) for card in draw_cards(seed)}) > 100
    assert draw_cards() != draw_cards()


def test_a_question_has_lines_of_at_most_100_characters():
    questions = [question_text(10, card) for seed in range(20) for card in draw_cards(seed)]
    assert max(len(line) for text in questions for line in text.splitlines()) == 100


def test_a_lesson_has_its_own_three():
    for lesson in LESSONS:
        assert len(draw_cards(0, lesson)) == 3
    assert draw_cards(4, "6") == draw_cards(4, "06") != draw_cards(4, "07")
    with pytest.raises(ValueError, match="lesson=99 is unknown"):
        draw_cards(0, "99")


def test_the_command_gives_the_cards_of_a_lesson(capsys):
    _parse(["exercise", "cards", "06", "--seed", "4", "--json"])()
    cards = json.loads(capsys.readouterr().out)
    assert [card["question"] for card in cards] == [card.question for card in draw_cards(4, "06")]


def test_every_problem_is_drawn_sooner_or_later():
    starts = {card.question[:15] for seed in range(60) for card in draw_cards(seed)}
    assert len(starts) > 0.6 * len(PROBLEMS)


def test_an_answer_by_hand_may_be_rounded_but_not_wrong():
    card = next(card for card in draw_cards(3) if card.within)
    assert judged(card, f"{card.answer * 1.02}") is True
    assert judged(card, f" {card.answer:,.6f} ") is True
    assert judged(card, f"{card.answer * 1.2}") is False
    assert judged(card, "") is judged(card, "many") is None


def test_cards_are_asked_in_turn_with_the_answer_after_each():
    cards, shown = draw_cards(5), []
    answers = iter([str(cards[0].answer), "1e15", *[""] * 8])
    assert ask(cards, lambda prompt: next(answers), shown.append) == 1
    assert "Right." in shown[1]
    assert "No." in shown[3]
    assert cards[9].worked[-1] in shown[-1]


def test_on_paper_all_answers_come_after_all_questions():
    cards = draw_cards(5)
    questions, _, answers = printed(cards).partition("\nAnswers\n")
    assert all(card.worked[-1] not in questions and card.worked[-1] in answers for card in cards)
