import math

import pytest
import torch

from penstock.core.errors import TrainError
from penstock.train.step.schedules import MakeSchedule, warm_up_cosine, warm_up_steps


def rates(schedule: MakeSchedule, steps: int, peak: float = 0.5) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], peak)
    moving = schedule(optimizer, steps)
    seen: list[float] = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        moving.step()
    return seen


def test_a_cosine_rises_to_the_rate_and_falls_to_what_is_left() -> None:
    seen = rates(warm_up_cosine(0.1, last=0.2), 100)
    assert seen[:10] == pytest.approx([0.05 * (step + 1) for step in range(10)])
    assert seen[10] == 0.5 == max(seen)
    assert seen[55] == pytest.approx(0.5 * 0.6)
    assert seen[-1] == pytest.approx(0.5 * (0.2 + 0.8 * (1 + math.cos(math.pi * 89 / 90)) / 2))
    assert seen[10:] == sorted(seen[10:], reverse=True)


def test_steps_fall_where_they_are_said_to() -> None:
    seen = rates(warm_up_steps(0.05), 180)
    assert seen[8] == pytest.approx(0.5)
    falls = [step for step in range(10, 180) if seen[step] < 0.9 * seen[step - 1]]
    assert falls == [60, 120, 160]
    assert seen[-1] == pytest.approx(0.5e-3)


def test_without_a_warm_up_the_first_step_has_the_whole_rate() -> None:
    assert rates(warm_up_cosine(0.0), 10)[0] == 0.5
    assert rates(warm_up_cosine(1.0), 4) == pytest.approx([0.125, 0.25, 0.375, 0.5])
    assert rates(warm_up_cosine(), 1) == [0.5]


def test_what_is_no_share_is_refused() -> None:
    with pytest.raises(TrainError, match="warm_up 5; it must be a share of the steps"):
        warm_up_cosine(5)
    with pytest.raises(TrainError, match="last -1"):
        warm_up_cosine(last=-1)
    with pytest.raises(TrainError, match="at 30"):
        warm_up_steps(at=(30, 60))
    with pytest.raises(TrainError, match="factor 0"):
        warm_up_steps(factor=0)
