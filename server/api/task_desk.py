"""Answers polls together: a thousand agents that a new round wakes cost a few reads of the database, not one each."""

import asyncio
from collections.abc import Sequence

from fastapi.concurrency import run_in_threadpool

from server.service import tasks
from server.service.context import Context, Identity

_Asking = list[tuple[Identity, asyncio.Future[tasks.Told]]]


class TaskDesk:
    """Looks up tasks, for one federation in one thread at a time. For use in the event loop only.

    Clients that ask while a lookup is under way share the next one.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._asking: dict[int, _Asking] = {}  # by federation, while a lookup for it is under way
        self._lookups: set[asyncio.Task[None]] = set()  # the event loop itself keeps weak references only

    async def ask(self, identity: Identity) -> tasks.Told:
        """Return what the client should do now; raise if its access has ended."""
        federation_id = identity.federation_id
        is_busy = federation_id in self._asking
        if not is_busy and (known := tasks.answer_at_once(self._ctx, identity)) is not None:
            return known
        answer: asyncio.Future[tasks.Told] = asyncio.get_running_loop().create_future()
        self._asking.setdefault(federation_id, []).append((identity, answer))
        if not is_busy:
            lookup = asyncio.create_task(self._look_up(federation_id))
            self._lookups.add(lookup)
            lookup.add_done_callback(self._lookups.discard)
        return await answer

    async def _look_up(self, federation_id: int) -> None:
        while asking := self._asking[federation_id]:
            self._asking[federation_id] = []
            found: Sequence[tasks.Told | Exception]
            try:
                identities = [identity for identity, _ in asking]
                found = await run_in_threadpool(tasks.answers, self._ctx, identities)
            except Exception as error:
                found = [error] * len(asking)
            for (_, future), answer in zip(asking, found, strict=True):
                if future.done():  # the caller has hung up
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
        del self._asking[federation_id]
