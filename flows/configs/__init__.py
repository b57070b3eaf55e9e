"""The built-in configs."""

from pathlib import Path

CONFIGS = Path(__file__).parent


def find_config(name: str) -> Path:
    """Return the path of a config file, or of the built-in config of that name."""
    built_in = CONFIGS / f"{name}.toml"
    return built_in if built_in.exists() and not Path(name).exists() else Path(name)
