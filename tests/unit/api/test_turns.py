"""Few submits of one account at a time, in their order; other accounts do not feel them."""

import asyncio

import pytest

from api.turns import AT_A_TIME, Turns


async def test_requests_of_one_account_go_in_order_and_few_at_a_time() -> None:
    turns, order, inside, most = Turns(), [], 0, 0

    async def work(number: int) -> None:
        nonlocal inside, most
        async with turns.turn("acct"):
            inside += 1
            most = max(most, inside)
            order.append(number)
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(work(number) for number in range(20)))
    assert order == list(range(20))
    assert most == AT_A_TIME
    assert turns._lines == {}


async def test_account_with_many_requests_holds_up_no_other() -> None:
    turns, over = Turns(), asyncio.Event()

    async def hold() -> None:
        async with turns.turn("greedy"):
            await over.wait()

    held = [asyncio.create_task(hold()) for _ in range(50)]
    await asyncio.sleep(0)
    async with turns.turn("modest"):
        over.set()
    await asyncio.gather(*held)
    assert turns._lines == {}


async def test_request_that_is_given_up_leaves_the_line() -> None:
    turns, over = Turns(at_a_time=1), asyncio.Event()

    async def hold() -> None:
        async with turns.turn("acct"):
            await over.wait()

    first, second = asyncio.create_task(hold()), asyncio.create_task(hold())
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    over.set()
    await first
    async with turns.turn("acct"):
        pass
    assert turns._lines == {}
