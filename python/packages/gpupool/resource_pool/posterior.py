"""The model that is built in: how likely a mechanism is, by the evidence for and against it. Runs in a worker.

Each piece of evidence is a trial that speaks for the mechanism or against it, fully or in part. With a Beta prior the
posterior is a Beta as well: its mean is exact, and its spread is told by draws from it.
"""

from __future__ import annotations

import random
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

DRAWS = 4_000
CREDIBLE_SHARE = 0.95
#: What every link must say so that there can be a mechanism at all.
NECESSARY = ("source", "target", "evidence")


def infer(link: Any, sampler: Optional[Callable[[Any], Any]] = None) -> Dict[str, Any]:
    """All that can be told of a link."""
    found: Dict[str, Any] = {
        "type": str(field(link, "type", "mechanism_type", "kind") or "mechanism"),
        "necessity_test": necessity_test(link),
    }
    if sampler is None:
        return {**found, **beta_binomial(link)}
    told = sampler(link)
    if not isinstance(told, dict):
        told = {"posterior_mean": float(told)}
    if "posterior_mean" not in told:
        raise ValueError(f"the sampler must give a posterior_mean, got {sorted(map(str, told))}")
    return {**found, **told}


def beta_binomial(link: Any) -> Dict[str, Any]:
    """The posterior by the evidence of the link, and its prior: `(a, b)` of a Beta, or a mean, or nothing is known."""
    a, b = prior(link)
    for _, support, weight in pieces(link):
        a += weight * support
        b += weight * (1 - support)
    # The same for the same link, whoever computes it.
    chance = random.Random(f"{identity(link)} {a!r} {b!r}")
    drawn = sorted(chance.betavariate(a, b) for _ in range(DRAWS))
    aside = int(DRAWS * (1 - CREDIBLE_SHARE) / 2)
    return {
        "posterior_mean": a / (a + b),
        "posterior_std": (a * b / ((a + b) ** 2 * (a + b + 1))) ** 0.5,
        "credible_interval": [drawn[aside], drawn[-1 - aside]],
    }


def necessity_test(link: Any) -> Dict[str, Any]:
    """What a mechanism cannot do without: both ends, evidence, and evidence of every kind that the link requires."""
    missing = [name for name in NECESSARY if field(link, name) in (None, "", [], {}, ())]
    kinds = {kind for kind, support, weight in pieces(link) if support * weight > 0}
    required = field(link, "required_evidence", "required") or ()
    if isinstance(required, str):
        required = (required,)
    missing += [str(kind) for kind in required if str(kind) not in kinds]
    return {"passed": not missing, "missing": missing}


def identity(link: Any) -> str:
    """What the link is called: its id, or what it joins."""
    own = field(link, "id", "link_id")
    if own is not None:
        return str(own)
    ends = [field(link, name) for name in ("source", "target")]
    return "->".join("?" if end is None else str(end) for end in ends) if any(ends) else "unknown"


def field(link: Any, *names: str) -> Any:
    """The first of these that the link says, as a dict or as an object."""
    for name in names:
        value = link.get(name) if isinstance(link, dict) else getattr(link, name, None)
        if value is not None:
            return value
    return None


def prior(link: Any) -> Tuple[float, float]:
    """How likely it was before any evidence, as a Beta."""
    told = field(link, "prior")
    if told is None:
        return 1.0, 1.0
    if isinstance(told, dict):
        told = (told.get("alpha", 1), told.get("beta", 1))
    if isinstance(told, (int, float)):
        told = (2 * told, 2 * (1 - told))
    a, b = (float(part) for part in told)
    if not (a > 0 and b > 0):
        raise ValueError(f"prior must be a mean between 0 and 1, or two positive numbers of a Beta, got {told!r}")
    return a, b


def pieces(link: Any) -> List[Tuple[str, float, float]]:
    """The evidence, piece by piece: its kind, how far it supports the mechanism (0 to 1), and how much it weighs.

    It is counts (`{"supporting": 8, "contradicting": 2}`, `{"successes": 8, "trials": 10}`), a dict from kinds to support,
    or a list of support, of kinds, or of dicts with `kind`, `supports` and `weight`.
    """
    evidence = field(link, "evidence")
    if evidence is None:
        return []
    if isinstance(evidence, dict):
        counted = _counts(evidence)
        return counted if counted is not None else [_piece(kind, told) for kind, told in evidence.items()]
    if isinstance(evidence, (str, int, float)) or not isinstance(evidence, Iterable):
        evidence = [evidence]
    return [_piece("evidence", told) for told in evidence]


def _counts(evidence: Dict[Any, Any]) -> Optional[List[Tuple[str, float, float]]]:
    if "trials" in evidence:
        against = float(evidence["trials"]) - float(evidence.get("successes", 0))
        counts = (float(evidence.get("successes", 0)), against)
    elif "supporting" in evidence or "contradicting" in evidence:
        counts = (float(evidence.get("supporting", 0)), float(evidence.get("contradicting", 0)))
    else:
        return None
    if min(counts) < 0:
        raise ValueError(f"evidence must count 0 or more for and against, got {evidence!r}")
    return [("supporting", 1.0, counts[0]), ("contradicting", 0.0, counts[1])]


def _piece(kind: Any, told: Any) -> Tuple[str, float, float]:
    weight: Any = 1
    if isinstance(told, dict):
        kind, weight = told.get("kind", told.get("type", kind)), told.get("weight", 1)
        told = next((told[name] for name in ("supports", "support", "strength", "confidence") if name in told), True)
    elif isinstance(told, str):
        kind, told = told, True
    elif not isinstance(told, (int, float)):
        told = told is not None
    support, weight = float(told), float(weight)
    if not (0 <= support <= 1 and weight >= 0):
        raise ValueError(f"evidence must support from 0 to 1 and weigh 0 or more, got {support} and {weight} for {kind!r}")
    return str(kind), support, weight
