"""Both transports of published weights, between real processes."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import WeightsError, WorkerLostError
from schemas.weights import Transport, WeightsTransfer
from tests.support.members import Member

RUN = "weights"  # as `weight_tensors.RUN`: this process needs no torch
TIMEOUT_SECONDS = 600  # only a member that hangs is waited for this long
LARGE = 3_000_000  # words: 12 MB
TRANSPORTS = pytest.mark.parametrize("transport", ["shared_memory", "broadcast"])
POLICY, ROLLOUT = "tests.support.weight_members:Policy", "tests.support.weight_members:Rollout"


@pytest.fixture(scope="module")
def policy() -> Iterator[Member]:
    member = Member(POLICY)
    yield member
    member.close()


@pytest.fixture(scope="module")
def rollouts() -> Iterator[list[Member]]:
    members = [Member(ROLLOUT) for _ in range(2)]
    yield members
    for member in members:
        member.close()


def results(calls: list[Future[Any]]) -> list[Any]:
    return [each.result() for each in calls]


def form_group(policy: Member, rollouts: list[Member]) -> None:
    """Have the members form a new group."""
    group = policy.call("open_rendezvous", len(rollouts))
    joins = [rollout.start("join", group, rank, TIMEOUT_SECONDS) for rank, rollout in enumerate(rollouts, start=1)]
    results([policy.start("join", group, TIMEOUT_SECONDS), *joins])


def assert_published(
    policy: Member, rollouts: list[Member], transport: Transport, version: int, bucket_bytes: int = 64, words: int = 9
) -> None:
    """Send a version with these bytes of a bucket and words of the last tensor, and check that all hold it."""
    sent = policy.start("send", transport, version, bucket_bytes, words)
    loaded = results([rollout.start("load", transport, version) for rollout in rollouts])
    assert all(results([rollout.start("holds", version, words) for rollout in rollouts]))
    expected = policy.call("expected_bytes", version, bucket_bytes, words)
    assert sent.result().num_bytes == expected == loaded[0].num_bytes
    assert WeightsTransfer.of(transport, sent.result(), loaded).num_receivers == len(rollouts)
    assert policy.call("num_files") == 0


@TRANSPORTS
def test_weights_in_buckets_of_any_size_arrive_whole(
    policy: Member, rollouts: list[Member], transport: Transport
) -> None:
    form_group(policy, rollouts)
    for version, sizes in enumerate([(64, 9), (192, 9), (2**20, 9), (2**20, LARGE), (2**24, LARGE)], start=1):
        assert_published(policy, rollouts, transport, version, *sizes)


@TRANSPORTS
def test_rejected_weights_leave_the_group_usable(policy: Member, rollouts: list[Member], transport: Transport) -> None:
    form_group(policy, rollouts)
    assert_published(policy, rollouts, transport, 4)
    for expected, run_id, text in ((6, RUN, "expected version 6"), (5, "other", "expected version 5 of run other")):
        sent = policy.start("send", transport, 5)
        loads = [rollouts[0].start("load", transport, expected, run_id), rollouts[1].start("load", transport, 5)]
        with pytest.raises(WeightsError, match=f"version 5 of run weights, {text}"):
            loads[0].result()
        assert loads[1].result().version == sent.result().version == 5
    assert results([rollouts[0].start("holds", 4), rollouts[1].start("holds", 5)]) == [True, True]

    sent = policy.start("send", transport, 6, 64, 9, 7, True)
    for load in [rollout.start("load", transport, 6) for rollout in rollouts]:
        with pytest.raises(WeightsError, match=r"bucket 2 of 7 of the weights of version 6 .* damaged.*has no version"):
            load.result()
    assert sent.result().version == 6
    assert results([rollout.start("version") for rollout in rollouts]) == [None, None]
    assert_published(policy, rollouts, transport, 6)


@TRANSPORTS
def test_a_sender_that_fails_leaves_no_receiver_waiting(
    policy: Member, rollouts: list[Member], transport: Transport
) -> None:
    form_group(policy, rollouts)
    sent = policy.start("send", transport, 60, 64, 9, 3)
    for load in [rollout.start("load", transport, 60) for rollout in rollouts]:
        with pytest.raises(WorkerLostError, match="lost the others"):
            load.result()
    with pytest.raises(WeightsError, match="'scale' is missing"):
        sent.result()
    with pytest.raises(WorkerLostError, match="has left the weight group; form a new one"):
        policy.call("send", transport, 60)
    assert results([rollout.start("version") for rollout in rollouts]) == [None, None]
    assert policy.call("num_files") == 0


@TRANSPORTS
def test_a_receiver_killed_in_a_bucket_ends_the_group(
    policy: Member, rollouts: list[Member], transport: Transport
) -> None:
    victim = Member(ROLLOUT)
    form_group(policy, [rollouts[0], victim])
    sent = policy.start("send", transport, 70, 64)
    loads = [rollouts[0].start("load", transport, 70), victim.start("load", transport, 70, RUN, 1)]
    with pytest.raises(WorkerLostError, match="member 1 of the weight group lost the others"):
        loads[0].result()
    with pytest.raises(WorkerLostError, match="member 0 of the weight group lost the others"):
        sent.result()
    assert rollouts[0].call("version") is None
    assert policy.call("gathered") == policy.call("names")  # so the policy's other ranks weren't left waiting
    assert policy.call("num_files") == 0
    form_group(policy, rollouts)
    assert_published(policy, rollouts, transport, 71)


def test_full_shared_memory_names_the_settings(rollouts: list[Member], small_memory: Path) -> None:
    policy = Member(POLICY, str(small_memory))
    form_group(policy, rollouts)
    loads = [rollout.start("load", "shared_memory", 1) for rollout in rollouts]
    with pytest.raises(WeightsError, match=r"no space for a bucket of \d+ bytes .*shared_memory.*weights.bucket_bytes"):
        policy.call("send", "shared_memory", 1, 2**24, LARGE)
    for load in loads:
        with pytest.raises(WorkerLostError, match="lost the others"):
            load.result()
    form_group(policy, rollouts)
    assert_published(policy, rollouts, "shared_memory", 2)
    policy.close()


def test_members_that_do_not_join_are_lost(policy: Member) -> None:
    group = policy.call("open_rendezvous", 1)
    with pytest.raises(WorkerLostError, match="member 0 of 2 could not join the weight group"):
        policy.call("join", group, 0.5)


@TRANSPORTS
def test_a_policy_killed_between_buckets_leaves_no_version(rollouts: list[Member], transport: Transport) -> None:
    policy = Member(POLICY)
    form_group(policy, rollouts)
    assert_published(policy, rollouts, transport, 1)
    policy.start("send", transport, 2, 64, 9, 7, False, "turned")
    for load in [rollout.start("load", transport, 2) for rollout in rollouts]:
        with pytest.raises(WorkerLostError, match="lost the others"):
            load.result()
    assert results([rollout.start("version") for rollout in rollouts]) == [None, None]
