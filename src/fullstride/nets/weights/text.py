"""How is text from a file shown in an error? Printable, in one line, and short."""


def one_line(text: str) -> str:
    """Text from a file, printable and short enough for an error."""
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    return line if len(line) <= 120 else f"{line[:120]}..."


def first_ten(lines: list[str]) -> str:
    more = f" and {len(lines) - 10} more" if len(lines) > 10 else ""
    return ", ".join(one_line(line) for line in lines[:10]) + more
