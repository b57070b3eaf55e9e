"""Questions to a Prefect server: whether it responds, and whether it is one that this Sluice can use."""

import base64
import json
import urllib.error
import urllib.request
from http.client import HTTPException
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

from schemas.errors import ServiceError

TIMEOUT_SECONDS = 5
LOCAL = (
    "for a local server, leave out services.prefect_api_url, unset PREFECT_API_URL and, if the profile has it: prefect "
    "config unset PREFECT_API_URL"
)
FIX = f"check services.prefect_api_url and PREFECT_API_URL; {LOCAL}"


def prefect_responds(api_url: str, key: str | None = None) -> bool:
    """Return whether a healthy Prefect server responds at `api_url`; `key` is that of Prefect Cloud."""
    try:
        return bool(_get(f"{api_url}/health", _bearer(key)))
    except OSError:
        return False


def prefect_is_gone(api_url: str) -> bool:
    """Return whether nothing is at `api_url`; a server that doesn't respond in time may only be slow."""
    try:
        _get(f"{api_url}/health")
    except OSError as error:
        return not isinstance(getattr(error, "reason", error), TimeoutError)
    return False


def check_prefect_api(api_url: str, login: str | None = None, key: str | None = None) -> None:
    """Check that a healthy Prefect server of the installed minor version responds.

    Args:
        api_url: The API's URL, which ends with `/api`.
        login: `user:password`, Prefect's setting `PREFECT_API_AUTH_STRING`; None: without.
        key: The API key of Prefect Cloud, Prefect's setting `PREFECT_API_KEY`, whose version is not checked.

    Raises:
        ServiceError: Nothing responds, something else than Prefect, another version of it, or one that refuses `login`.
    """
    if not _is_url(api_url):
        raise ServiceError(f"{api_url!r} is not the URL of a Prefect API, such as http://127.0.0.1:4200/api; {FIX}")
    try:
        if key is not None:
            if _get(f"{api_url}/health", _bearer(key)) is None:
                raise ServiceError(f"{api_url} refuses PREFECT_API_KEY; log in again: prefect cloud login")
            return
        is_healthy, found = _get(f"{api_url}/health"), _get(f"{api_url}/admin/version", _basic(login))
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise ServiceError(f"no Prefect API responds at {api_url} ({reason}); {FIX}") from None
    if is_healthy is not True:
        raise ServiceError(f"what responds at {api_url} is not a Prefect API, whose URL ends with /api; {FIX}")
    if found is None:
        raise ServiceError(
            f"the Prefect server at {api_url} refuses the login; set PREFECT_API_AUTH_STRING to user:password, as the "
            "server's PREFECT_SERVER_API_AUTH_STRING"
        )
    own = version("prefect")
    if str(found).split(".")[:2] != own.split(".")[:2]:
        raise ServiceError(
            f"the Prefect server at {api_url} has version {found}, but version {own} is installed here; use the same "
            f"minor version on both sides; {LOCAL}"
        )


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        is_complete = parts.hostname is not None and parts.port != 0
    except ValueError:  # a port that is not a number, or an open bracket
        return False
    return is_complete and text.startswith(("http://", "https://")) and not any(map(str.isspace, text))


def _basic(login: str | None) -> str | None:
    return None if login is None else f"Basic {base64.b64encode(login.encode()).decode()}"


def _bearer(key: str | None) -> str | None:
    return None if key is None else f"Bearer {key}"


def _get(url: str, authorization: str | None = None) -> Any:
    try:
        request = urllib.request.Request(url)
        if authorization is not None:
            request.add_header("Authorization", authorization)
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            return json.load(response)
    except (urllib.error.HTTPError, ValueError):  # something responds, but not as expected
        return None
    except OSError:
        raise
    except HTTPException:  # something responds that isn't HTTP, or that ends within its answer
        return None
