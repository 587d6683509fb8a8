"""The cache of what all clients of a federation are told."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from server.service.answer_cache import AnswerCache


def test_a_value_is_computed_once_per_stage() -> None:
    cache, computed = AnswerCache(), []

    def compute() -> int:
        computed.append(1)
        return len(computed)

    assert [cache.get("pets", stage, compute) for stage in (1, 1, 2, 2, 1)] == [1, 1, 2, 2, 3]


def test_keys_do_not_affect_each_other() -> None:
    cache = AnswerCache()
    assert cache.get("pets", 1, lambda: "a") == "a"
    assert cache.get("cars", 1, lambda: "b") == "b"
    assert cache.get("pets", 1, lambda: "c") == "a"


def test_the_least_recently_used_key_is_forgotten() -> None:
    cache = AnswerCache(max_keys=2)
    for key in ("pets", "cars", "pets", "birds"):
        cache.get(key, 1, lambda: "old")
    assert [cache.get(key, 1, lambda: "new") for key in ("pets", "birds")] == ["old", "old"]
    assert cache.get("cars", 1, lambda: "new") == "new"


def test_an_error_is_not_kept() -> None:
    cache = AnswerCache()
    with pytest.raises(ZeroDivisionError):
        cache.get("pets", 1, lambda: 1 // 0)
    assert cache.get("pets", 1, lambda: "works again") == "works again"


def test_callers_share_a_computation_under_way() -> None:
    cache, computed, may_end = AnswerCache(), [], threading.Event()

    def compute() -> str:
        computed.append(1)
        may_end.wait(60)
        return "shared"

    with ThreadPoolExecutor(8) as pool:
        callers = [pool.submit(cache.get, "pets", 1, compute) for _ in range(8)]
        other = pool.submit(AnswerCache().get, "pets", 1, lambda: "not waiting")
        may_end.set()
        assert {caller.result(60) for caller in callers} == {"shared"}
        assert other.result(60) == "not waiting"
    assert computed == [1]


def test_a_slow_computation_delays_no_other_key() -> None:
    cache, begun, may_end = AnswerCache(), threading.Event(), threading.Event()

    def compute() -> str:
        begun.set()
        may_end.wait(60)
        return "slow"

    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(cache.get, "pets", 1, compute)
        assert begun.wait(60)
        assert cache.get("cars", 1, lambda: "fast") == "fast"
        may_end.set()
        assert slow.result(60) == "slow"
