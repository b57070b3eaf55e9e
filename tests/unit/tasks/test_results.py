"""Results of stages: Prefect's own JSON, which Prefect's own serializer reads."""

import json

from prefect.serializers import JSONSerializer

from rl_core.planning import plan_forward
from schemas.packed import PackedFloats
from tasks.stage import HandleSerializer
from tests.unit.tasks.test_advantage_stage import rollout_of


def test_a_handle_is_written_as_prefect_writes_it() -> None:
    rollout = rollout_of([1.0, None, 0.5, 0.1, 1.0, 0.0])
    blob = HandleSerializer().dumps(rollout)
    assert json.loads(blob)["__class__"] == "schemas.rollout.RolloutHandle"
    for reader in (HandleSerializer(), JSONSerializer()):
        assert reader.loads(blob) == rollout
    assert rollout.rewards == PackedFloats([1.0, None, 0.5, 0.1, 1.0, 0.0])


def test_a_plan_with_micro_batches_survives() -> None:
    plan = plan_forward([1, 2, 1], [2, 2, 3], num_ranks=2, token_budget=8)
    assert HandleSerializer().loads(HandleSerializer().dumps(plan)) == plan


def test_anything_else_is_written_by_prefect() -> None:
    assert HandleSerializer().loads(HandleSerializer().dumps({"a": 1})) == {"a": 1}
    error = HandleSerializer().loads(HandleSerializer().dumps(ValueError("no")))
    assert isinstance(error, ValueError)
