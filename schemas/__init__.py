"""Handles, plans, reports and configuration: pydantic values that travel as JSON and never hold bulk data."""
