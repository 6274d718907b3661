"""Tables of several splits in, one figure for each system out: the mean of its R@1 over the splits, each counting the same.

That is what one operating point is judged by where some documents have training queries and others have none: a constant
moves points from one split to the other, the mean says whether it was worth it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from nci.compare import Result
from nci.significance import Comparison, Judged, compare_means, document_groups


@dataclass(frozen=True)
class Overall:
    """The mean of R@1 over splits.

    Args:
        splits: Their names.
        reference: The system that the others are tested against.
        systems: The figure of each.
        spread: Standard deviation over the seeds, where there are several.
        tests: How much the reference exceeds each other system: paired bootstrap over documents.
    """

    data: str
    splits: tuple[str, ...]
    reference: str
    systems: dict[str, float]
    spread: dict[str, float]
    tests: dict[str, Comparison]

    def text(self) -> str:
        """For people."""
        width = max(map(len, self.systems))
        named = f"{', '.join(self.splits[:-1])} and {self.splits[-1]}"
        lines = [
            f"{self.data}: mean of R@1 on {named} (%)",
            f"{'':{width}}    mean     +-   {self.reference} exceeds it by (95 %)       p",
        ]
        for name, value in self.systems.items():
            spread = f"{100 * self.spread[name]:.2f}" if name in self.spread else "-"
            line = f"{name:{width}}  {100 * value:6.2f} {spread:>6}"
            if name in self.tests:
                test = self.tests[name]
                interval = f"{100 * test.difference:+.2f} ({100 * test.low:+.2f} to {100 * test.high:+.2f})"
                line += f"   {interval:>{len(self.reference) + 23}} {test.corrected:7.4f}"
            lines.append(line)
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def overall(results: Sequence[Result]) -> Overall:
    """Of the tables of several splits with the same systems; seed for seed, a system is the same on each split."""
    first = results[0]
    systems = {name: float(np.mean([one.systems[name]["R@1"] for one in results])) for name in first.systems}
    per_seed = {name: np.mean([one.per_seed[name] for one in results], axis=0) for name in first.systems}
    return Overall(
        first.data,
        tuple(one.split for one in results),
        first.reference,
        systems,
        {name: float(np.std(values, ddof=1)) for name, values in per_seed.items() if len(values) > 1},
        compare_means(_judged(results)),
    )


def _judged(results: Sequence[Result]) -> list[Judged]:
    """The tables' values, with one group for a document that is asked for in several splits."""
    together = {
        f"{number} {query}": judged for number, one in enumerate(results) for query, judged in one.qrels.items()
    }
    groups = document_groups(together)
    return [
        one.judged._replace(groups={query: groups[f"{number} {query}"] for query in one.qrels})
        for number, one in enumerate(results)
        if one.judged
    ]
