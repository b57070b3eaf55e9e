"""Arrow columns: `jagged` builds and inspects them, `codec` validates and encodes them, `gather` reads row ranges,
`turns` has the values of turns by token.
"""
