"""Deployments: the flows that Prefect starts, on this machine (`sluice serve`) or in a work pool (`sluice deploy`)."""
