"""Tensors that many threads want at once are loaded once, within a memory limit."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from server.service.tensor_cache import TensorCache
from shared.tensors.names import Tensors

VALUE: Tensors = {"weights": torch.zeros(4)}


def test_concurrent_callers_share_one_load() -> None:
    loads, cache = [], TensorCache(max_bytes=100)
    loading, release = threading.Event(), threading.Event()

    def load() -> Tensors:
        loads.append(threading.get_ident())
        loading.set()
        assert release.wait(60)
        return dict(VALUE)

    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(cache.get, "a", 16, load)
        assert loading.wait(60)
        others = [pool.submit(cache.get, "a", 16, load) for _ in range(7)]
        release.set()
        assert all(other.result(60) is first.result(60) for other in others)
    assert len(loads) == 1


def test_a_load_that_failed_is_tried_again() -> None:
    cache = TensorCache(max_bytes=100)

    def fail() -> Tensors:
        raise OSError("away")

    for _ in range(2):
        with pytest.raises(OSError, match="away"):
            cache.get("a", 16, fail)
    assert cache.get("a", 16, lambda: VALUE) is VALUE


def test_what_was_not_used_for_the_longest_time_makes_room() -> None:
    loads, cache = [], TensorCache(max_bytes=32)

    def ask(key: str, size: int = 16) -> None:
        cache.get(key, size, lambda: loads.append(key) or VALUE)

    for key in ("a", "b", "a", "c", "a", "b"):
        ask(key)
    assert loads == ["a", "b", "c", "b"]
    ask("huge", 1000)  # kept alone
    ask("huge", 1000)
    ask("a")
    assert loads[4:] == ["huge", "a"]


def test_loads_that_would_not_fit_together_take_turns() -> None:
    cache, under_way, most = TensorCache(max_bytes=32), 0, 0
    lock, started = threading.Lock(), threading.Barrier(4)

    def load() -> Tensors:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        value = {"weights": torch.zeros(10**6)}
        with lock:
            under_way -= 1
        return value

    def ask(number: int) -> None:
        started.wait()
        cache.get(number, 20, load)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(4)))
    assert most == 1
