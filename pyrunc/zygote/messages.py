"""What the server and the zygote say to each other. One JSON object per packet (pyrunc.ipc).

`fork`   {"id","call","function","arguments"} + fds        -> {"id","ok":{"pid","prepared"}}: a child that outlives server and
         zygote; `prepared` is what it says that it has made ahead (`prepare` of its module, see spare), empty for nothing
`run`    {"id","call","function","arguments","environment","timeout_s"} + [stdin, stdout, stderr, result socket, fds…]
         -> {"id","ok":{"exit_code","timed_out"}} when it ended
`cancel` {"id","call","run"}: kill the errand with that id; no answer of its own
`keep`   {"id","call","function"}: from now on have a child ready for the next `fork` of that function; no answer
First of all the zygote says {"ready": pid} or {"error": …}.

On its result socket an errand sends at most one message: {"ok": true} + the descriptors that it hands over, or
{"error": …} (pyrunc.errors).
"""

from __future__ import annotations

FORK = "fork"
RUN = "run"
CANCEL = "cancel"
KEEP = "keep"
STDIO_OF_ERRAND = 4  # stdin, stdout, stderr, result socket come before the errand's own descriptors
