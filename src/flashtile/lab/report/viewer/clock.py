"""One clock for several orders, bytes through HBM: an order that moves less finishes sooner."""

from bisect import bisect_right


def frames(moved: dict[str, list[int]], follow: str) -> list[list[int]]:
    """Return, for each frame, how many events of each order are done.

    `moved` holds bytes by step. Frames follow one order event by event, and after its end the slowest order.
    """
    slowest = max(moved, key=lambda order: moved[order][-1])
    left = bisect_right(moved[slowest], moved[follow][-1])  # the slowest's first step after that end
    found = [[0] * len(moved)]
    for leader, first in ((follow, 1), (slowest, left)):
        for n, clock in enumerate(moved[leader][first:], first):
            found.append([n if order == leader else bisect_right(at, clock) - 1 for order, at in moved.items()])
    return found
