"""Where Prefect persists the results of a run's stages: its ledger."""

import hashlib
from pathlib import Path

from prefect.filesystems import RemoteFileSystem

from infra.storage.runs import RunDirectory

_DIGEST_CHARACTERS = 16


async def ledger_storage(directory: RunDirectory) -> Path | RemoteFileSystem:
    """Return the result storage of the stages of a run.

    Prefect takes a remote file system only as a block that its server has. The block is saved at each start of a run,
    and nothing is read back from it: another server, or one that was wiped, changes nothing. Credentials are not part
    of it.

    Raises:
        httpx.HTTPError: The Prefect server doesn't respond, or refuses the block.
    """
    if directory.is_local:
        return Path(directory.ledger.place)
    # Other processes write there, too: a cached listing would be out of date.
    block = RemoteFileSystem(basepath=directory.ledger.place, settings={"use_listings_cache": False})
    digest = hashlib.sha256(directory.url.encode()).hexdigest()[:_DIGEST_CHARACTERS]
    await block.asave(f"sluice-ledger-{digest}", overwrite=True)
    return block
