"""Built-in model of the inference engine: the probability of a mechanism, given its evidence. Runs in a worker.

Each piece of evidence is a trial that supports the mechanism fully, in part or not at all. With a Beta prior the posterior is
a Beta distribution, too: its mean is exact, and its credible interval is estimated from samples.
"""

from __future__ import annotations

import random
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

SAMPLES = 4_000
CREDIBLE_SHARE = 0.95
#: Fields that every link must have for a mechanism to be possible.
REQUIRED_FIELDS = ("source", "target", "evidence")


def infer(link: Any, sampler: Optional[Callable[[Any], Any]] = None) -> Dict[str, Any]:
    """Return the inference result of a link, from the sampler or from the built-in model."""
    result: Dict[str, Any] = {
        "type": str(link_field(link, "type", "mechanism_type", "kind") or "mechanism"),
        "necessity_test": necessity_test(link),
    }
    if sampler is None:
        return {**result, **beta_binomial(link)}
    sampled = sampler(link)
    if not isinstance(sampled, dict):
        sampled = {"posterior_mean": float(sampled)}
    if "posterior_mean" not in sampled:
        raise ValueError(f"the sampler must return a posterior_mean, got {sorted(map(str, sampled))}")
    return {**result, **sampled}


def beta_binomial(link: Any) -> Dict[str, Any]:
    """Return mean, standard deviation and credible interval of the posterior, from the link's evidence and prior."""
    a, b = prior(link)
    for _, support, weight in evidence_pieces(link):
        a += weight * support
        b += weight * (1 - support)
    # The seed makes the result reproducible for a link.
    rng = random.Random(f"{link_id(link)} {a!r} {b!r}")
    samples = sorted(rng.betavariate(a, b) for _ in range(SAMPLES))
    tail = int(SAMPLES * (1 - CREDIBLE_SHARE) / 2)
    return {
        "posterior_mean": a / (a + b),
        "posterior_std": (a * b / ((a + b) ** 2 * (a + b + 1))) ** 0.5,
        "credible_interval": [samples[tail], samples[-1 - tail]],
    }


def necessity_test(link: Any) -> Dict[str, Any]:
    """Test that the link has both ends, evidence, and evidence of each kind that it requires."""
    missing = [name for name in REQUIRED_FIELDS if link_field(link, name) in (None, "", [], {}, ())]
    kinds = {kind for kind, support, weight in evidence_pieces(link) if support * weight > 0}
    required = link_field(link, "required_evidence", "required") or ()
    if isinstance(required, str):
        required = (required,)
    missing += [str(kind) for kind in required if str(kind) not in kinds]
    return {"passed": not missing, "missing": missing}


def link_id(link: Any) -> str:
    """Return the id of the link, or `source->target` if it has none."""
    explicit_id = link_field(link, "id", "link_id")
    if explicit_id is not None:
        return str(explicit_id)
    ends = [link_field(link, name) for name in ("source", "target")]
    return "->".join("?" if end is None else str(end) for end in ends) if any(ends) else "unknown"


def link_field(link: Any, *names: str) -> Any:
    """Return the first of these fields that the link has, as a dict or as an object."""
    for name in names:
        value = link.get(name) if isinstance(link, dict) else getattr(link, name, None)
        if value is not None:
            return value
    return None


def prior(link: Any) -> Tuple[float, float]:
    """Return the link's prior as the parameters of a Beta distribution; uniform if the link has none.

    The field `prior` is a mean, a pair of parameters, or a dict with `alpha` and `beta`.
    """
    value = link_field(link, "prior")
    if value is None:
        return 1.0, 1.0
    if isinstance(value, dict):
        value = (value.get("alpha", 1), value.get("beta", 1))
    if isinstance(value, (int, float)):
        value = (2 * value, 2 * (1 - value))
    a, b = (float(parameter) for parameter in value)
    if not (a > 0 and b > 0):
        raise ValueError(f"prior must be a mean between 0 and 1, or two positive Beta parameters, got {value!r}")
    return a, b


def evidence_pieces(link: Any) -> List[Tuple[str, float, float]]:
    """Return the pieces of evidence: the kind, the support for the mechanism (0 to 1), and the weight of each.

    Evidence is counts (`{"supporting": 8, "contradicting": 2}`, `{"successes": 8, "trials": 10}`), a dict from kind to
    support, or a list of support values, of kinds, or of dicts with `kind`, `supports` and `weight`.
    """
    evidence = link_field(link, "evidence")
    if evidence is None:
        return []
    if isinstance(evidence, dict):
        counted = _parse_counts(evidence)
        return counted if counted is not None else [_parse_piece(kind, value) for kind, value in evidence.items()]
    if isinstance(evidence, (str, int, float)) or not isinstance(evidence, Iterable):
        evidence = [evidence]
    return [_parse_piece("evidence", value) for value in evidence]


def _parse_counts(evidence: Dict[Any, Any]) -> Optional[List[Tuple[str, float, float]]]:
    if "trials" in evidence:
        against = float(evidence["trials"]) - float(evidence.get("successes", 0))
        counts = (float(evidence.get("successes", 0)), against)
    elif "supporting" in evidence or "contradicting" in evidence:
        counts = (float(evidence.get("supporting", 0)), float(evidence.get("contradicting", 0)))
    else:
        return None
    if min(counts) < 0:
        raise ValueError(f"evidence counts must be 0 or more, got {evidence!r}")
    return [("supporting", 1.0, counts[0]), ("contradicting", 0.0, counts[1])]


def _parse_piece(kind: Any, value: Any) -> Tuple[str, float, float]:
    weight: Any = 1
    if isinstance(value, dict):
        kind, weight = value.get("kind", value.get("type", kind)), value.get("weight", 1)
        value = next((value[name] for name in ("supports", "support", "strength", "confidence") if name in value), True)
    elif isinstance(value, str):
        kind, value = value, True
    elif not isinstance(value, (int, float)):
        value = value is not None
    support, weight = float(value), float(weight)
    if not (0 <= support <= 1 and weight >= 0):
        raise ValueError(
            f"evidence must have a support from 0 to 1 and a weight of 0 or more, got {support} and {weight} for {kind!r}"
        )
    return str(kind), support, weight
