"""What a user may pass as `pg_options`."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_bps.config import Config


class Options:
    """Settings of one process group, before the environment's: `init_process_group(..., pg_options=Options(...))`.

    Args:
        settings: fields of torch_bps.config.Config.

    Raises:
        ConfigError: no such setting, or a value that it cannot have.
    """

    def __init__(self, **settings: object) -> None:
        self.settings = settings
        self.config()

    def config(self) -> Config:
        """Return the whole configuration: these settings, then the environment, then the defaults."""
        from torch_bps.config import Config

        return Config.load(None, **self.settings)

    def __repr__(self) -> str:
        return f"Options({', '.join(f'{name}={value!r}' for name, value in self.settings.items())})"


def config_from(pg_options: object) -> Config:
    """Return the configuration for what was passed as `pg_options` (None, Options, or another backend's)."""
    if pg_options is None:
        return Options().config()
    if not isinstance(pg_options, Options):
        # "cpu:byteps,cuda:nccl" hands one object to all backends
        warnings.warn(
            f"byteps ignores pg_options of type {type(pg_options).__name__}; it takes torch_bps.Options", stacklevel=2
        )
        return Options().config()
    return pg_options.config()
