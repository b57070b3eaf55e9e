"""Handles, plans, reports and configuration: pydantic values that are sent as JSON and never hold bulk data."""
