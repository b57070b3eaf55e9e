"""The automations of a deployment: what Prefect does when a run stalls, crashes, saves a checkpoint or collapses."""

from datetime import timedelta
from typing import Any
from uuid import UUID

from prefect.automations import Automation
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events import EventTrigger
from prefect.events.actions import ActionTypes, ChangeFlowRunState, RunDeployment, SendNotification, SuspendFlowRun
from prefect.events.schemas.automations import Posture
from prefect.exceptions import ObjectNotFound

from flows.ui.events import CheckpointSaved, RewardCollapsed, RunEnded, RunResumed, RunStarted, StepCompleted
from schemas.errors import ConfigError

HEARTBEATS_MISSED = 3  # fewer are often only late


class Automations:
    """The automations of one train deployment; creating them again replaces them.

    Args:
        name: The deployment's full name, which begins the names of its automations.
        deployment: Its id.
        job_variables: Its job variables: what the automations run, runs in its folder, with its Python or image.
    """

    def __init__(self, name: str, deployment: UUID, job_variables: dict[str, Any]) -> None:
        self._name, self._deployment, self._job_variables = name, deployment, job_variables

    async def notify_when_stalled(self, minutes: float, block: UUID) -> None:
        """Send a notification if a run has finished no step for some minutes and has not ended."""
        trigger = self._trigger(
            expect={StepCompleted.event, RunEnded.event},
            after={RunStarted.event, RunResumed.event, StepCompleted.event},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            within=timedelta(minutes=minutes),
        )
        body = f"{{{{ event.resource.name }}}} has finished no step for {minutes:g} minutes."
        await self._create("stalled", trigger, SendNotification(block_document_id=block, body=body))

    async def notify_when_failed(self, block: UUID) -> None:
        """Send a notification when a run has failed: it is not resumed by itself."""
        trigger = self._trigger(expect={"prefect.flow-run.Failed"})
        body = "{{ event.resource.name }} has failed."
        await self._create("failed", trigger, SendNotification(block_document_id=block, body=body))

    async def resume_when_crashed(self) -> None:
        """Schedule a crashed flow run again; its next attempt continues the run exactly."""
        trigger = self._trigger(expect={"prefect.flow-run.Crashed"}, for_each={"prefect.resource.id"})
        action = ChangeFlowRunState(
            state=StateType.SCHEDULED, name="AwaitingRetry", message="crashed; resuming the run"
        )
        await self._create("resume", trigger, action)

    async def crash_when_silent(self, heartbeat_seconds: float, patience_seconds: float) -> None:
        """Mark a flow run as crashed when its heartbeats stop: its machine, which should have reported it, is gone.

        Args:
            heartbeat_seconds: Between two heartbeats.
            patience_seconds: How long the run goes on without the Prefect server, which then lacks its heartbeats.
        """
        ended = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed", "Suspended")}
        trigger = self._trigger(
            expect={"prefect.flow-run.heartbeat", "prefect.flow-run.AwaitingRetry", *ended},
            after={"prefect.flow-run.heartbeat"},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            within=timedelta(seconds=patience_seconds + HEARTBEATS_MISSED * heartbeat_seconds),
        )
        action = ChangeFlowRunState(state=StateType.CRASHED, message="no heartbeat: its process is gone")
        await self._create("silent", trigger, action)

    async def run_on_checkpoint(self, what: str, deployment: UUID, parameters: dict[str, str]) -> None:
        """Run a deployment, e.g. an evaluation, for every complete checkpoint.

        Args:
            what: The name of what is run.
            deployment: The id of the deployment.
            parameters: Further parameters; `{{ event.payload.step }}` in them is the checkpoint's version.
        """
        run = {"run": "{{ event.payload.run_id }}", "runs_dir": "{{ event.payload.runs_dir }}"}
        action = RunDeployment(
            source="selected",
            deployment_id=deployment,
            parameters={**run, **parameters},
            job_variables=self._job_variables,
        )
        await self._create(what, self._trigger(expect={CheckpointSaved.event}), action)

    async def suspend_on_collapse(self) -> None:
        """Suspend a run whose reward collapses: its workers are freed, and `Resume` in the UI continues it."""
        await self._create("collapse", self._trigger(expect={RewardCollapsed.event}), SuspendFlowRun())

    def _trigger(self, **settings: object) -> EventTrigger:
        related = {
            "prefect.resource.role": "deployment",
            "prefect.resource.id": f"prefect.deployment.{self._deployment}",
        }
        return EventTrigger.model_validate({"match_related": related, **settings})

    async def _create(self, name: str, trigger: EventTrigger, action: ActionTypes) -> None:
        full_name = f"sluice: {self._name}: {name}"
        automation = Automation(name=full_name, trigger=trigger, actions=[action])
        try:
            existing = await Automation.aread(name=full_name)
        except ValueError:  # there is none of this name
            await automation.acreate()
            return
        automation.id = existing.id
        await automation.aupdate()


async def find_block(client: PrefectClient, block: str) -> UUID:
    """Return the id of a notification block, given as TYPE/NAME, e.g. slack-webhook/team.

    Raises:
        ConfigError: There is no such block.
    """
    kind, _, name = block.partition("/")
    try:
        return (await client.read_block_document_by_name(name, kind)).id
    except ObjectNotFound:
        raise ConfigError(
            f"--notify {block}: the Prefect server has no such block; give TYPE/NAME, e.g. slack-webhook/team, of one "
            "that `prefect block ls` lists"
        ) from None
