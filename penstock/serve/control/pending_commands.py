"""Commands to child processes that wait for a reply."""

import asyncio
import os
from collections.abc import Awaitable
from typing import final

from penstock.core.errors import PenstockError
from penstock.serve.control.child import ChildProcess
from penstock.serve.messages import Message

# A message and its descriptors.
Reply = tuple[Message, list[int]]


@final
class PendingCommands:
    """Sends commands and keeps those without a reply, by child, type and key."""

    def __init__(self) -> None:
        self._futures: dict[tuple[ChildProcess, type[Message], int], asyncio.Future[Reply]] = {}

    def send(
        self, child: ChildProcess, command: Message, key: int, descriptors: tuple[int, ...] = ()
    ) -> Awaitable[Reply]:
        """Send a command.

        Args:
            child: The process.
            command: The command.
            key: Identifies it among the commands of its type to this process.
            descriptors: Descriptors that it carries.

        Returns:
            Its reply, once that has come.
        """
        # Sent at the call and not at the await: a child must receive messages in the order of events.
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._futures[child, type(command), key] = future
        child.send(command, descriptors)
        return future

    def resolve(
        self, child: ChildProcess, kind: type[Message], key: int, reply: Message, descriptors: list[int]
    ) -> bool:
        """Give a command its reply; close the descriptors if it does not wait any more.

        Args:
            child: The process.
            kind: Type of the command.
            key: Its key.
            reply: The reply.
            descriptors: Descriptors of the reply.

        Returns:
            Whether the command still waits.
        """
        future = self.take(child, kind, key)
        if future is not None and not future.done():
            future.set_result((reply, descriptors))
            return True
        for descriptor in descriptors:
            os.close(descriptor)
        return False

    def fail(self, child: ChildProcess, kind: type[Message], key: int, error: PenstockError) -> bool:
        """Fail a command, unless it does not wait any more.

        Args:
            child: The process.
            kind: Type of the command.
            key: Its key.
            error: Raised where its reply is awaited.

        Returns:
            Whether it had no reply yet.
        """
        future = self.take(child, kind, key)
        if future is not None and not future.done():
            future.set_exception(error)
        return future is not None

    def take(self, child: ChildProcess, kind: type[Message], key: int) -> asyncio.Future[Reply] | None:
        """Remove a command.

        Args:
            child: The process.
            kind: Type of the command.
            key: Its key.

        Returns:
            The future of its reply, which is done if the command does not wait any more; None without such a command.
        """
        return self._futures.pop((child, kind, key), None)

    def take_all(self, child: ChildProcess) -> list[tuple[type[Message], int, asyncio.Future[Reply]]]:
        """Remove all commands to a process; returns the type, the key and the future of each that still waits."""
        taken = [(*entry[1:], self._futures.pop(entry)) for entry in list(self._futures) if entry[0] is child]
        return [(kind, key, future) for kind, key, future in taken if not future.done()]
