from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch

from shared.learning.seeds import RandomStream, seeded


def test_seeded_block_is_repeatable_and_does_not_disturb_the_caller() -> None:
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    with seeded(5, "a"):
        first = torch.rand(3)
    with seeded(5, "a"):
        assert torch.equal(torch.rand(3), first)
    with seeded(5, "b"):
        assert not torch.equal(torch.rand(3), first)
    assert torch.equal(torch.rand(2), expected)


def test_stream_resumes_where_it_stopped_whatever_was_drawn_in_between() -> None:
    with seeded(5, "a"):
        whole = torch.rand(6)
    stream, parts = RandomStream(5, "a"), []
    for number in range(3):
        with stream.drawn():
            parts.append(torch.rand(2))
        torch.rand(7)
        with seeded(number):
            torch.rand(1)
    assert torch.equal(torch.cat(parts), whole)


def test_seeded_blocks_can_be_nested() -> None:
    with seeded(5, "a"):
        whole = torch.rand(2)
    with seeded(5, "a"):
        first = torch.rand(1)
        with seeded(6):
            torch.rand(4)
        second = torch.rand(1)
    assert torch.equal(torch.cat([first, second]), whole)


def test_threads_do_not_draw_from_each_other_s_seeds() -> None:
    threads, rounds = 8, 50
    together = Barrier(threads)

    def draw(number: int) -> list[torch.Tensor]:
        together.wait()
        stream, found = RandomStream(number), []
        for _ in range(rounds):
            with stream.drawn():
                found.append(torch.cat([torch.rand(64) for _ in range(8)]))
        return found

    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(draw, range(threads)))
    for number, parts in enumerate(found):
        with seeded(number):
            assert torch.equal(torch.cat(parts), torch.rand(rounds * 8 * 64))
