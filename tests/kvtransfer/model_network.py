"""What lies between the two nodes of the model: connections, and the messages under way on them."""

from collections import deque

from pdserve.kvtransfer.channel import Route
from pdserve.kvtransfer.messages import Message
from tests.kvtransfer.model_parts import RECEIVER, SENDER


class ModelNetwork:
    """Moves messages and breaks connections; the model that it is a part of holds them, and has the nodes handle them."""

    alive: set[Route]
    untold: set[tuple[str, Route]]
    wires: dict[tuple[str, Route], deque[tuple[Message, bytes]]]

    def put(self, to: str, route: Route, message: Message, payload: bytes = b"") -> None:
        """Hand a message to the network, which loses it if the connection is gone."""
        if route in self.alive:
            self.wires.setdefault((to, route), deque()).append((message, payload))

    def take(self, to: str, route: Route) -> tuple[Message, bytes]:
        """Remove the oldest message of a way."""
        wire = self.wires[to, route]
        first = wire.popleft()
        if not wire:
            del self.wires[to, route]
        return first

    def duplicate(self, to: str, route: Route) -> None:
        """The oldest message will arrive twice."""
        wire = self.wires[to, route]
        wire.appendleft(wire[0])

    def repeat_later(self, to: str, route: Route) -> None:
        """The oldest message will arrive again after all that is under way."""
        wire = self.wires[to, route]
        wire.append(wire[0])

    def swap(self, to: str, route: Route) -> None:
        """The two oldest messages change places."""
        wire = self.wires[to, route]
        first, second = wire.popleft(), wire.popleft()
        wire.extendleft((first, second))

    def cut(self, route: Route) -> None:
        """A connection breaks; each side learns of it when it learns of it."""
        self.alive.discard(route)
        self.untold |= {(SENDER, route), (RECEIVER, route)}
        for to in (SENDER, RECEIVER):
            self.wires.pop((to, route), None)

    def sever(self, route: Route) -> None:
        """A connection breaks, and what is under way to the decode node arrives all the same, until it learns of the loss."""
        under_way = self.wires.get((RECEIVER, route))
        self.cut(route)
        if under_way is not None:
            self.wires[RECEIVER, route] = under_way
