"""Without Ray: the handling of documents on which workers end, and batches on their way to a worker."""

import pytest
import torch

import attnmech as am
from attnmech.batch import Batch
from attnmech.distributed.pool import divided
from attnmech.distributed.worker import Piece


def pieces_of(*counts: int) -> list[Piece]:
    found, first = [], 0
    for count in counts:
        ids = torch.arange(first, first + count)[:, None].repeat(1, 3)
        batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), (("a", "b", "c"),) * count, None)
        found.append(Piece.of(batch, ids[:, 0]))
        first += count
    return found


@pytest.mark.parametrize("counts", [(1,), (2,), (16, 7, 31), (256,), (1, 1, 1)])
def test_one_bad_document_is_found_after_few_deaths(counts: tuple[int, ...]) -> None:
    total = sum(counts)
    for bad in {0, total // 2, total - 1}:
        waiting, finished, left_out, ended = [(pieces_of(*counts), 0)], [], [], 0
        while waiting:
            pieces, deaths = waiting.pop()
            numbers = [number for piece in pieces for number in piece.documents.tolist()]
            assert all(torch.equal(piece.batch.ids[:, 0], piece.documents) for piece in pieces)
            if bad not in numbers:
                finished += numbers
                continue
            ended += 1
            again, lost = divided(pieces, deaths + 1)
            waiting += [(each, deaths + 1) for each in again]
            left_out += lost
        assert left_out == [bad] and sorted([*finished, bad]) == list(range(total))
        assert ended <= 5


def test_a_first_death_suspects_nobody() -> None:
    pieces = pieces_of(4, 5)
    assert divided(pieces, 1) == ([pieces], ())


def test_a_piece_is_the_batch_that_its_model_makes() -> None:
    model = am.load()
    batch = model.encode(["Anna sang of shells.", "Tom lost his old anchor."])
    there = Piece.of(batch, torch.tensor([4, 9]))
    assert there.batch.texts_of is None
    again = there.on(model)
    assert torch.equal(again.ids, batch.ids) and again.tokens == batch.tokens
    assert again.texts_of is not None and again.texts_of([5, 6]) == model.encoder.token_texts([5, 6])
