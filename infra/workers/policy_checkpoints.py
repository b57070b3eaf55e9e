"""The checkpoints of a sharded policy: its ranks restore and save them together."""

from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from infra.checkpoints import CheckpointStore, Manifest, PendingCheckpoint, best_version
from infra.models.assets import save_assets
from infra.models.load import describe_adapter
from rl_core.training.sharding import all_gather_object
from schemas.config.run import RunConfig
from schemas.step import EvalReport, UpdateReport


class PolicyCheckpoints:
    """One rank's part in a policy's checkpoints. All ranks make the same calls, except for `retain`.

    Args:
        config: The run's configuration.
        store: The run's checkpoints.
        rank: This rank.
        mesh: All ranks; None for a single one.
        process_group: A gloo group of all ranks that nothing else uses; None for a single one.

    Attributes:
        store: The run's checkpoints.
    """

    def __init__(
        self,
        config: RunConfig,
        store: CheckpointStore,
        rank: int,
        mesh: DeviceMesh | None,
        process_group: ProcessGroup | None,
    ) -> None:
        self.store = store
        self._config, self._rank, self._mesh, self._process_group = config, rank, mesh, process_group
        self._pending: PendingCheckpoint | None = None
        self._complete_version: int | None = None  # of the newest complete checkpoint that this rank knows of

    def find_newest(self) -> tuple[int, Manifest] | None:
        """Return the newest complete checkpoint's version and manifest, as found by rank 0; None if none exists."""
        found = self.store.newest() if self._rank == 0 else None
        newest = all_gather_object(found, self._mesh)[0]
        self._complete_version = newest[0] if newest else None
        return newest

    def save(
        self, version: int, tensors: Mapping[str, Tensor], *, num_updates: int, report: UpdateReport | None
    ) -> None:
        """Complete the previous checkpoint, then begin to write that of `version` unless it exists.

        Args:
            version: The policy version.
            tensors: What `infra.checkpoints.state.policy_tensors` returns.
            num_updates: The number of optimizer steps so far.
            report: The report of the step that produced this version.

        Raises:
            CheckpointError: The previous checkpoint, or this one, could not be written.
        """
        self.finish_saving()
        if version == self._complete_version:
            return
        self._pending = self.store.save(
            version,
            tensors,
            num_updates=num_updates,
            report=report,
            adapter=describe_adapter(self._config.model),
            write_assets=partial(save_assets, self._config.model),
            process_group=self._process_group,
        )

    def finish_saving(self) -> None:
        """Wait until the checkpoint that `save` began is complete.

        Raises:
            CheckpointError: It could not be written.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        pending.wait()
        self._complete_version = pending.version

    def retain(self, evals: Sequence[EvalReport]) -> int | None:
        """Remove the checkpoints that the config doesn't keep, and return the newest complete version; for rank 0 only.

        Args:
            evals: The reports of all versions evaluated so far: the best version's checkpoint may be kept.
        """
        complete = self.store.complete_versions()
        if not complete:
            return None
        config = self._config.checkpoint
        self.store.retain(config.keep_last, best_version(evals, complete) if config.keep_best else None)
        return complete[-1]
