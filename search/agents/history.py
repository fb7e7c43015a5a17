"""What every agent remembers: which points are known, and their costs."""

from __future__ import annotations

from search.space import Point, Space


class History:
    """The told points of one space. Failed points are known but have no cost."""

    def __init__(self, space: Space):
        self.space = space
        self.costs_us: dict[Point, float] = {}
        self._known: set[Point] = set()

    def tell(self, point: Point, cost_us: float | None) -> None:
        self._known.add(point)
        if cost_us is not None:
            self.costs_us[point] = cost_us

    def known(self, point: Point) -> bool:
        return point in self._known

    def fresh(self, points: list[Point]) -> list[Point]:
        """Returns those of `points` that were not told, in their order."""
        return [point for point in points if point not in self._known]

    def unknown(self) -> list[Point]:
        return self.fresh(list(self.space.points))

    @property
    def best(self) -> tuple[Point, float] | None:
        """The cheapest point and its cost, or None before the first success."""
        if not self.costs_us:
            return None
        return min(self.costs_us.items(), key=lambda item: item[1])
