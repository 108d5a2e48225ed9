"""Several worker processes behind one listener (`warmlane serve --workers N`): a parent that accepts connections and
hands them out, and workers that are gateways each, with one view.

`parent` starts and ends the workers, `doorman` hands connections to them, `hub` passes on what they tell each other.
In a worker `member` is the other end of all three. `messages` is what they say, `totals` adds up their metrics.
"""
