"""The handler of one channel of a client: until it has said who it is, then its frames go to the service.

Made by server.service.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch_bps
from torch_bps.errors import PeerLostError, ProtocolError, UnsupportedError, VersionError
from torch_bps.server.membership import Process, send_control
from torch_bps.transport.base import Buffer, Channel
from torch_bps.wire import control
from torch_bps.wire.header import CONTROL, WIRE_VERSION, Header

if TYPE_CHECKING:
    from torch_bps.server.service import Service

log = logging.getLogger("torch_bps.server")


class Connection:
    """Thread safety: the reactor's thread."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._process: Process | None = None

    def on_open(self, channel: Channel) -> None:
        """Wait for the client's first message."""

    def on_header(self, channel: Channel, header: Header) -> Buffer | None:
        """Receive into the service's own memory, so that a sum can be sent from where it was made."""
        if header.nbytes > 65536 and self._process is None:
            raise ProtocolError(f"{header.nbytes} bytes before a hello")
        return None

    def on_frame(self, channel: Channel, header: Header, buffer: Buffer | None) -> None:
        """Dispatch to the service."""
        if header.frame != CONTROL:
            if self._process is None:
                if buffer is not None:
                    buffer.release()
                raise ProtocolError("a data frame before a hello")
            self._service.frame(self._process, channel, header, buffer)
            return
        if buffer is None:
            raise ProtocolError("an empty control message")
        try:
            message = control.decode(buffer.view)
        finally:
            buffer.release()
        if self._process is not None:
            self._service.message(self._process, message)
        elif isinstance(message, control.Hello):
            self._hello(channel, message)
        elif isinstance(message, control.Attach):
            self._process = self._service.membership.attach(message, channel)
        else:
            raise ProtocolError(f"the first message must be a hello, not {type(message).__name__}")

    def _hello(self, channel: Channel, message: control.Hello) -> None:
        service = self._service
        if message.version != WIRE_VERSION:
            error = VersionError(
                f"server {service.name} speaks wire version {WIRE_VERSION}, rank {message.rank} on {message.host} "
                f"{message.version}",
                hint="install the same torch_bps version on every machine",
            )
            send_control(channel, control.Refused("VersionError", error.what, error.hint))
            channel.close_when_sent()
            return
        self._process = service.membership.hello(message, channel, time.monotonic())
        self._process.send(
            control.Welcome(
                service.name,
                service.endpoints,
                service.node,
                release=torch_bps.__version__,
                nic_gbps=service.nic_gbps,
            )
        )
        service.on_news(f"{self._process} is here")

    def on_close(self, channel: Channel, error: Exception | None) -> None:
        """A process whose channel ends without a Bye is lost."""
        self._service.channels.discard(channel)
        process = self._process
        if process is not None:
            if isinstance(error, (ProtocolError, UnsupportedError, PeerLostError)):
                text = error.what
            else:
                text = f"its connection ended ({error})" if error else "its connection ended"
            self._service.lost(process, text)
        elif error is not None:
            log.warning("connection from %s refused: %s", channel.peer, error)
