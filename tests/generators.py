"""For tests of generators that yield lines and return a result."""


def drain(steps):
    """The lines of a generator, and what it returns."""
    lines = []
    while True:
        try:
            lines.append(next(steps))
        except StopIteration as stop:
            return lines, stop.value
