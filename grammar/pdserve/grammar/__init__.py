"""What an answer may be: a grammar becomes a compiled one, and where an answer stands in it is known token by token.

The one room that knows llguidance. The router compiles here to refuse at the door what cannot be served; the nodes compile
the same text with the same limits, so that both agree. No tensors, no sockets, no event loop: `compiler` has a thread of its own,
`engine.grammar` applies what is compiled to a row of logits. Steps of the walk: router admission, and every sampled row.
"""
