"""Secrets from blocks of the Prefect server, as environment variables of the driver and of the run's workers."""

import asyncio
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.utilities.templating import resolve_block_document_references

from infra.services.local import LocalServices
from schemas.config.runtime import ServicesConfig
from schemas.errors import ConfigError, ServiceError


def take_secrets(config: ServicesConfig, *, starts: bool = False) -> None:
    """Set the environment variables of `services.secrets` in this process, to the present values of their blocks.

    Args:
        config: The services.
        starts: Whether a local Prefect server may be started.

    Raises:
        ServiceError: No Prefect server is configured or running, or it doesn't respond.
        ConfigError: A block doesn't exist, or what is named in it is no text.
    """
    if not config.secrets:
        return
    local = LocalServices(Path(config.dir))
    configured = config.prefect_api_url or PREFECT_API_URL.value()
    if starts and configured is None:
        local.start(prefect=True, ray=False)
    if (api_url := configured or local.prefect_api_url) is None:
        raise ServiceError(
            "services.secrets are blocks of a Prefect server, and none is configured or running; set PREFECT_API_URL "
            "or services.prefect_api_url"
        )
    with ThreadPoolExecutor(1) as thread:  # an event loop may run in this one
        found = thread.submit(lambda: asyncio.run(_resolve(config.secrets, api_url))).result()
    os.environ.update(found)


async def _resolve(references: Mapping[str, str], api_url: str) -> dict[str, str]:
    with temporary_settings({PREFECT_API_URL: api_url}):
        async with get_client() as client:
            found = {}
            for name, reference in references.items():
                key = f"services.secrets.{name} = {reference!r}"
                try:
                    value = await resolve_block_document_references(reference, client=client)
                except ObjectNotFound:
                    raise ConfigError(
                        f"{key}: the Prefect server at {api_url} has no such block; create it in its UI (Blocks), or "
                        "correct the name"
                    ) from None
                except ValueError:
                    raise ConfigError(f"{key}: the block has no such value; name one that it has") from None
                except (httpx.TransportError, PrefectHTTPStatusError) as error:
                    raise ServiceError(f"{key}: the Prefect server at {api_url} doesn't give it: {error}") from None
                if not isinstance(value, str) or not value:
                    raise ConfigError(
                        f"{key}: the block holds {type(value).__name__}, expected a text that isn't empty"
                    )
                found[name] = value
            return found
