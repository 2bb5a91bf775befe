"""A clerk that sells from a stock it shares with other clerks, and never sells what is gone."""

from __future__ import annotations

import sys

from ringfence import agent
from ringfence.agent import Conflict

wanted = int(sys.argv[1])

with agent.boot() as rf:
    sold = 0
    while sold < wanted:
        try:
            with rf.state.transaction() as tx:
                left = tx.get("stock/kettles", 20)
                if left == 0:
                    break
                tx.put("stock/kettles", left - 1)
                tx.put(f"stock/sold/{rf.identity.agent}", sold + 1)
        except Conflict:
            continue  # the other clerk was faster: look again
        sold += 1
    print(f"sold {sold} of {wanted}", flush=True)
