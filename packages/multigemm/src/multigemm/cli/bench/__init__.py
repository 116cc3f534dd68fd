"""``multigemm bench``: cases -> operands -> ours and peers, timed side by side -> a results file."""
