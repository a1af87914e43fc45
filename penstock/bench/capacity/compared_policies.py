"""Load-balancing policies side by side: the same load on the same servers, by policy and age of views."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.bench.capacity.fleet_lanes import equal_servers
from penstock.bench.capacity.fleet_service import Conditions, Service, simulate
from penstock.bench.capacity.policies import Policy
from penstock.core.errors import BenchError

SERVERS, LANES = 64, 4
SECONDS, WARM_S = 10.0, 2.0
AGES_MS = (0.0, 20.0, 100.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedPolicy:
    """One policy at one age of views.

    Args:
        policy: The policy.
        view_age_ms: The age.
        refused: Share of the requests or streams that were refused, or of requests that expired.
        p99_ms: 99th percentile over all requests or chunks, in milliseconds; infinity beyond 1% without an answer.
    """

    policy: Policy
    view_age_ms: float
    refused: float
    p99_ms: float


def compare_policies(
    service: Service,
    conditions: Conditions,
    load: float,
    ages_ms: Sequence[float] = AGES_MS,
    seconds: float = SECONDS,
) -> list[ComparedPolicy]:
    """Put the same load on 64 servers under each policy.

    Args:
        service: The service.
        conditions: Share of slow servers and seed; the policy and the age are varied.
        load: Requests over what the engines carry in their largest batches; of streams, over what is admitted.
        ages_ms: Ages of views.
        seconds: Simulated seconds, the warm-up included.

    Raises:
        BenchError: The load is not above 0.
    """
    if not 0 < load <= 10:
        raise BenchError(f"the load is {load:g} of the capacity; give more than 0 and at most 10.")
    slowness = conditions.slowness(SERVERS)
    engines = float((1 / slowness).sum())
    each = service.capacity["engine"] if service.chunk_ms is None else min(service.capacity.values())
    rate = load * engines * each / service.chunks
    lanes = equal_servers([rate] * LANES, [SERVERS] * LANES, slowness_LS=np.tile(slowness, (LANES, 1)))
    found: list[ComparedPolicy] = []
    for age_ms in ages_ms:
        for policy in Policy:
            if policy is Policy.RANDOM and age_ms != ages_ms[0]:
                continue
            with_age = replace(conditions, policy=policy, view_age_ms=age_ms)
            result = simulate(service, lanes, with_age, seconds=seconds, warm_s=WARM_S)
            refused = float(result.refused.sum() / max(result.offered.sum(), 1))
            p99_ms = result.counts.percentile_s(99) * 1e3
            found.append(ComparedPolicy(policy=policy, view_age_ms=age_ms, refused=refused, p99_ms=p99_ms))
    return found
