"""`warmlane top`: the live page in a terminal. It reads the page's own stream and changes nothing but drains.

`frames` is what comes, `stream` brings it and comes back when the gateway does, `picture` is what is known of it,
`view` what the person at the keys looks at, `screen` makes lines of both, `terminal` has the keys, `session` joins all.
"""
