"""A process that serves the fake model until it is told to stop. Arguments: seconds of a step, seconds of
shutdown timeout."""

import sys
from functools import partial

from server_rig import ScriptedRunner, build_service, serve_service, slow

from legato.server.transport.event_loop import Turns, run
from legato.server.transport.shutdown import exit_process
from legato.server.transport.sockets import bind

if __name__ == "__main__":
    step_seconds, shutdown_timeout = map(float, sys.argv[1:])
    service = build_service(ScriptedRunner(before=slow(step_seconds)))
    on_ready = partial(print, flush=True)
    served = serve_service(
        service, bind("127.0.0.1", 0), on_ready=on_ready, shutdown_timeout=shutdown_timeout
    )
    run(served, Turns())
    print("ended")
    exit_process()
