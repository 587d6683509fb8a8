"""Thread limits."""

import threading

import torch

from client_agent.threads import limit_threads


def test_each_thread_keeps_its_own_limit_whatever_others_set_later() -> None:
    before, found = torch.get_num_threads(), {}
    both_set = threading.Barrier(2)

    def compute(count: int) -> None:
        limit_threads(count)
        both_set.wait(30)
        torch.ones(4, 4) @ torch.ones(4, 4)
        found[count] = torch.get_num_threads()

    threads = [threading.Thread(target=compute, args=(count,)) for count in (1, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {1: 1, 3: 3}
    assert torch.get_num_threads() == before
    torch.set_num_threads(before)  # new threads start with what was set last
