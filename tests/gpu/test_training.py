"""A transformer learns with our attention as with torch's, on a GPU: with each backend, at sizes for both."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.gpu.runner import each_backend
from tests.support import training
from tests.support.training import GPU_COURSES, Course

pytestmark = [pytest.mark.gpu, *each_backend]
each_course = pytest.mark.parametrize("course", GPU_COURSES, ids=lambda course: f"D{course.head_dim}")


@each_course
def test_the_losses_are_those_of_torch(course: Course, backend: str) -> None:
    training.check(course, training.losses(course, training.ours(backend)))


@each_course
def test_a_scale_that_is_wrong_by_a_hundredth_is_seen(course: Course, backend: str) -> None:
    with pytest.raises(AssertionError, match="away from torch's runs"):
        training.check(course, training.losses(course, training.ours(backend, wrong=1.01)))
