"""The local Prefect server's write transactions, on Prefect's own database configuration."""

import asyncio
from pathlib import Path

from prefect.server.database.configurations import AioSqliteConfiguration
from sqlalchemy import text

import infra.services.prefect_server  # noqa: F401  what the local server runs with


def test_transactions_that_read_before_they_write_wait_for_one_another(tmp_path: Path) -> None:
    database = AioSqliteConfiguration(f"sqlite+aiosqlite:///{tmp_path}/prefect.db")

    async def add_one() -> None:
        session = await database.session(await database.engine())
        async with session, database.begin_transaction(session):
            number = (await session.execute(text("SELECT number FROM numbers"))).scalar_one()
            await asyncio.sleep(0.01)  # begun as Prefect does, the others read the same number by now
            await session.execute(text("UPDATE numbers SET number = :number"), {"number": number + 1})

    async def add_several() -> int:
        engine = await database.engine()
        async with engine.begin() as connection:
            await connection.execute(text("CREATE TABLE numbers AS SELECT 0 AS number"))
        await asyncio.gather(*(add_one() for _ in range(4)))
        async with engine.connect() as connection:
            return int((await connection.execute(text("SELECT number FROM numbers"))).scalar_one())

    assert asyncio.run(add_several()) == 4
