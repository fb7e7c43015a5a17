"""What every agent remembers: which points were asked for or told, and their costs."""

from __future__ import annotations

from search.space import Point, Space


class History:
    """The points of one space that an agent need not ask for: told ones, and asked ones in flight.

    Failed points are known but have no cost.
    """

    def __init__(self, space: Space):
        self.space = space
        self.costs_us: dict[Point, float] = {}
        self._known: set[Point] = set()

    def tell(self, point: Point, cost_us: float | None) -> None:
        self._known.add(point)
        if cost_us is not None:
            self.costs_us[point] = cost_us

    def take(self, point: Point) -> Point:
        """Returns `point`, which is in flight from now on and will not be asked for again."""
        self._known.add(point)
        return point

    def known(self, point: Point) -> bool:
        return point in self._known

    def fresh(self, points: list[Point]) -> list[Point]:
        """Returns those of `points` that are not known, in their order."""
        return [point for point in points if point not in self._known]

    def unknown(self) -> list[Point]:
        return self.fresh(list(self.space.points))

    @property
    def best(self) -> tuple[Point, float] | None:
        """The cheapest point and its cost, or None before the first success."""
        if not self.costs_us:
            return None
        return min(self.costs_us.items(), key=lambda item: item[1])
