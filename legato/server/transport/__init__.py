"""HTTP over sockets: connections, limits, errors, server-sent events, start and shutdown. It knows no
route."""
