"""Step numbers as text."""


def ranges(numbers: list[int]) -> list[str]:
    """Return ascending numbers as ranges.

    Example:
        >>> ranges([0, 1, 2, 5, 7, 8])
        ['0 to 2', '5', '7 to 8']
    """
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1] = [found[-1][0], number]
        else:
            found.append([number])
    return [" to ".join(map(str, each)) for each in found]
