"""All pairs of parameters in few cases: most faults need one value, nearly all others two together."""

from collections.abc import Mapping, Sequence
from itertools import combinations, product

Case = dict[str, object]
Pair = tuple[str, int, str, int]
"""Two parameters, each with the index of one of its values."""


def all_pairs(parameters: Mapping[str, Sequence[object]]) -> list[Case]:
    """Return cases in which every two values of any two parameters meet at least once; always the same ones.

    Greedy: a case begins with a pair that is still missing, and each further parameter takes the value that meets most missing
    pairs. Ties go to the value used least, so that all are used about equally.
    """
    names = list(parameters)
    missing: dict[Pair, None] = {
        (a, i, b, j): None
        for a, b in combinations(names, 2)
        for i, j in product(range(len(parameters[a])), range(len(parameters[b])))
    }
    used = {name: [0] * len(parameters[name]) for name in names}
    cases = []
    while missing:
        a, i, b, j = next(iter(missing))
        chosen = {a: i, b: j}
        for name in sorted((n for n in names if n not in chosen), key=lambda n: -len(parameters[n])):
            chosen[name] = max(
                range(len(parameters[name])),
                key=lambda value: (len(_met({**chosen, name: value}, names, missing)), -used[name][value]),
            )
        for pair in _met(chosen, names, missing):
            del missing[pair]
        for name, value in chosen.items():
            used[name][value] += 1
        cases.append({name: parameters[name][chosen[name]] for name in names})
    return cases


def _met(chosen: Mapping[str, int], names: Sequence[str], missing: Mapping[Pair, None]) -> list[Pair]:
    present = [name for name in names if name in chosen]
    pairs = ((a, chosen[a], b, chosen[b]) for a, b in combinations(present, 2))
    return [pair for pair in pairs if pair in missing]
