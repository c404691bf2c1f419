import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar.context import document_positions, next_tokens, pack_documents
from minipar.model import IGNORE_INDEX


def test_positions_count_from_0_in_every_document():
    assert document_positions([3, 2, 1]).tolist() == [0, 1, 2, 0, 1, 0]
    assert document_positions([]).shape == (0,)


def test_the_last_token_of_a_document_predicts_nothing():
    targets = next_tokens(torch.tensor([5, 6, 7, 8, 9]), torch.tensor([0, 1, 2, 0, 1]))
    assert targets.tolist() == [6, 7, IGNORE_INDEX, 9, IGNORE_INDEX]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 8))
def test_packing_keeps_every_token_and_predicts_none_of_another_document(lengths, seq_len):
    starts = [100 * i for i in range(len(lengths))]
    documents = [torch.arange(start, start + length) for start, length in zip(starts, lengths)]
    tokens, targets, positions = pack_documents(documents, seq_len)
    total = sum(lengths)
    assert tokens.flatten()[:total].equal(torch.cat(documents))
    assert tokens.shape == targets.shape == positions.shape == (-(-total // seq_len), seq_len)
    for row in range(len(tokens)):
        for t in range(seq_len):
            real, follows = row * seq_len + t < total, t + 1 < seq_len and row * seq_len + t + 1 < total
            same_document = real and follows and tokens[row, t + 1] == tokens[row, t] + 1
            assert targets[row, t] == (tokens[row, t + 1] if same_document else IGNORE_INDEX)
            begins = t == 0 or not real or tokens[row, t] != tokens[row, t - 1] + 1
            if real:
                assert positions[row, t] == (0 if begins else positions[row, t - 1] + 1)
