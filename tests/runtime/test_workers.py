"""Pieces of work that threads share out."""

import threading

import pytest
import torch

from tba.runtime.workers import Workers


def test_results_come_in_the_order_of_the_pieces_whichever_is_done_first():
    second_is_done = threading.Event()

    def compute(piece: int) -> int:
        if piece == 0:
            assert second_is_done.wait(10.0)
        if piece == 1:
            second_is_done.set()
        return piece * piece

    assert list(Workers(2).in_order(compute, range(5))) == [0, 1, 4, 9, 16]


def test_pieces_are_taken_no_sooner_than_workers_are_near_them():
    taken = []

    def pieces():
        for piece in range(10):
            taken.append(piece)
            yield piece

    results = Workers(2).in_order(lambda piece: piece, pieces())
    assert next(results) == 0
    assert taken == [0, 1, 2]  # two at work, and one that waits
    assert list(results) == list(range(1, 10))


def test_each_worker_computes_with_one_thread_and_a_single_piece_with_those_of_the_caller():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        workers = Workers(2)
        assert list(workers.in_order(lambda _: torch.get_num_threads(), range(4))) == [1, 1, 1, 1]
        assert list(workers.in_order(lambda _: torch.get_num_threads(), range(1))) == [2]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_an_error_is_raised_in_the_place_of_its_piece_once_nobody_computes_any_more():
    at_work = []

    def compute(piece: int) -> int:
        at_work.append(piece)
        try:
            return 6 // (1 - piece)
        finally:
            at_work.remove(piece)

    results = Workers(3).in_order(compute, range(8))
    assert next(results) == 6
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert not at_work
