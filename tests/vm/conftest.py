"""The folder `inside` is collected in the guest alone; on the host one test boots the guest and runs it there."""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("PYRUNC_GUEST") else ["inside"]
