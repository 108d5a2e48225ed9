"""The doctor: looks at a running fleet for a few seconds and says what is wrong, by which figures, and what to change.

`looking` asks servers over HTTP and fills a `Window`; the rules are pure functions over that window, in one table
(`rules.RULES`); `report` shows what they found. Nothing is sent to an engine: no prompt, no change of state.
"""
