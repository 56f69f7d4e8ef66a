"""Every setting, once: the table (`settings`), and how it is filled (`load`)."""

from legato.config.load import as_sections, load_settings
from legato.config.settings import (
    EngineSettings,
    ModelSettings,
    ServerSettings,
    Settings,
    fields,
    in_seconds,
)

__all__ = [
    "EngineSettings",
    "ModelSettings",
    "ServerSettings",
    "Settings",
    "as_sections",
    "fields",
    "in_seconds",
    "load_settings",
]
